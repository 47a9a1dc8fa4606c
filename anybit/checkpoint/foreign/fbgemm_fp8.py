"""FBGEMM's FP8 checkpoints: e4m3 with a scale for each row, and fp8 activations per token.

W[n, k] = weight_scale[n] * weight[n, k]
"""

from dataclasses import replace

from anybit.checkpoint.foreign.base import Given, Layer
from anybit.checkpoint.foreign.floats import float_layer


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an FBGEMM FP8 checkpoint."""
    most = given.config.get("activation_scale_ub")
    note = f"activations were clipped at {most} there, and are not here" if most else ""
    out = {}
    for part in given.parts("weight_scale"):
        part.skip("input_scale_ub")
        found = float_layer(part, "weight", "weight_scale")
        out[part.name] = replace(found, activation="fp8", note=note)
    return out
