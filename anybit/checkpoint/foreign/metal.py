"""transformers' "metal" checkpoints: MLX's affine layout, whose shifts are called qbiases.

W[n, k] = scales[n, k // group_size] * q[n, k] + qbiases[n, k // group_size]
"""

from anybit.checkpoint.foreign.base import Given, Layer, option
from anybit.checkpoint.foreign.mlx import layer


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a "metal" checkpoint."""
    option(given.config, "bits", (4, 2, 8), "metal")
    return {part.name: layer(part, given.config, "qbiases") for part in given.parts("qbiases")}
