"""torch's own int8 operators for the CPU, where they multiply a format's weights exactly.

They serve every format whose values are integers within int8 and whose rows have one scale. Weights
become int8 at load: twice the bytes of int4, half of bf16. The operators see a scale of 1 and the
real one is applied afterwards in fp32, because their own arithmetic would round it to bf16.
"""

from functools import cache

import torch
from torch import Tensor

from anybit.format import Format, Packed
from anybit.kernels.reference import quantize_tokens

FEW_TOKENS = 8  # up to here torch's int8 weight-only operator beats one bf16 matrix product


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    if fmt.operand != "int8":
        return "its values are no 8-bit integers"
    if fmt.entries()["scale"].group:
        return "torch's int8 operators take one scale a row, no groups"
    if activation == "fp8":
        return "torch has no fp8 product for the CPU"
    if activation == "int8" and not int8_product_is_exact():
        return "torch's int8 product saturates on this processor"
    if shape[1] % 16 or shape[0] % 16:
        return f"torch's int8 operators want N and K to be multiples of 16, not {shape}"
    return None


def prepare(
    packed: Packed, activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """[int8 weight (N, K), row scale (N,) fp32]."""
    return [packed.values().to(torch.int8), packed.grid["scale"].float().flatten()]


def release(prepared: list[Tensor]) -> list[Tensor] | None:
    return prepared


def linear(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    activation: str | None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    weight, row_scale = prepared
    rows = x.reshape(-1, x.shape[-1])
    if activation == "int8":
        if scale is None:
            codes, token_scale = quantize_tokens(rows, "int8")
        else:
            codes, token_scale = rows, scale.reshape(-1, 1)
        y = torch._int_mm(codes, weight.T).float() * token_scale
    elif x.dtype != torch.bfloat16:  # unit scales would overflow fp16; fp32 deserves fp32
        y = rows.float() @ weight.float().T
    elif 0 < len(rows) <= FEW_TOKENS:
        y = torch._weight_int8pack_mm(rows.contiguous(), weight, rows.new_ones(n)).float()
    else:
        y = (rows @ weight.bfloat16().T).float()
    y *= row_scale
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype if scale is None else dtype).view(*x.shape[:-1], n)


@cache
def int8_product_is_exact() -> bool:
    """Whether torch's int8 product is exact here: processors without VNNI may saturate."""
    a = torch.full((16, 64), -127, dtype=torch.int8)
    b = torch.full((64, 16), 127, dtype=torch.int8)
    return bool((torch._int_mm(a, b) == -127 * 127 * 64).all())
