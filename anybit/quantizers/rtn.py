"""Round to nearest: every weight gets the code nearest to it. Needs no data."""

from dataclasses import dataclass

from torch import Tensor

from anybit.core.format import Format, Grid
from anybit.core.packed import Packed, stack
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.statistics import Statistics

CHUNK = 1 << 19  # weights at a time: temporaries stay in the cache


@dataclass(frozen=True)
class RTN(Quantizer):
    """Round to nearest (the papers' RTN), any format, any device.

    The other data-free quantizers differ in `fit` alone.
    """

    def fit(self, w: Tensor, fmt: Format) -> Grid:
        """Weights (N, K) fp32 -> the grid that they are rounded to."""
        return fmt.fit(w)

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """Round weights (N, K) to nearest on the grid of `fit`; statistics are not used."""
        n, k = w.shape
        unit = fmt.tile[0]
        step = max(1, CHUNK // max(k, 1) // unit) * unit if w.device.type == "cpu" else max(n, 1)
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
