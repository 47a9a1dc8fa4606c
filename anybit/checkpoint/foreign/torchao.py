"""torchao checkpoints in safetensors: fp8, int8, fewer bits in bytes, MX and NVFP4.

    W[n, k] = weight_scale[n, g] * (weight_qdata[n, k] - weight_zero_point[n, g])

A tensor of torchao is stored by its parts, `<layer>._weight_qdata` and so on. Which class it was is
said by their dtypes and shapes; packed integers and swizzled scales cannot be read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import ANY, FLOATS, Layer, Part, parts, symmetric, uniform
from anybit.checkpoint.foreign.floats import FP8, POWERS, float_layer
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

BITS = 8
DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
NUMBER = "_weight_per_tensor_scale"
NOTE = "activations were quantized there, and stay in 16 bits here"


def layers(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Layer]:
    """The quantized layers of a torchao checkpoint."""
    note = NOTE if "DynamicActivation" in str(config.get("quant_type")) else ""
    return {part.name: replace(layer(part), note=note) for part in parts(DATA, stored)}


def layer(part: Part) -> Layer:
    data = part.find(DATA, (*FP8, torch.int8, torch.uint8), (ANY, ANY))
    scale = part.stored.get(f"{part.name}.{SCALE}")
    kind = scale.torch_dtype if scale else None
    nvfp4 = kind == torch.float8_e4m3fn and part.has(NUMBER)
    packed = data.torch_dtype == torch.uint8 and not (nvfp4 or kind in POWERS)
    if kind is None or packed or (kind == torch.float8_e4m3fn and not nvfp4):
        raise InvalidInput(
            f"torchao: {part.name} is {data.dtype} with scales of {scale and scale.dtype}; only "
            "fp8, int8, IntxUnpackedToInt8Tensor, MXTensor, and NVFP4Tensor with a number for the "
            "tensor can be read"
        )
    if data.torch_dtype in FP8 or nvfp4 or kind in POWERS:
        part.used.clear()
        part.skip(f"_weight_act{NUMBER.removeprefix('_weight')}")
        return float_layer(part, DATA, SCALE, number=NUMBER if nvfp4 else None)
    n, k = data.shape
    found = part.find(SCALE, FLOATS)
    groups = found.shape[-1] if found.shape[:1] == (n,) and len(found.shape) == 2 else 1
    if found.shape not in ((n,), (n, groups)) or not groups or k % groups:
        raise InvalidInput(
            f"torchao: {part.name}: scales of {found.shape} do not fit bytes of {data.shape}"
        )
    stored = part.find(ZERO, (torch.int8,), (n, groups)) if part.has(ZERO) else None

    def signed(t: Tensor) -> Tensor:
        return (t.to(torch.int16) + 2 ** (BITS - 1)).to(torch.uint8)

    return uniform(
        part,
        (n, k),
        BITS,
        codes=lambda: signed(data.read()),
        scale=lambda: found.read().reshape(n, groups),
        zero=None
        if stored is None or symmetric(signed(stored.read()), BITS)
        else lambda: signed(stored.read()),
        groups=groups,
        dtypes={"scale": found.torch_dtype},
    )
