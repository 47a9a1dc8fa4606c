"""The definition of a quantized linear layer, in plain torch; runs on every device.

Weights are decoded, rounded to the activation's dtype in units of their scale (what a tensor core
multiplies), then scaled and summed in fp32. Every other backend is tested against this one.
"""

import torch
from torch import Tensor

from anybit.core.groups import grouped, ungroup
from anybit.core.packed import Packed, tensor_shapes
from anybit.kernels.backend import Activations, LayerSpec, Prepared

INT8_LARGEST, FP8_LARGEST = 127.0, 448.0
FINER = 256.0  # steps of a token's second row of codes in one of the first


def refuse(layer: LayerSpec) -> str | None:
    return None


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """Canonical planes and grid, as they are."""
    layout = tuple(packed.tensors().values())
    return Prepared(packed.format, packed.shape, activation, layout)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N), by the definition."""
    fmt, shape = prepared.format, prepared.shape
    tensors = dict(zip(tensor_shapes(fmt, shape), prepared.layout, strict=True))
    weight = operand_weight(Packed.from_tensors(fmt, shape, tensors), x.dtype)
    y = quantized_activation(x, prepared.activation) @ weight.T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def operand_weight(packed: Packed, dtype: torch.dtype) -> Tensor:
    """(N, K) fp32: decoded weights whose unscaled values went through `dtype`."""
    values, scale = packed.values().to(dtype).float(), packed.format.scales(packed.grid)
    return ungroup(grouped(values, scale) * scale[..., None])


def quantized_activation(x: Tensor | Activations, activation: str | None) -> Tensor:
    """x in fp32, after it was quantized if there is an activation dtype."""
    if isinstance(x, Activations):
        return x.codes.float() * x.scale[..., None]
    if activation is None:
        return x.float()
    codes, scale = quantize_tokens(x, activation)
    return codes.float() * scale


def rest(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """What int8 codes (M, K) with scales (M, 1) have left of x: codes with scales / FINER."""
    left = (x.float() / scale - codes.float()) * FINER
    return left.round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)


def over(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded on every device: GPUs multiply by the inverse of a number."""
    return x / torch.full_like(x, number)


def quantize_tokens(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Per-token symmetric quantization: codes (..., K) int8 or float8_e4m3fn, scale (..., 1) fp32.

    The scale is the largest magnitude of the token over 127 (int8) or 448 (fp8).
    """
    x = x.float()
    largest = INT8_LARGEST if activation == "int8" else FP8_LARGEST
    scale = over(x.abs().amax(-1, keepdim=True), largest)
    scale = torch.where(scale == 0, 1.0, scale)
    if activation == "int8":
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
    return (x / scale).to(torch.float8_e4m3fn), scale
