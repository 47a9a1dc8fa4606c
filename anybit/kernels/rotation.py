"""Rotating activations: blockwise Hadamard transforms, for layers with rotated weights."""

from torch import Tensor

from anybit.core.rotation import turned


def rotate(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    """H (vector * x), or vector * (H x), of every token; see `core/rotation.py`.

    Args:
        x: (M, K) of any float dtype; the arithmetic is fp32.
        vector: K numbers.
        after: Whether the vector multiplies after H, as that of a layer's outputs does.

    Returns:
        (M, K) in x's dtype.
    """
    v = vector.flatten().float()
    return (turned(x.float()) * v if after else turned(x.float() * v)).to(x.dtype)
