"""The definition of a quantized linear layer, in plain torch; runs on every device.

Weights are decoded, rounded to the activation's dtype in units of their scale (what a matrix unit
multiplies), then scaled and summed in fp32. Every other backend is tested against this one.
"""

import torch
from torch import Tensor

from anybit.format import Format, Packed, grouped, tensor_shapes, ungroup

INT8_LARGEST, FP8_LARGEST = 127.0, 448.0


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    return None


def prepare(
    packed: Packed, activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Canonical planes and grid, as they are."""
    return list(packed.tensors().values())


def release(prepared: list[Tensor]) -> list[Tensor] | None:
    return None


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
    """x (..., K) -> (..., n) in x's dtype; with a scale, of codes and in `dtype`."""
    shape = (n, x.shape[-1])
    packed = Packed.from_tensors(
        fmt, shape, dict(zip(tensor_shapes(fmt, shape), prepared, strict=True))
    )
    dtype = x.dtype if scale is None else dtype or torch.float32
    tokens = quantized_activation(x, activation) if scale is None else x.float() * scale[..., None]
    y = tokens @ operand_weight(packed, dtype).T
    return (y if bias is None else y + bias.float()).to(dtype)


def operand_weight(packed: Packed, dtype: torch.dtype) -> Tensor:
    """(N, K) fp32: decoded weights whose unscaled values went through `dtype`."""
    values, scale = packed.values().to(dtype).float(), packed.grid["scale"].float()
    return ungroup(grouped(values, scale) * scale[..., None])


def quantized_activation(x: Tensor, activation: str | None) -> Tensor:
    """x in fp32, after a round trip through the activation's notation if there is one."""
    if activation is None:
        return x.float()
    codes, scale = quantize_tokens(x, activation)
    return codes.float() * scale


def quantize_tokens(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Per-token symmetric quantization: codes (..., K) int8 or float8_e4m3fn, scale (..., 1) fp32.

    The scale is the largest magnitude of the token over 127 (int8) or 448 (fp8).
    """
    x = x.float()
    largest = INT8_LARGEST if activation == "int8" else FP8_LARGEST
    scale = x.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    if activation == "int8":
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
    return (x / scale).to(torch.float8_e4m3fn), scale
