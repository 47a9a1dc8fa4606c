"""The grid that weights were trained on (quantization-aware training), read off the weights.

Published "unquantized" weights of such models are whole multiples of a scale that is not stored, as
far as 16 bits tell. Rounding to nearest takes the largest weight of a group for the largest level;
where training left the outer levels of a group empty, that is another grid, and every code is off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format, Grid
from anybit.core.groups import groups_of, store_scale
from anybit.formats.integer import Integer
from anybit.quantizers.rtn import RTN

SLACK = 1.25  # for the error of the fitted scale
HALF_STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative, at most
FP32 = 2.0**-20  # of others: a sum of some roundings in fp32
FEW = 8  # columns of a group that most scales fail on
GROUPS = (16, 32, 64, 128, 256, 0)
MOST = 0.9  # of a layer's groups, to say that it was trained on a grid


@dataclass(frozen=True)
class TrainedGrid(RTN):
    """The scale of which all weights of a group are whole multiples; else as round to nearest.

    For integers of 2 to 8 bits; other formats are rounded to nearest.
    """

    def fit(self, w: Tensor, fmt: Format) -> Grid:
        """Weights (N, K) fp32 -> the format's own grid, with the scales that are found."""
        grid = fmt.fit(w)
        if not fits(fmt):
            return grid
        scale, least, found = lattice(groups_of(w, fmt.group), fmt)
        out = {"scale": store_scale(torch.where(found, scale, grid["scale"].float()))}
        if fmt.zero_point is not None:
            zero = (-least).clamp(0, 2**fmt.bits - 1).to(torch.uint8)
            out["zero"] = torch.where(found, zero, grid["zero"])
        return out


def fits(fmt: Format) -> bool:
    """Whether a format's values are whole multiples of a scale."""
    return isinstance(fmt, Integer) and fmt.bits > 1 and not fmt.order


def lattice(parts: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The coarsest scale of which all weights of a group are whole multiples, as many as fit.

    One of the weights' dtype that gives every weight goes before others.

    Args:
        parts: Weights (N, groups, columns) fp32.
        fmt: Its bits, and zero points or none, say which multiples there are.

    Returns:
        Scales (N, groups), of either sign where levels reach further on one side; the least
        multiple; and whether there is such a scale. Groups of zeros have none.
    """
    dtype = next((d for d in HALF_STEPS if torch.equal(parts, parts.to(d).float())), torch.float32)
    half = HALF_STEPS.get(dtype, FP32)
    largest = parts.abs().amax(-1)
    levels, middle = 2**fmt.bits - 1, 2 ** (fmt.bits - 1)
    zeros = fmt.zero_point is not None
    scale, least = torch.zeros_like(largest), torch.zeros_like(largest)
    found = torch.zeros_like(largest, dtype=torch.bool)
    exact = found.clone()
    first = parts[..., :FEW]
    for most in range(1, (levels if zeros else middle) + 1):
        ratio = most / torch.where(largest == 0, 1.0, largest)
        few = first * ratio[..., None]
        q = few.round()
        maybe = ((few - q).abs_() <= 2 * (SLACK * half * q.abs_() + half)).all(-1)
        at = (maybe & ~exact & (largest > 0)).nonzero().unbind(1)
        some = parts[at]
        fitted, q, same = multiples(some, ratio[at], dtype)
        error = (some / fitted[:, None] - q).abs_()
        whole = (error <= SLACK * half * q.abs() + half).all(-1)
        low, high = q.amin(-1), q.amax(-1)
        if zeros:  # zero itself is a level
            whole &= high.clamp_min(0) - low.clamp_max(0) <= levels
        else:  # -middle to middle - 1, or with a negative scale the other way round
            turned = high == middle
            whole &= (high <= middle) & (low >= -middle) & (~turned | (low > -middle))
            fitted = torch.where(turned, -fitted, fitted)
        whole &= same | ~found[at]
        at = tuple(index[whole] for index in at)
        scale[at], least[at], found[at], exact[at] = fitted[whole], low[whole], True, same[whole]
    return scale, least, found


def multiples(parts: Tensor, ratio: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of groups, the numbers nearest to weights over them, and which give every weight.

    These are of the weights' dtype, the nearest to those of least squares; numbers of 8 bits, some
    of which are off by half of one as bf16, need them.

    Args:
        parts: Weights (groups, columns) fp32.
        ratio: Numbers over weights (groups,), off by one rounding of a weight.
        dtype: Of the weights.
    """
    for _ in range(2):  # large numbers may be off by one at first
        q = (parts * ratio[:, None]).round_()
        ratio = q.square().sum(-1) / (parts * q).sum(-1)
    scale = 1 / ratio
    near = scale.to(dtype).float()
    product = (parts / near[:, None]).round_().mul_(near[:, None])
    same = (product.to(dtype).float() == parts).all(-1)
    scale = torch.where(same, near, scale)
    return scale, (parts / scale[:, None]).round_(), same


class Trained(NamedTuple):
    """How much of a model lies on a trained grid.

    Attributes:
        layers: Looked at.
        on_grid: Of those, with at least `MOST` of their groups on a grid.
        groups: Looked at in these.
        whole: Of those, on a grid.
        other: Sizes of groups with which more layers are on a grid; None if there are none.
    """

    layers: int
    on_grid: int
    groups: int
    whole: int
    other: int | None


def trained(weights: Iterable[tuple[Tensor, Format]]) -> Trained:
    """Whether weights were trained on the grids of the formats that they are to get.

    weights: some rows (N, K) of each layer, and its format.
    """
    layers = on_grid = groups = whole = 0
    others = dict.fromkeys(GROUPS, 0)
    for w, fmt in weights:
        layers += 1
        if not fits(fmt):
            continue
        count, found = on_lattice(w, fmt, fmt.group)
        if found >= MOST * count:
            on_grid, groups, whole = on_grid + 1, groups + count, whole + found
            continue
        for group in GROUPS:
            if w.shape[1] % (group or 1) == 0:
                count, found = on_lattice(w, fmt, group)
                others[group] += found >= MOST * count
    best = max(GROUPS, key=lambda group: (others[group], group == 0, group))  # the surest
    return Trained(layers, on_grid, groups, whole, best if others[best] > on_grid else None)


def on_lattice(w: Tensor, fmt: Format, group: int) -> tuple[int, int]:
    """Groups of some rows that are not zero, and those of them on a grid."""
    parts = groups_of(w.float(), group)
    return int((parts != 0).any(-1).sum()), int(lattice(parts, fmt)[2].sum())
