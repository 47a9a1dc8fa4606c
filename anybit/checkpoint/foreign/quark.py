"""Quark checkpoints (AMD): MXFP4, MXFP6 in e2m3 or e3m2, and FP8.

`<layer>.weight` holds elements and `<layer>.weight_scale` their scales; both are those of
`floats.py`. A layer's own settings come before those of all.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from anybit.checkpoint.foreign.base import Layer, Part, option, parts
from anybit.checkpoint.foreign.floats import float_layer
from anybit.files.safetensors import Stored

ELEMENTS = {
    "fp4": (2, 1), "fp6_e2m3": (2, 3), "fp6_e3m2": (3, 2), "fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2),
}  # fmt: skip
NOTE = "activations were quantized there, and stay in 16 bits here"


def layers(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Layer]:
    """The quantized layers of a Quark checkpoint."""
    found = parts("weight_scale", stored)
    return {part.name: layer(part, settings(config, part.name)) for part in found}


def settings(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of a layer."""
    for pattern, own in (config.get("layer_quant_config") or {}).items():
        if fnmatchcase(name, pattern):
            return dict(own)
    return dict(config.get("global_quant_config") or {})


def layer(part: Part, config: Mapping[str, Any]) -> Layer:
    weights = config.get("weight") or {}
    if isinstance(weights, list):  # NVFP4 in two steps
        weights = weights[0] if len(weights) == 1 else {"dtype": f"{len(weights)} steps"}
    dtype = option(weights, "dtype", tuple(ELEMENTS), f"quark: {part.name}", required=True)
    part.skip("input_scale", "output_scale", "bias_scale")
    found = float_layer(part, "weight", "weight_scale", element=ELEMENTS[dtype])
    return replace(found, note=NOTE if config.get("input_tensors") else "")
