"""FP8 checkpoints as DeepSeek publishes them, and transformers and others write them.

`<layer>.weight` is e4m3, and `<layer>.weight_scale_inv` what it is multiplied by: one float, or a
float or an e8m0 for every block of `weight_block_size`. Experts may be e2m1, two to a byte, with an
e8m0 for every 32 columns. AutoFP8 calls the same `weight_scale`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from anybit.checkpoint.foreign.base import FLOATS, Layer, Naming, Part, option, parts
from anybit.checkpoint.foreign.floats import POWERS, float_layer
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

TOOL = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")
BLOCKS = "activations were quantized to fp8 in blocks there, and stay in 16 bits here"
WHOLE = "activations were quantized to fp8 by a fixed scale there, and stay in 16 bits here"


def layers(
    config: Mapping[str, Any], stored: Mapping[str, Stored], naming: Naming = str
) -> dict[str, Layer]:
    """The quantized layers of an FP8 checkpoint."""
    option(config, "fmt", ("e4m3", "float8_e4m3fn"), TOOL)
    block = config.get("weight_block_size")
    sizes = isinstance(block, list) and [type(size) for size in block] == [int, int]
    if block is not None and not (sizes and min(block) > 0):
        raise InvalidInput(f"{TOOL}: weight_block_size is {block!r}, and not two whole numbers")
    found = [(part, key) for key in SCALES for part in parts(key, stored)]
    return {part.name: layer(part, key, block) for part, key in found}


def layer(part: Part, key: str, block: list[int] | None) -> Layer:
    """One layer. key: of its scales."""
    weight = part.find("weight", (torch.float8_e4m3fn, torch.uint8, torch.int8))
    scale = part.find(key, (*FLOATS, *POWERS))
    part.used.clear()
    part.skip("activation_scale", "input_scale", "output_scale")
    blocked = block is not None and weight.torch_dtype == torch.float8_e4m3fn
    whole = all(size == 1 for size in scale.shape)
    found = float_layer(
        part,
        "weight",
        key,
        block=(block[0], block[1]) if block and blocked and not whole else None,
    )
    return replace(found, note=WHOLE if whole else BLOCKS)
