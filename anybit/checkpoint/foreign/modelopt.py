"""ModelOpt checkpoints (NVIDIA): NVFP4, FP8, MXFP4, MXFP8, and integers of 4 and 8 bits.

`<layer>.weight` holds elements, `<layer>.weight_scale` their scales; NVFP4's scales are e4m3, in
units of `<layer>.weight_scale_2`. Integers are int8 (N, K), or two to a byte, of rows 2 i and
2 i + 1: (N / 2, K), with a float scale for each row or group. Whatever an algorithm's name is,
dtypes and shapes say which of these a layer is. Inputs are multiplied by
`<layer>.pre_quant_scale` (K,) where there is one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    TOKENS_STAY,
    Given,
    Layer,
    Part,
    decoded,
    option,
    uniform,
)
from anybit.checkpoint.foreign.floats import BYTES, checked, float_layer
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
ALGORITHMS = (
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "FP8",
    PER_TOKEN,
    "FP8_PB_WO",
    "FP8_PB_REAL",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
    "MIXED_PRECISION",
)
SMOOTHED = "its inputs have scales of their own (pre_quant_scale), which join the weight"


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a ModelOpt checkpoint."""
    inner = given.config.get("quantization")
    inner = inner if isinstance(inner, dict) else given.config
    usual = option(inner, "quant_algo", ALGORITHMS, "modelopt")
    option(inner, "has_zero_point", (False,), "modelopt")
    own = inner.get("quantized_layers")
    own = own if isinstance(own, dict) else {}
    out = {}
    for part in given.parts("weight_scale"):
        settings = own.get(given.naming(part.name), own.get(part.name))
        settings = settings if isinstance(settings, dict) else {"quant_algo": usual}
        what = f"modelopt: {part.name}"
        option(settings, "has_zero_point", (False,), what)
        out[part.name] = layer(part, option(settings, "quant_algo", ALGORITHMS, what))
    return out


def layer(part: Part, algorithm: str) -> Layer:
    fixed = part.has("input_scale")
    part.skip("input_scale", "output_scale")
    if part.has("weight_quantizer._svdquant_lora_a"):
        raise InvalidInput(
            f"modelopt: {part.name} has weight_quantizer._svdquant_lora_a, which cannot be read"
        )
    smooth = part.find("pre_quant_scale", FLOATS) if part.has("pre_quant_scale") else None
    found = whole_numbers(part) or float_layer(
        part, "weight", "weight_scale", number="weight_scale_2"
    )
    if algorithm == PER_TOKEN:
        found = replace(found, activation="fp8")
    else:
        found = replace(found, note=TOKENS_STAY if fixed else "")
    return found if smooth is None else smoothed(found, smooth, part.name)


def whole_numbers(part: Part) -> Layer | None:
    """A layer of integers; None where it holds floats."""
    both = (f"{part.name}.{key}" for key in ("weight", "weight_scale"))
    kinds = [part.stored[name].torch_dtype for name in both if name in part.stored]
    if len(kinds) != 2 or kinds[0] not in BYTES or kinds[1] not in FLOATS:
        return None
    weight = part.find("weight", BYTES, (ANY, ANY))
    scale = part.find("weight_scale", FLOATS)
    bits = 8 if weight.torch_dtype == torch.int8 else 4
    n, k = weight.shape[0] * 8 // bits, weight.shape[1]
    shape = [*scale.shape] + [1] * (len(scale.shape) == 1)
    if len(shape) != 2 or shape[0] != n or not shape[1] or k % shape[1]:
        raise InvalidInput(
            f"modelopt: {part.name}: scales of {scale.shape} do not fit integers of {bits} bits "
            f"in {weight.shape}"
        )
    checked(scale, f"{part.name}.weight_scale")
    part.skip("weight_scale_2")  # in which weights were rounded to fp8 on their way

    def codes() -> Tensor:
        data = weight.read().view(torch.uint8)
        if bits == 8:
            return data ^ 128
        return torch.stack((data & 15, data >> 4), 1).flatten(0, 1) ^ 8

    def scales() -> Tensor:
        return scale.read().reshape(n, -1)

    dtypes = {"scale": scale.torch_dtype}
    return uniform(part, (n, k), bits, codes, scales, None, shape[1], dtypes)


def smoothed(found: Layer, smooth: Stored, name: str) -> Layer:
    """The layer with its inputs' scales in the weight, which no format holds."""
    if smooth.shape != (found.shape[1],):
        raise InvalidInput(
            f"modelopt: {name}.pre_quant_scale: {smooth.shape} are no scales of "
            f"{found.shape[1]} inputs"
        )
    checked(smooth, f"{name}.pre_quant_scale")

    plain = decoded(found, SMOOTHED)

    def decode() -> Tensor:
        weight = plain.read()
        assert isinstance(weight, Tensor)
        return weight * smooth.read().float()

    return replace(plain, read=decode)
