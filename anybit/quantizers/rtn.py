"""Round to nearest: every weight gets the code nearest to it. Needs no data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.format import Format, Grid, Packed

CHUNK = 1 << 19  # weights at a time: temporaries stay in the cache


@dataclass(frozen=True)
class RTN:
    """Round to nearest (the papers' RTN), any format, any device.

    Other quantizers that need no data differ in `fit` alone.
    """

    def fit(self, w: Tensor, fmt: Format) -> Grid:
        """Weights (N, K) fp32 -> the grid that they are rounded to."""
        return fmt.fit(w)

    def quantize(self, w: Tensor, fmt: Format) -> Packed:
        """Weights (N, K) of any float dtype -> Packed, on the same device."""
        n, k = w.shape
        step = max(1, CHUNK // max(k, 1)) if w.device.type == "cpu" else max(n, 1)
        chunks = [slice(at, at + step) for at in range(0, n, step)]
        parts = [self._rounded(w[rows], fmt) for rows in chunks] if fmt.rowwise else []
        if len({part.grid["scale"].dtype for part in parts}) != 1:  # one dtype for a whole layer
            grid = self.fit(w.float(), fmt)
            parts = [self._rounded(w[rows], fmt, grid_rows(fmt, grid, rows)) for rows in chunks]
        return parts[0] if len(parts) == 1 else stack(parts)

    def _rounded(self, w: Tensor, fmt: Format, grid: Grid | None = None) -> Packed:
        """Some rows of a weight on their own grid, or on a given one."""
        w = w.float()
        grid = self.fit(w, fmt) if grid is None else grid
        return Packed.from_codes(fmt, (w.shape[0], w.shape[1]), fmt.encode(w, grid), grid)


def grid_rows(fmt: Format, grid: Grid, rows: slice) -> Grid:
    """The grid of some rows; tables are shared by all."""
    entries = fmt.entries()
    return {name: t if entries[name].table else t[rows] for name, t in grid.items()}


def stack(parts: list[Packed]) -> Packed:
    """Put weights that share K, the format and its tables on top of each other."""
    first, entries = parts[0], parts[0].format.entries()
    planes = tuple(torch.cat(p) for p in zip(*(part.planes for part in parts), strict=True))
    grid = {
        name: tensor if entries[name].table else torch.cat([part.grid[name] for part in parts])
        for name, tensor in first.grid.items()
    }
    return Packed(first.format, (sum(p.shape[0] for p in parts), first.shape[1]), planes, grid)
