"""Groups of columns and their scales: what formats share."""

import torch
from torch import Tensor

from anybit.errors import InvalidInput

HALF_NORMAL = (2.0**-14, 65504.0)  # the normal range of fp16


def grouped(w: Tensor, scale: Tensor) -> Tensor:
    """(N, K) -> (N, groups, K / groups), as many groups as `scale` (N, groups) has."""
    return w.reshape(w.shape[0], scale.shape[1], -1)


def ungroup(w: Tensor) -> Tensor:
    """The inverse of `grouped`."""
    return w.reshape(w.shape[0], -1)


def groups_of(w: Tensor, group: int) -> Tensor:
    """(N, K) -> (N, K / group, group); group 0 means the whole row."""
    return w.reshape(w.shape[0], -1, group or w.shape[1])


def extremes(w: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest along the last dimension.

    On a CPU torch's `aminmax` takes 5 times as long as both, and more.
    """
    return w.amin(-1), w.amax(-1)


def store_scale(scale: Tensor, zeros: float = 1) -> Tensor:
    """A scale as it is stored, in 16 bits.

    The dtype is fp16, or bf16 if a scale lies outside fp16's normal range.

    Args:
        scale: 0 for groups of zeros.
        zeros: What those get: 0 where no code stands for the weight 0, so that the scale must.

    Raises:
        InvalidInput: A scale is infinite.
    """
    some = torch.where(scale == 0, 1.0, scale)
    low, high = some.abs().aminmax()
    if not high.isfinite():
        raise InvalidInput(
            "weights are so large that a scale overflows float32; repair the checkpoint"
        )
    fits = low >= HALF_NORMAL[0] and high <= HALF_NORMAL[1]
    some = some if zeros == 1 else torch.where(scale == 0, zeros, scale)
    return some.to(torch.float16 if fits else torch.bfloat16)


def divisor(scale: Tensor) -> Tensor:
    """Scales fp32 that weights may be divided by: 1 for those of 0, whose codes do not matter."""
    return torch.where(scale == 0, 1.0, scale.float())


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive scales in a dtype of a grid: to nearest, and neither zero nor infinite."""
    info = torch.finfo(dtype)
    least = info.tiny if dtype == torch.float8_e8m0fnu else info.tiny * info.eps
    return scale.float().clamp(least, info.max).to(dtype)
