"""Half-quadratic quantization (HQQ, Badri and Shaji, 2023): grids fitted to the bulk of the weights
rather than to their extremes. Needs no data.

Codes and grid are fitted in turns. Zero points are fitted by least squares, so that the errors of a
group sum to zero: what is left of a sum meets the mean of the activations, in every group alike.
Scales minimize sum |w - w'|^p with p < 1, to which few large errors matter little, by an error that
is allowed to be sparse (a shrinkage step in closed form) and least squares for the rest.
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
    """Round to nearest on a grid that is fitted in turns with the codes, any format.

    Zero points become real numbers in fp16, where the format has them ("int4:group=64,zero"), at
    the scale that covers the range; other formats get better scales.
    """

    def fit(self, w: Tensor, fmt: Format) -> Grid:
        """Weights (N, K) fp32 -> the fitted grid; `fmt.fit` where encoding takes long."""
        if not fmt.searched:
            return fmt.fit(w)
        return zeros_of_least_squares(w, fmt) if fmt.zero_point else half_quadratic(w, fmt)


def zeros_of_least_squares(w: Tensor, fmt: Format) -> Grid:
    """Fit zero points, each the mean of what its group's codes and weights differ by.

    HQQ's equation without its shrinkage, which HQQ's package does not do either on weights of usual
    size: it shrinks errors in units of the weights, where the least that it leaves is 0.17.

    Args:
        w: Weights (N, K) fp32.
        fmt: A format with zero points.

    Returns:
        The grid; no group has a larger squared error than with `fmt.fit`, but for rounding.
    """
    assert fmt.zero_point is not None
    grid = fmt.fit(w)
    unscaled = grouped(w, grid["scale"]) / divisor(fmt.scales(grid))[..., None]
    for _ in range(ROUNDS):
        values = grouped(fmt.values(fmt.encode(w, grid), grid), grid["scale"])
        zero = grid[fmt.zero_point].float() + (values - unscaled).mean(-1)
        grid = grid | {fmt.zero_point: zero.half()}
    return grid


def half_quadratic(w: Tensor, fmt: Format) -> Grid:
    """Fit scales by half-quadratic splitting (HQQ, equations 3 to 8).

    Args:
        w: Weights (N, K) fp32.
        fmt: A format with one scale a group, and no zero points.

    Returns:
        The grid; no group has a larger sum of |w - w'|^p than with `fmt.fit`.
    """
    grid = fmt.fit(w)
    parts, best, beta = grouped(w, grid["scale"]), None, BETA
    kept = grid["scale"]
    for _ in range(ROUNDS):
        scale = fmt.scales(grid)[..., None]
        unscaled = parts / divisor(scale)
        values = grouped(fmt.values(fmt.encode(w, grid), grid), grid["scale"])
        error = unscaled - values  # in units of the scale, so that beta suits every weight
        cost = error.abs().mul(scale).pow(P).sum(-1)
        if best is None:
            best = cost
        kept = torch.where(cost < best, grid["scale"], kept)
        best = torch.minimum(cost, best)
        target = unscaled - shrink(error, beta)
        ratio = (values * target).sum(-1) / values.square().sum(-1).clamp_min(1e-12)
        new = (grid["scale"].float() * ratio).clamp_min(1e-6)
        grid = grid | {"scale": round_scale(new, kept.dtype)}
        beta *= GROWTH
    return grid | {"scale": kept}


def shrink(x: Tensor, beta: float) -> Tensor:
    """The minimizer of |e|^p + beta / 2 (e - x)^2, in the generalized soft threshold's form."""
    size = x.abs()
    return x.sign() * (size - size.clamp_min(1e-8).pow(P - 1) / beta).clamp_min_(0)
