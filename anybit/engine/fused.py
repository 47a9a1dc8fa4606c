"""What happens between quantized products: residual + RMSNorm, SiLU * up, dense products, tokens.

On a GPU, each is one kernel that is launched while the previous one ends; on a CPU, one that LLVM
compiles. Without those, it is plain torch, which is the definition.

Where the next layer multiplies quantized activations, they leave here as `Activations` on a GPU:
quantized once, in the same kernel. So do products that it wants rotated.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.kernels.backend import Activations, has_triton


@cache
def kernels_of(name: str) -> Any:
    """A module of kernels; looking one up anew would take longer than a kernel's arguments do."""
    return import_module(f"anybit.kernels.{name}")


def usable(x: Tensor) -> bool:
    """Whether Triton's kernels can work on x."""
    return x.is_cuda and has_triton()


def compiled(x: Tensor) -> bool:
    """Whether kernels that LLVM compiles can work on x."""
    if x.device.type != "cpu":
        return False
    from anybit.kernels.native import fused

    return fused.able()


def between(*tensors: Tensor) -> Any:
    """The module whose kernels work on these between products; None where torch does."""
    if usable(tensors[0]):
        return kernels_of("triton.activation")
    if compiled(tensors[0]):
        kernels = kernels_of("native.fused")
        return kernels if kernels.suits(*tensors) else None
    return None


def dense(x: Tensor, weight: Tensor) -> Any:
    """The module whose kernels multiply these faster than torch; None where there is none."""
    family = "triton" if usable(x) else "native" if compiled(x) else None
    kernels = family and kernels_of(f"{family}.dense")
    return kernels if kernels and kernels.suits(x, weight) else None


def placed(weight: Tensor) -> Tensor:
    """A dense weight where its device reads it fastest."""
    if not compiled(weight):
        return weight
    from anybit.kernels.native import dense as kernels

    return kernels.placed(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, rounded to the weight's dtype before the product with it, to x's after."""
    x32 = x.float()
    norm = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * norm.to(weight.dtype)).to(x.dtype)


class Wanted(NamedTuple):
    """How a layer wants its input.

    Attributes:
        activation: the notation in which it multiplies; None: x's dtype.
        vector: (K,), of the rotation before that; None: there is none.
        rotated: whether it takes inputs that are rotated and not quantized.
    """

    activation: str | None = None
    vector: Tensor | None = None
    rotated: bool = False

    def on_the_way(self, x: Tensor) -> bool:
        """Whether the kernel that makes x (T, K) also makes this of it."""
        if self.activation is None or not usable(x):
            return False
        return self.vector is None or bool(kernels_of("triton.activation").rotates(x.shape[1]))


AS_IT_IS = Wanted()


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, wanted: Wanted = AS_IT_IS
) -> tuple[Tensor | Activations, Tensor]:
    """RMSNorm of the sum of x and delta (T, hidden), as it is wanted, and the sum."""
    kernels = between(x) if delta is None else between(x, delta)
    if wanted.on_the_way(x):
        norm, sums = (delta, weight, eps), wanted.activation == "int8"
        codes, scale, total, x_sum = kernels.quantize(
            x, wanted.activation, norm=norm, sums=sums, vector=wanted.vector
        )
        return Activations(codes, scale, total, x.dtype, wanted.vector is not None), x_sum
    if kernels is not None:
        return kernels.add_norm(x, delta, weight, eps)
    x = x if delta is None else x + delta
    return rms_norm(x, weight, eps), x


def silu_mul(gate: Tensor, up: Tensor, wanted: Wanted = AS_IT_IS) -> Tensor | Activations:
    """SiLU(gate) * up, both (T, N), as the next layer wants it."""
    kernels = between(up, gate)
    if wanted.on_the_way(up):
        codes, scale, sums = kernels.silu_quantize(gate, up, wanted.activation, wanted.vector)
        return Activations(codes, scale, sums, up.dtype, wanted.vector is not None)
    if wanted.rotated and wanted.vector is not None and usable(up):
        nothing = up.new_empty(0)
        x = kernels.rotate(up, wanted.vector, False, gate)
        return Activations(x, nothing, nothing, up.dtype, rotated=True)
    if kernels is not None:
        return kernels.silu_mul(gate, up)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, K) times a dense weight (N, K)."""
    kernels = dense(x, weight)
    if kernels is not None:
        return kernels.linear(x, weight, bias)
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
