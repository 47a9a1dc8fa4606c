"""GPTQ's loop: round a weight column by column, and let the columns to come make up for the error.

On a GPU the loop is bound by the launches of its small kernels, about 20 a column; so the part of
it that works on one block of columns runs as a CUDA graph, recorded once for each shape.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from anybit.core.format import Format, Grid

BLOCK = 128  # columns whose corrections reach the columns beyond them in one matrix product
GRAPHS = 8  # recordings that are kept

Rounding = Callable[[Tensor, Tensor, Grid], tuple[Tensor, Tensor]]


def propagate(w: Tensor, u: Tensor, order: list[int], fmt: Format, grid: Grid) -> Tensor:
    """Codes (N, C), in the natural order of columns, of the weights.

    w: (K, N) fp32, transposed so that a column lies in one piece; overwritten. u: (K, K). Both are
    in the order of rounding; order[j] is the column that comes j-th.
    """
    k, n = w.shape
    v, block = fmt.tile[1], fmt.tile[1] * max(1, BLOCK // fmt.tile[1])
    codes = torch.empty(0)
    for start in range(0, k, block):
        stop = min(start + block, k)
        rows, factor = w[start:stop], u[start:stop, start:stop]
        columns = torch.tensor(order[start:stop:v], device=w.device)
        here = grid_at(fmt, grid, columns)
        part, errors = rounding_of(rows, factor, here, fmt)(rows, factor, here)
        if not start:
            codes = part.new_empty(n, k // v, part.shape[2])
        codes[:, columns // v] = part
        w[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)
    return codes.view(n, fmt.code_count(k))


def round_block(rows: Tensor, factor: Tensor, grid: Grid, fmt: Format) -> tuple[Tensor, Tensor]:
    """Round a block's columns in turn: codes (N, units, codes of each), and errors (columns, N).

    A unit is what must be rounded at once: a column, a vector's or a tile's columns.

    rows: (columns, N), overwritten. factor: (columns, columns). grid: one column of each of its
    tensors for every unit.
    """
    v, entries = fmt.tile[1], fmt.entries()
    errors, diagonal, codes = torch.empty_like(rows), factor.diagonal(), []
    for p in range(len(rows) // v):
        here = {k: t if entries[k].table else t[p] for k, t in grid.items()}
        code = fmt.encode(rows[p * v : p * v + v].T.contiguous(), here)
        rounded = fmt.decode(code, here).T
        if fmt.searched:
            for j in range(p * v, p * v + v):
                torch.sub(rows[j], rounded[j - p * v], out=errors[j]).div_(diagonal[j])
                rows[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        else:  # the same in two launches, which a recording might not take
            own, rest = slice(p * v, p * v + v), slice(p * v + v, None)
            errors[own] = solve_triangular(factor[own, own].T, rows[own] - rounded, upper=False)
            rows[rest].addmm_(factor[own, rest].T, errors[own], alpha=-1)
        codes.append(code)
    return torch.stack(codes, 1), errors


def grid_at(fmt: Format, grid: Grid, columns: Tensor) -> Grid:
    """The grid for these columns, (columns, N, 1) each; of units, give the first."""
    out = {}
    for name, entry in fmt.entries().items():
        at = columns // entry.group if entry.group else torch.zeros_like(columns)
        if entry.table:
            out[name] = grid[name]
            continue
        t = grid[name].T[at]  # a column in one piece, and not to be converted in each step
        out[name] = (t.float() if t.is_floating_point() else t)[..., None]
    return out


recorded: dict[object, Rounding] = {}


def rounding_of(rows: Tensor, factor: Tensor, grid: Grid, fmt: Format) -> Rounding:
    """`round_block` for tensors of these shapes: on a GPU a recording, unless the format's encode
    waits for the device, or takes so long that launches do not matter.
    """

    def eager(rows: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return round_block(rows, factor, grid, fmt)

    if rows.device.type != "cuda" or not fmt.searched:
        return eager
    shapes = tuple((k, t.shape, t.dtype) for k, t in grid.items())
    key = (fmt, rows.shape, shapes, rows.device)
    if key not in recorded:
        while len(recorded) >= GRAPHS:
            del recorded[next(iter(recorded))]
        with torch.cuda.device(rows.device):  # streams and graphs are those of the current one
            waits = waits_for_device(lambda: round_block(rows.clone(), factor, grid, fmt))
            recorded[key] = eager if waits else record(rows, factor, grid, fmt)
    return recorded[key]


@contextmanager
def recordings() -> Iterator[None]:
    """Inside, recordings are kept for layers of the same shape; after it, their memory is free."""
    try:
        yield
    finally:
        recorded.clear()


def waits_for_device(work: Callable[[], object]) -> bool:
    """Whether some work reads results on the host, which a recording may not, or fails."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            work()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def record(rows: Tensor, factor: Tensor, grid: Grid, fmt: Format) -> Rounding:
    """A CUDA graph of `round_block`. What it returns is overwritten by the next call."""
    own = rows.clone(), factor.clone(), {k: t.clone() for k, t in grid.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        round_block(own[0].clone(), *own[1:], fmt)  # loads what recording may not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = round_block(*own, fmt)

    def replay(rows: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        for mine, given in zip(own[:2], (rows, factor), strict=True):
            mine.copy_(given)
        for name, given in grid.items():
            own[2][name].copy_(given)
        graph.replay()
        return out

    return replay
