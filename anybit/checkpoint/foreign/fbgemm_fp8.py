"""FBGEMM's FP8 checkpoints: e4m3 with a scale for each row, and fp8 activations per token.

W[n, k] = weight_scale[n] * weight[n, k]
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anybit.checkpoint.foreign.base import Layer, Naming, parts
from anybit.checkpoint.foreign.floats import float_layer
from anybit.files.safetensors import Stored


def layers(
    config: Mapping[str, Any], stored: Mapping[str, Stored], naming: Naming = str
) -> dict[str, Layer]:
    """The quantized layers of an FBGEMM FP8 checkpoint."""
    most = config.get("activation_scale_ub")
    note = f"activations were clipped at {most} there, and are not here" if most else ""
    out = {}
    for part in parts("weight_scale", stored):
        part.skip("input_scale_ub")
        found = float_layer(part, "weight", "weight_scale")
        out[part.name] = replace(found, activation="fp8", note=note)
    return out
