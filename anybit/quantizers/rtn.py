"""Round to nearest: every weight gets the code nearest to it. Needs no data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.format import Format, Packed

CHUNK = 1 << 19  # weights at a time: temporaries stay in the cache


@dataclass(frozen=True)
class RTN:
    """Round to nearest (the papers' RTN), any format, any device."""

    def quantize(self, w: Tensor, fmt: Format) -> Packed:
        """Weights (N, K) of any float dtype -> Packed, on the same device."""
        n, k = w.shape
        step = max(1, CHUNK // max(k, 1)) if fmt.rowwise and w.device.type == "cpu" else max(n, 1)
        parts = [self._rows(w[at : at + step], fmt) for at in range(0, n, step)]
        if len({part.grid["scale"].dtype for part in parts}) > 1:  # one dtype for the whole layer
            parts = [self._rows(w, fmt)]
        return parts[0] if len(parts) == 1 else stack(parts)

    def _rows(self, w: Tensor, fmt: Format) -> Packed:
        w = w.float()
        grid = fmt.fit(w)
        return Packed.from_codes(fmt, (w.shape[0], w.shape[1]), fmt.encode(w, grid), grid)


def stack(parts: list[Packed]) -> Packed:
    """Put weights that share K and the format on top of each other (no shared tables)."""
    first = parts[0]
    planes = tuple(torch.cat(p) for p in zip(*(part.planes for part in parts), strict=True))
    grid = {name: torch.cat([part.grid[name] for part in parts]) for name in first.grid}
    return Packed(first.format, (sum(p.shape[0] for p in parts), first.shape[1]), planes, grid)
