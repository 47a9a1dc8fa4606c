"""torch's own int8 operators for the CPU, where they multiply a format's weights exactly.

They serve every format whose values are integers within int8 and whose rows have one scale. Weights
become int8 at load: twice the bytes of int4, half of bf16. The operators see a scale of 1 and the
real one is applied afterwards in fp32, because their own arithmetic would round it to bf16.

`torch._int_mm` is not exact on every processor: x86 without VNNI adds products in 16 bits, which
saturate. It is proved at its first use; where it is wrong, fp32 sums take its place.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels import dense
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.reference import quantize_tokens

log = logging.getLogger(__name__)

FEW_TOKENS = 8  # up to here torch's int8 weight-only operator beats one bf16 matrix product
SLICE = 1024  # columns whose products, of at most 128 * 128, fp32 sums exactly in any order


def refuse(layer: LayerSpec) -> str | None:
    fmt, shape = layer.format, layer.shape
    if fmt.operand != "int8":
        return "its values are no 8-bit integers"
    if fmt.entries()["scale"].group:
        return "torch's int8 operators take one scale a row, no groups"
    if layer.activation == "fp8":
        return "torch has no fp8 product for the CPU"
    if shape[1] % 16 or shape[0] % 16:
        return f"torch's int8 operators want N and K to be multiples of 16, not {shape}"
    return None


def decodes(activation: str | None) -> bool:
    return activation is None


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """The layout is an int8 weight (N, K), its row scale (N,) fp32, and `dense`'s copy if any."""
    weight = packed.values().to(torch.int8)
    layout = weight, packed.grid["scale"].float().flatten()
    if activation is not None or not decoded:
        return Prepared(packed.format, packed.shape, activation, layout)
    copy = dense.prepare(packed, activation, dtype)
    return copy._replace(layout=(*layout, *copy.layout))


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N)."""
    weight, row_scale, *copy = prepared.layout
    if isinstance(x, Activations):
        y = int8_product(x.codes, weight).float() * x.scale[:, None]
    elif prepared.activation == "int8":
        codes, scale = quantize_tokens(x, "int8")
        y = int8_product(codes, weight).float() * scale
    elif x.dtype == torch.bfloat16 and 0 < len(x) <= FEW_TOKENS:
        y = torch._weight_int8pack_mm(x.contiguous(), weight, x.new_ones(len(weight))).float()
    elif copy:
        return dense.linear(x, prepared._replace(layout=tuple(copy)), bias)
    elif x.dtype == torch.bfloat16:
        y = (x @ weight.bfloat16().T).float()
    else:  # unit scales would overflow fp16; fp32 deserves fp32
        y = x.float() @ weight.float().T
    y *= row_scale
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) int8 times weight (N, K) int8, transposed -> (M, N) int32, exact."""
    if int_mm_is_exact():
        return torch._int_mm(x, weight.T)
    y = torch.zeros(len(x), len(weight), dtype=torch.int32)
    for a, b in zip(x.split(SLICE, 1), weight.split(SLICE, 1), strict=True):
        y += (a.float() @ b.float().T).int()
    return y


@cache
def int_mm_is_exact() -> bool:
    """Whether `torch._int_mm` is exact on this processor, by its worst cases and random codes.

    x86 without VNNI adds products of unsigned and signed bytes in 16 bits. A kernel may offset the
    codes of either side, so that every pair of extremes is tried, for few rows and many.
    """
    random = torch.Generator().manual_seed(0)
    for m in (1, 17, 64):
        codes = [torch.full((m, 256), code, dtype=torch.int8) for code in (-128, -127, 127)]
        codes.append(torch.randint(-128, 128, (m, 256), generator=random).to(torch.int8))
        weights = [c[:1].expand(32, -1).contiguous() for c in codes]
        for x in codes:
            for weight in weights:
                exact = (x.double() @ weight.double().T).to(torch.int32)
                if not torch.equal(torch._int_mm(x, weight.T), exact):
                    log.warning(
                        "torch's int8 product saturates on this processor; "
                        "int8 activations are multiplied in fp32, exactly but slower"
                    )
                    return False
    return True
