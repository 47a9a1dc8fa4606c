"""GPTQ (Frantar et al., 2023) for any format: round column by column, and let the columns that are
still to come make up for the error, by the second-order statistics of the layer's inputs.

The layer's squared output error is tr(E H E^T), with the weight's error E and the inputs' second
moment H. With H^-1 = U^T U, U upper triangular, rounding column j leaves e = (w_j - q_j) / U_jj,
and w_k -= e U_jk for all k > j is the best correction.
"""

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anybit.core.format import Format, Grid
from anybit.core.groups import round_scale
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.clip import fit_clipped
from anybit.quantizers.columns import propagate
from anybit.quantizers.rows import propagate_both

SOLVED = 256  # columns of a triangular matrix that is inverted at once


@dataclass(frozen=True)
class GPTQ(Quantizer):
    """GPTQ (https://arxiv.org/abs/2210.17323) with static groups, any format, any device.

    Formats whose codes stand for several columns are rounded that many columns at a time, and tiles
    of 16 columns likewise (QTIP's block LDLQ).

    Attributes:
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them.
        damping: Added to H's diagonal, as a fraction of its mean. More of it trusts the data less:
            pico's int4 g128, calibrated on prose, has 8 % less KL on code with 0.1 than with 0.01,
            and 14 % less with 0.3; calibrated on code, int3 has 2 % and 4 % more.
        act_order: Round the columns with the largest inputs first. Grids are fitted before and
            codes are stored in the natural order, so nothing else changes.
        clip: Fit the grids by a clip search weighted with H's damped diagonal; without it, to the
            full range.
        gradients: Let rows, too, make up for each other's errors, by the second moment of gradients
            at the layer's outputs, and count each token by their length (after YAQA,
            https://arxiv.org/abs/2505.22988). It takes 34 % off the KL of 2-bit trellis codes on a
            model of 105 million parameters, 14 % on pico. It takes a backward pass of the whole
            model, which must be in memory, with 1 KB for each output of a layer. Rows of codebooks
            stay independent, and only tokens count differently there; experts' tokens all count
            alike.
        follow: Aim at the outputs of the dense model, for the inputs that the quantized one has
            (GPTAQ, https://arxiv.org/abs/2504.02692), layer by layer. On pico it takes 6 % off the
            KL of int2 g128, for twice the time and memory for a second copy of a block's inputs.
    """

    calibration: Source | Calibration | None = field(default=None, repr=False)
    damping: float = 0.1
    act_order: bool = True
    clip: bool = True
    follow: bool = False
    gradients: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The Hessian; to follow the dense model, how far inputs have drifted from its own."""
        more = {"drift": self.follow, "gradients": self.gradients}
        return ("hessian", *(name for name, wanted in more.items() if wanted))

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """Round a weight (N, K) by its inputs' Hessian; to nearest where no token was seen."""
        w = w.detach().float()
        n, k = w.shape
        statistics = self.check_statistics(statistics)
        h = statistics.hessian
        if not h.numel():
            grid = fit_clipped(w, fmt) if self.clip else fmt.fit(w)
            return Packed.from_codes(fmt, (n, k), fmt.encode(w, grid), grid)
        importance = h.diagonal() + self.damping * h.diagonal().mean()
        grid = fit_clipped(w, fmt, importance) if self.clip else fmt.fit(w)
        order = column_order(h, fmt.tile[1]) if self.act_order else torch.arange(k, device=w.device)
        u = inverse_factor(h[order][:, order], self.damping)
        if self.follow:
            if not statistics.drift.numel():
                raise InvalidInput("GPTQ(follow=True) needs drift among its statistics; collect it")
            w = w + followed(w, statistics.drift, u, order)
        vectors = fmt.searched and fmt.width > 1
        if self.gradients and not vectors:
            if not statistics.gradients.numel():
                raise InvalidInput(
                    "GPTQ(gradients=True) needs gradients among its statistics; collect them, or "
                    "quantize the whole model with quantize_"
                )
            factors = row_factors(statistics.gradients.to(w.device), n, self.damping)
            codes, w = propagate_both(w, u, order, factors, fmt, grid)
        else:
            codes = propagate(w.T[order], u, order.tolist(), fmt, grid)
        if not fmt.searched:
            grid = grid | {"scale": fitted_scale(w, codes, h, fmt, grid, self.damping)}
        elif vectors:
            # Corrected vectors drift from the ones that a codebook was made for, and rows of a
            # small layer may end up worse than nearest.
            nearest = fmt.encode(w, grid)
            worse = output_error(w, codes, h, fmt, grid) > output_error(w, nearest, h, fmt, grid)
            codes = torch.where(worse[:, None], nearest, codes)
        return Packed.from_codes(fmt, (n, k), codes, grid)


