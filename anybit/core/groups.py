"""Groups of columns and their scales: what formats share."""

import torch
from torch import Tensor

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


def store_scale(scale: Tensor) -> Tensor:
    """A scale as it is stored: in 16 bits, and never zero.

    The dtype is fp16, or bf16 if a scale lies outside fp16's normal range. Groups of zeros get the
    scale 1.
    """
    scale = torch.where(scale == 0, 1.0, scale)
    low, high = scale.abs().aminmax()
    fits = low >= HALF_NORMAL[0] and high <= HALF_NORMAL[1]
    return scale.to(torch.float16 if fits else torch.bfloat16)


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive scales in a dtype of a grid: to nearest, and neither zero nor infinite."""
    info = torch.finfo(dtype)
    least = info.tiny if dtype == torch.float8_e8m0fnu else info.tiny * info.eps
    return scale.float().clamp(least, info.max).to(dtype)
