"""GPTQ along rows and columns: weights to come, of either, make up for the errors before them.

The error E of a weight costs tr(G E H E^T), with the second moments H of inputs and G of gradients
at the outputs. `columns.propagate` minds H alone: with H^-1 = U^T U, columns to come are changed by
rows of U. G is minded in the same way, 16 rows at a time, in blocks of rows that know nothing of
each other. So a unit (the columns of a tile, or one) of 16 rows can be rounded once its left
neighbour and the one above have been: all units of a diagonal at once, in all blocks.
"""

import math

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from anybit.core.format import Format, Grid
from anybit.errors import Unsupported

TOGETHER = 16  # rows that are rounded as one, or a multiple of it: those of whole tiles


def propagate_both(
    w: Tensor, u: Tensor, order: Tensor, factors: Tensor, fmt: Format, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Round a weight (N, K).

    Args:
        w: (N, K) fp32.
        u: U of the columns in the order of rounding (K, K).
        order: The columns in that order (K,); those of a unit stay together.
        factors: U of each block of rows (blocks, rows, rows); the last may have rows beyond N.
        fmt: The format.
        grid: Of the weight.

    Returns:
        Codes (N, ...) in the natural order of columns, and what rows were to become once those
        above them had been rounded (N, K).

    Raises:
        Unsupported: Blocks of rows are not of whole tiles.
    """
    (n, k), (count, size, _), v = w.shape, factors.shape, fmt.tile[1]
    together = math.lcm(TOGETHER, fmt.tile[0])
    if size % together:
        raise Unsupported(
            f"gradients=True rounds rows in blocks of {size}, which tiles of {fmt.tile[0]} rows "
            "together with steps of 16 do not divide; use GPTQ without it for this format"
        )
    groups, units = size // together, k // v
    # (groups, the next rows of each block); beyond N they repeat the last.
    rows = torch.arange(count * size, device=w.device).clamp_(max=n - 1)
    rows = rows.view(count, groups, together).transpose(0, 1).flatten(1)

    def joined(t: Tensor) -> Tensor:
        return t.view(groups, count, together, -1).transpose(0, 1).flatten(0, 2)[:n]

    target = w[:, order][rows]
    seen = target.clone()  # less the errors of columns before
    right = over_diagonal(u, v)
    below = torch.stack([over_diagonal(one, together) for one in factors], 1)
    columns, each = order[::v], torch.arange(v, device=w.device)
    codes = torch.empty(0)
    for step in range(units + groups - 1):
        active = slice(max(0, step - units + 1), min(groups, step + 1))
        g = torch.arange(active.start, active.stop, device=w.device)
        c = step - g
        own = g[:, None], slice(None), c[:, None] * v + each
        here = grid_at(fmt, grid, rows[g], columns[c, None])
        part = fmt.encode(seen[own].mT.reshape(-1, v), here)
        rounded = fmt.decode(part, here).view(len(g), -1, v)
        if not step:
            codes = part.new_empty(*target.shape[:2], units, part.shape[1])
        codes[g, :, columns[c] // v] = part.view(len(g), -1, part.shape[1])
        seen[active].baddbmm_(seen[own].mT - rounded, right[c], alpha=-1)
        wrong = (target[own].mT - rounded).view(len(g), count, together, v)
        change = (below[active].mT @ wrong).unflatten(2, (groups, together)).permute(2, 1, 3, 4, 0)
        for t in (target, seen):
            t.view(groups, count, together, units, v)[..., c, :] -= change.mT
    out = torch.empty_like(w)
    out[:, order] = joined(target)
    return joined(codes.flatten(2)).contiguous(), out


def grid_at(fmt: Format, grid: Grid, rows: Tensor, columns: Tensor) -> Grid:
    """The grid for single units of weights, which begin at these rows and columns."""
    out = {}
    for name, entry in fmt.entries().items():
        if entry.table is not None:
            out[name] = grid[name]
        else:
            at = columns // entry.group if entry.group else torch.zeros_like(columns)
            out[name] = grid[name][rows, at].view(-1, 1)
    return out


def over_diagonal(u: Tensor, size: int) -> Tensor:
    """U (K, K) in bands of `size` rows (K / size, size, K), each over its block on the diagonal,
    which becomes zero: what an error of these rows changes in those after them.
    """
    bands = u.unflatten(0, (-1, size))
    own = bands.unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    out = solve_triangular(own, bands, upper=True)
    for i, band in enumerate(out):
        band[:, i * size : i * size + size] = 0
    return out