def followed(w: Tensor, drift: Tensor, u: Tensor, order: Tensor) -> Tensor:
    """What to add to W (N, K) so that its outputs come close to those of the dense model.

    Of all W', E|W' x - W x'|^2 is least for W + W D H^-1, with D = E (x' - x) x^T.
    """
    out = torch.empty_like(w)
    out[:, order] = (w @ drift)[:, order] @ u.T @ u
    return out


def output_error(w: Tensor, codes: Tensor, h: Tensor, fmt: Format, grid: Grid) -> Tensor:
    """The squared output error e H e^T of every row (N,), for weights and codes of N rows."""
    e = fmt.decode(codes, grid) - w
    return (e @ h).mul_(e).sum(1)


def fitted_scale(
    w: Tensor, codes: Tensor, h: Tensor, fmt: Format, grid: Grid, damping: float
) -> Tensor:
    """The rows' scales (N, 1) of least squared output error for codes that stay as they are."""
    q = fmt.decode(codes, grid)
    qh = (q @ h).add_(q, alpha=damping * h.diagonal().mean().item())
    best = (qh * w).sum(1) / (qh * q).sum(1)  # NaN for rows of zeros
    scale, best = grid["scale"], torch.where((best > 0) & best.isfinite(), best, 1.0)
    return torch.where(scale == 0, scale, round_scale(scale * best[:, None], scale.dtype))


def column_order(h: Tensor, width: int) -> Tensor:
    """Columns (K,) by descending diagonal of H; `width` columns that are one unit stay together."""
    units = h.diagonal().reshape(-1, width).sum(1).argsort(descending=True, stable=True)
    return (units[:, None] * width + torch.arange(width, device=h.device)).flatten()


def row_factors(moments: Tensor, n: int, damping: float) -> Tensor:
    """U of each block of rows (blocks, rows, rows); of the identity for those beyond the first n.

    Zeros there must not count in the mean that damping is a fraction of.
    """
    count, size, _ = moments.shape
    out = torch.eye(size, device=moments.device).repeat(count, 1, 1)
    for i, block in enumerate(moments):
        own = slice(min(size, n - i * size))
        out[i, own, own] = inverse_factor(block[own, own], damping, "gradients at outputs")
    return out


def inverse_factor(h: Tensor, damping: float, what: str = "a layer's inputs") -> Tensor:
    """The upper triangular U with H^-1 = U^T U, of H damped until it is positive definite.

    A Cholesky factorization of H in reverse order gives H = R R^T with R upper triangular; U is
    its inverse. Columns that saw no input then have nothing to pass on, and round to nearest.

    Args:
        h: H (K, K) fp32.
        damping: Added to the diagonal, as a fraction of its mean; ten times as much, up to 1, where
            that is not enough.
        what: H is the second moment of.

    Returns:
        U (K, K) fp32; the identity for an H of zeros.

    Raises:
        InvalidInput: H is not positive definite with any damping.
    """
    k = len(h)
    mean = h.diagonal().mean().item()
    eye = torch.eye(k, dtype=h.dtype, device=h.device)
    if not mean > 0:
        return eye
    tried = damping
    while tried <= 1:
        damped = (h + eye * (tried * mean)).flip(0, 1)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            if tried > damping:
                warnings.warn(
                    f"GPTQ: the second moment ({k}, {k}) of {what} is singular with "
                    f"damping={damping}; used {tried:g}. More calibration data helps",
                    stacklevel=2,
                )
            return inverse(lower.flip(0, 1))
        tried = max(tried * 10, 1e-4)
    raise InvalidInput(
        f"GPTQ: the second moment ({k}, {k}) of {what} is not positive definite even with "
        f"damping={tried / 10:g} (its diagonal's mean is {mean:g}); check the calibration data "
        "and the model for NaN"
    )


def inverse(upper: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix (K, K), by halves: half the work of a solution."""
    k = len(upper)
    if k <= SOLVED:
        eye = torch.eye(k, dtype=upper.dtype, device=upper.device)
        solved: Tensor = torch.linalg.solve_triangular(upper, eye, upper=True)
        return solved
    first, rest = slice(k // 2), slice(k // 2, None)
    out = torch.zeros_like(upper)
    out[first, first], out[rest, rest] = inverse(upper[first, first]), inverse(upper[rest, rest])
    out[first, rest] = -(out[first, first] @ (upper[first, rest] @ out[rest, rest]))
    return out
