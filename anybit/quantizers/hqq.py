"""Half-quadratic quantization (HQQ, Badri and Shaji, 2023): grids fitted to the bulk of the weights
rather than to their extremes. Needs no data.

It minimizes sum |w - w'|^p with p < 1, to which few large errors matter little. The problem is
split into an error that is allowed to be sparse (a shrinkage step in closed form) and a least
squares fit of the grid to the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.format import Format, Grid
from anybit.core.groups import divisor, grouped, round_scale
from anybit.quantizers.rtn import RTN

ROUNDS = 20
BETA, GROWTH = 10.0, 1.01  # the weight of the split, as in the reference implementation
P = 0.7


@dataclass(frozen=True)
class HQQ(RTN):
    """Round to nearest on a grid by half-quadratic splitting, any format with one scale a group.

    Zero points become real numbers in fp16, where the format has them ("int4:group=64,zero"), at
    the scale that covers the range; other formats get better scales.
    """

    def fit(self, w: Tensor, fmt: Format) -> Grid:
        """Weights (N, K) fp32 -> the grid by half-quadratic splitting."""
        return half_quadratic(w, fmt)


def half_quadratic(w: Tensor, fmt: Format) -> Grid:
    """Fit a grid by half-quadratic splitting (HQQ, equations 3 to 8).

    Args:
        w: Weights (N, K) fp32.
        fmt: A format with one scale a group. Its zero points are fitted where it has them, and its
            scales otherwise.

    Returns:
        The grid; no group has a larger sum of |w - w'|^p than with `fmt.fit`.
    """
    key = fmt.zero_point or "scale"
    grid = fmt.fit(w)
    if not fmt.searched:
        return grid
    parts, best, beta = grouped(w, grid[key]), None, BETA
    kept = grid[key]
    for _ in range(ROUNDS):
        scale = fmt.scales(grid)[..., None]
        unscaled = parts / divisor(scale)
        values = grouped(fmt.values(fmt.encode(w, grid), grid), grid[key])
        error = unscaled - values  # in units of the scale, so that beta suits every weight
        cost = error.abs().mul(scale).pow(P).sum(-1)
        if best is None:
            best = cost
        kept = torch.where(cost < best, grid[key].to(kept.dtype), kept)
        best = torch.minimum(cost, best)
        target = unscaled - shrink(error, beta)
        if fmt.zero_point:
            new = grid[key].float() + (values - target).mean(-1)
            grid = grid | {key: new.half()}
            kept = kept.half()
        else:
            ratio = (values * target).sum(-1) / values.square().sum(-1).clamp_min(1e-12)
            new = (grid["scale"].float() * ratio).clamp_min(1e-6)
            grid = grid | {"scale": round_scale(new, kept.dtype)}
        beta *= GROWTH
    return grid | {key: kept}


def shrink(x: Tensor, beta: float) -> Tensor:
    """The minimizer of |e|^p + beta / 2 (e - x)^2, in the generalized soft threshold's form."""
    size = x.abs()
    return x.sign() * (size - size.clamp_min(1e-8).pow(P - 1) / beta).clamp_min_(0)
