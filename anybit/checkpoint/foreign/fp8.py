"""FP8 checkpoints as DeepSeek publishes them, and transformers and others write them.

`<layer>.weight` is e4m3, and `<layer>.weight_scale_inv` what it is multiplied by: one float, or a
float or an e8m0 for every block of `weight_block_size`. Experts may be e2m1, two to a byte, with an
e8m0 for every 32 columns. AutoFP8 calls the same `weight_scale`.
"""

from dataclasses import replace

import torch

from anybit.checkpoint.foreign.base import FLOATS, Given, Layer, Part, block_of, option
from anybit.checkpoint.foreign.floats import POWERS, float_layer

TOOL = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")
BLOCKS = "activations were quantized to fp8 in blocks there, and stay in 16 bits here"
WHOLE = "activations were quantized to fp8 by a fixed scale there, and stay in 16 bits here"


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an FP8 checkpoint."""
    option(given.config, "fmt", ("e4m3", "float8_e4m3fn"), TOOL)
    block = block_of(given.config, "weight_block_size", TOOL)
    found = [(part, key) for key in SCALES for part in given.parts(key)]
    return {part.name: layer(part, key, block) for part, key in found}


def layer(part: Part, key: str, block: tuple[int, int] | None) -> Layer:
    """One layer. key: of its scales."""
    weight = part.find("weight", (torch.float8_e4m3fn, torch.uint8, torch.int8))
    scale = part.find(key, (*FLOATS, *POWERS))
    part.used.clear()
    part.skip("activation_scale", "input_scale", "output_scale")
    whole = all(size == 1 for size in scale.shape)
    blocked = weight.torch_dtype == torch.float8_e4m3fn and not whole
    found = float_layer(part, "weight", key, block=block if blocked else None)
    return replace(found, note=WHOLE if whole else BLOCKS)
