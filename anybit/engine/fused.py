"""What happens between quantized products: residual + RMSNorm, SiLU * up, dense products, tokens.

On a GPU, each is one kernel that is launched while the previous one ends.

Where the next layer multiplies quantized activations, they leave here as `Activations`: quantized
once, in the same kernel. On a CPU, or without Triton, it is plain torch, which is the definition.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.kernels.backend import Activations


def usable(x: Tensor) -> bool:
    """Whether Triton's kernels can work on x."""
    return x.is_cuda and find_spec("triton") is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, rounded to the weight's dtype before the product with it, to x's after."""
    x32 = x.float()
    norm = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * norm.to(weight.dtype)).to(x.dtype)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, activation: str | None = None
) -> tuple[Tensor | Activations, Tensor]:
    """RMSNorm of the sum of x and delta (T, hidden), and the sum.

    activation: the notation in which the next layer wants the norm; None: x's dtype.
    """
    if not usable(x):
        x = x if delta is None else x + delta
        return rms_norm(x, weight, eps), x
    from anybit.kernels.triton import activation as kernels

    if activation is None:
        return kernels.add_norm(x, delta, weight, eps)
    norm, sums = (delta, weight, eps), activation == "int8"
    codes, scale, total, x_sum = kernels.quantize(x, activation, norm=norm, sums=sums)
    return Activations(codes, scale, total, x.dtype), x_sum


def silu_mul(gate: Tensor, up: Tensor, activation: str | None = None) -> Tensor | Activations:
    """SiLU(gate) * up, both (T, N), in the notation that the next layer wants."""
    if not usable(up):
        return F.silu(gate) * up
    from anybit.kernels.triton import activation as kernels

    if activation is None:
        return kernels.silu_mul(gate, up)
    return Activations(*kernels.silu_quantize(gate, up, activation), up.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, K) times a dense weight (N, K)."""
    if usable(x):
        from anybit.kernels.triton import dense

        if dense.suits(x, weight):
            return dense.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def likeliest(logits: Tensor, invalid: int) -> Tensor:
    """The token (B,) int32 of the largest of each row of logits (B, V).

    `invalid` where the largest is NaN or infinite.
    """
    if usable(logits) and logits.stride(1) == 1:
        from anybit.kernels.triton import likeliest as kernel

        return kernel.likeliest(logits, invalid)
    largest, tokens = logits.max(-1)
    return torch.where(largest.isfinite(), tokens, invalid).int()
