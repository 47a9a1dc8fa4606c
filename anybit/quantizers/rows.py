"""GPTQ across rows: let the rows that are still to come make up for the errors of those before.

The error E of a weight costs tr(G E H E^T), with the second moments H of inputs and G of gradients
at the outputs. `columns.propagate` minds H alone. Here G is minded in the same way, a few rows at a
time: with G^-1 = U^T U, what rounding leaves of rows before is passed on by U's rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from anybit.core.format import Format, Grid

TOGETHER = 16  # rows of a block that are rounded as one: a tile's


def propagate_rows(
    w: Tensor,
    factors: Tensor,
    fmt: Format,
    grid: Grid,
    rounded: Callable[[Tensor, Grid], tuple[Tensor, Grid]],
) -> tuple[Tensor, Grid]:
    """Round a weight (N, K), 16 rows of each block at a time.

    Args:
        w: (N, K) fp32.
        factors: U of each block of rows, (blocks, rows, rows) fp32; the last block may have rows
            beyond N.
        fmt: The format.
        grid: Of all rows.
        rounded: Codes and grid of rows, given them and their part of the grid.

    Returns:
        Codes (N, ...) and the grid.
    """
    (n, k), (count, size, _), entries = w.shape, factors.shape, fmt.entries()
    left = torch.cat((w, w.new_zeros(count * size - n, k)))  # less what is passed on
    places = torch.arange(len(left), device=w.device).view(count, size)
    order: list[Tensor] = []
    found: list[Tensor] = []
    grids: list[Grid] = []
    for start in range(0, size, TOGETHER):
        own, rest = slice(start, start + TOGETHER), slice(start + TOGETHER, None)
        rows = places[:, own].flatten()
        inside = rows[rows < n]
        here = {name: t if entries[name].table else t[inside] for name, t in grid.items()}
        codes, here = rounded(left[inside], here)
        wrong = left.new_zeros(len(rows), k)
        wrong[: len(inside)] = left[inside] - fmt.decode(codes, here)
        wrong = solve_triangular(factors[:, own, own].mT, wrong.view(count, -1, k), upper=False)
        left.view(count, size, k)[:, rest].baddbmm_(factors[:, own, rest].mT, wrong, alpha=-1)
        order.append(inside), found.append(codes), grids.append(here)
    back = torch.cat(order).argsort()
    whole = {
        name: t if entries[name].table else torch.cat([one[name] for one in grids])[back]
        for name, t in grid.items()
    }
    return torch.cat(found)[back], whole
