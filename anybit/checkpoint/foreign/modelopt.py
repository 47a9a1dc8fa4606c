"""ModelOpt checkpoints (NVIDIA): NVFP4, FP8, MXFP4 and MXFP8.

`<layer>.weight` holds elements, `<layer>.weight_scale` their scales; NVFP4's scales are e4m3, in
units of `<layer>.weight_scale_2`. Whatever an algorithm's name is, dtypes and shapes say which of
these a layer is.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anybit.checkpoint.foreign.base import Layer, Part, option, parts
from anybit.checkpoint.foreign.floats import float_layer
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
ALGORITHMS = (
    "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "NVFP4_SVDQUANT", "FP8", PER_TOKEN,
    "FP8_PB_WO", "FP8_PB_REAL", "MXFP4", "W4A8_MXFP4_FP8", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
FIXED = "activations were quantized there, and stay in 16 bits here"


def layers(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Layer]:
    """The quantized layers of a ModelOpt checkpoint."""
    inner = config.get("quantization")
    inner = inner if isinstance(inner, dict) else config
    algorithm = option(inner, "quant_algo", ALGORITHMS, "modelopt")
    return {part.name: layer(part, algorithm) for part in parts("weight_scale", stored)}


def layer(part: Part, algorithm: str) -> Layer:
    scaled = part.has("input_scale")
    part.skip("input_scale", "output_scale")
    for key in ("pre_quant_scale", "weight_quantizer._svdquant_lora_a"):
        if part.has(key):
            raise InvalidInput(f"modelopt: {part.name} has {key}, which cannot be read")
    number = "weight_scale_2" if part.has("weight_scale_2") else None
    found = float_layer(part, "weight", "weight_scale", number=number)
    if algorithm == PER_TOKEN:
        return replace(found, activation="fp8")
    return replace(found, note=FIXED if scaled else "")
