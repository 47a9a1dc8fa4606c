"""transformers' "metal" checkpoints: MLX's affine layout, whose shifts are called qbiases.

W[n, k] = scales[n, k // group_size] * q[n, k] + qbiases[n, k // group_size]
"""

from collections.abc import Mapping
from typing import Any

from anybit.checkpoint.foreign.base import Layer, Naming, option, parts
from anybit.checkpoint.foreign.mlx import layer
from anybit.files.safetensors import Stored


def layers(
    config: Mapping[str, Any], stored: Mapping[str, Stored], naming: Naming = str
) -> dict[str, Layer]:
    """The quantized layers of a "metal" checkpoint."""
    option(config, "bits", (4, 2, 8), "metal")
    return {part.name: layer(part, config, "qbiases") for part in parts("qbiases", stored)}
