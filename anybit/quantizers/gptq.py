"""GPTQ (Frantar et al., 2023) for any format: round column by column, and let the columns that are
still to come make up for the error, by the second-order statistics of the layer's inputs.

The layer's squared output error is tr(E H E^T), with the weight's error E and the inputs' second
moment H. With H^-1 = U^T U, U upper triangular, rounding column j leaves e = (w_j - q_j) / U_jj,
and w_k -= e U_jk for all k > j is the best correction.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from anybit.format import Format, Grid, Packed
from anybit.quantizers.calibrate import Calibrated
from anybit.quantizers.clip import fit_clipped
from anybit.quantizers.replay import Seen

BLOCK = 128  # columns whose corrections reach the columns beyond them in one matrix product


@dataclass(frozen=True)
class GPTQ(Calibrated):
    """GPTQ with static groups, any format, any device.

    damping: added to H's diagonal, as a part of its mean.
    act_order: round the columns with the largest inputs first. Grids are fitted before and codes
        are stored in the natural order, so nothing else changes.
    clip: fit the grids by a clip search weighted with H's diagonal; without it, to the full range.

    Formats whose codes stand for several columns are rounded that many columns at a time.
    """

    damping: float = 0.01
    act_order: bool = True
    clip: bool = True

    statistics: ClassVar[tuple[str, ...]] = ("hessian",)

    def quantize(self, w: Tensor, fmt: Format, seen: Seen) -> Packed:
        w = w.detach().float()
        n, k = w.shape
        h = seen.hessian if seen.hessian.numel() else torch.eye(k, device=w.device)
        grid = fit_clipped(w, fmt, h.diagonal()) if self.clip else fmt.fit(w)
        order = column_order(h, fmt.width) if self.act_order else torch.arange(k, device=w.device)
        u = inverse_factor(h[order][:, order], self.damping)
        codes = propagate(w.T[order], u, order.tolist(), fmt, grid)
        if fmt.width > 1:
            # Corrected vectors drift from the ones that a codebook was made for, and rows of a
            # small layer may end up worse than nearest.
            nearest = fmt.encode(w, grid)
            worse = output_error(w, codes, h, fmt, grid) > output_error(w, nearest, h, fmt, grid)
            codes = torch.where(worse[:, None], nearest, codes)
        return Packed.from_codes(fmt, (n, k), codes, grid)


def propagate(w: Tensor, u: Tensor, order: list[int], fmt: Format, grid: Grid) -> Tensor:
    """Codes (N, C), in the natural order of columns, of the weights.

    w: (K, N) fp32, transposed so that a column lies in one piece; overwritten. u: (K, K). Both are
    in the order of rounding; order[j] is the column that comes j-th.
    """
    k, n = w.shape
    v, books = fmt.width, fmt.books
    block = v * max(1, BLOCK // v)
    parts: list[Tensor] = [w.new_empty(0)] * (k // v)
    for start in range(0, k, block):
        stop = min(start + block, k)
        rows, factor = w[start:stop], u[start:stop, start:stop]
        diagonal = factor.diagonal().tolist()
        errors = torch.empty_like(rows)
        for at in range(0, stop - start, v):
            column = order[start + at]
            here = grid_at(fmt, grid, column)
            codes = fmt.encode(rows[at : at + v].T.contiguous(), here)
            parts[column // v] = codes
            rounded = fmt.decode(codes, here).T
            for j in range(at, at + v):
                torch.sub(rows[j], rounded[j - at], out=errors[j]).div_(diagonal[j])
                rows[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        w[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)
    return torch.stack(parts, 1).reshape(n, k // v * books)


def output_error(w: Tensor, codes: Tensor, h: Tensor, fmt: Format, grid: Grid) -> Tensor:
    """The squared output error e H e^T of every row (N,)."""
    e = fmt.decode(codes, grid) - w
    return (e @ h).mul_(e).sum(1)


def grid_at(fmt: Format, grid: Grid, column: int) -> Grid:
    """The grid for one column (or one vector of columns), which need not be a group's first."""
    out = {}
    for name, entry in fmt.entries().items():
        at = column // entry.group if entry.group else 0
        out[name] = grid[name] if entry.table is not None else grid[name][:, at : at + 1]
    return out


def column_order(h: Tensor, width: int) -> Tensor:
    """Columns by descending diagonal of H; those of one vector stay together."""
    units = h.diagonal().reshape(-1, width).sum(1).argsort(descending=True, stable=True)
    return (units[:, None] * width + torch.arange(width, device=h.device)).flatten()


def inverse_factor(h: Tensor, damping: float) -> Tensor:
    """The upper triangular U with H^-1 = U^T U, of H damped until it is positive definite.

    A Cholesky factorization of H in reverse order gives H = R R^T with R upper triangular; U is
    its inverse. Columns that saw no input then have nothing to pass on, and round to nearest.
    """
    k = len(h)
    mean = h.diagonal().mean().item()
    eye = torch.eye(k, device=h.device)
    if not mean > 0:
        return eye
    tried = damping
    while tried <= 1:
        damped = (h + eye * (tried * mean)).flip(0, 1)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            if tried > damping:
                warnings.warn(
                    f"GPTQ: a Hessian of {k} columns is singular with damping={damping}; "
                    f"used {tried:g}. More calibration text helps",
                    stacklevel=2,
                )
            return torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
        tried = max(tried * 10, 1e-4)
    raise ValueError(
        f"GPTQ: a Hessian of {k} columns is not positive definite even with damping={tried / 10:g} "
        f"(its diagonal's mean is {mean:g}); check the calibration text and the model for NaN"
    )
