"""CodeGEMM's Psumbook: few tokens times a codebook format, without decoding a weight.

For every position along K (a vector of v columns) the inner products of all centroids with that
part of x are computed once, on the matrix unit. A weight's share of the output is then a look-up by
its code: one gather from shared memory for v weights and one codebook. The table of 32 positions is
used by ROWS outputs before the next one is made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.triton import lang
from anybit.kernels.triton.gemm import load_piece, words_of
from anybit.kernels.triton.layout import LOCKS, Layout, split
from anybit.kernels.triton.layout import ROWS as PADDED_ROWS
from anybit.kernels.triton.tiles import Tile


@triton.jit(do_not_specialize=["SPLIT"])
def psumbook(
    x, words, scale, book, bias, y, partial, locks, N, K, PADDED, GRANULES, X_STRIDE, SPLIT,
    LAYOUT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token and ROWS outputs over a share of K. PARTS: groups of scales in 32 positions."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.program_id(2)
    n = tile * ROWS + tl.arange(0, ROWS)
    LANES: tl.constexpr = LAYOUT.lanes
    acc = tl.zeros((ROWS, PARTS, LANES // PARTS), tl.float32)
    share = tl.cdiv(GRANULES, SPLIT)
    for g in tl.range(part * share, min(part * share + share, GRANULES), num_stages=STAGES):
        acc = _granule(
            acc, x + m * X_STRIDE, words, scale, book, g, n, K, PADDED, LAYOUT, PARTS
        )  # fmt: skip
    out = tl.sum(tl.sum(acc, axis=2), axis=1)
    tiles = tl.num_programs(0)
    if SHARED:  # the last to arrive adds all shares in a fixed order; see `gemm.py`
        at = partial + m * SPLIT * tiles * ROWS + n
        tl.store(at + part * tiles * ROWS, out)
        tl.debug_barrier()
        if tl.atomic_add(locks + m * tiles + tile, 1, sem="acq_rel") == SPLIT - 1:
            out = tl.load(at)
            for other in range(1, SPLIT):
                out += tl.load(at + other * tiles * ROWS)
            tl.store(locks + m * tiles + tile, 0)
            _store(out, scale, bias, y + m * N, n, N, LAYOUT, HAS_BIAS)
    else:
        _store(out, scale, bias, y + m * N, n, N, LAYOUT, HAS_BIAS)


@triton.jit
def _granule(
    acc, x, words, scale, book, g, n, K, PADDED, LAYOUT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    LANES: tl.constexpr = LAYOUT.lanes
    FIELDS: tl.constexpr = LAYOUT.fields
    COLUMNS: tl.constexpr = LAYOUT.columns
    GROUP: tl.constexpr = LAYOUT.group
    BOOKS: tl.constexpr = LAYOUT.fmt.books
    ROWS: tl.constexpr = n.shape[0]
    COUNT: tl.constexpr = 2**LAYOUT.fmt.bits
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    DEPTH: tl.constexpr = 16 if WIDTH < 16 else WIDTH  # the matrix unit's least
    tiles = load_piece(words, g, 0, n, PADDED, LAYOUT, 1)
    lane = tl.arange(0, LANES)
    e = tl.arange(0, DEPTH)
    centroid = tl.arange(0, COUNT)
    for j in tl.static_range(FIELDS):
        first = (g * FIELDS + j) * COLUMNS
        k = first + lane[:, None] * WIDTH + e[None, :]
        xs = tl.load(x + k, mask=(e < WIDTH)[None, :] & (k < K), other=0)
        total = tl.zeros((ROWS, LANES), tl.float32)
        for b in tl.static_range(BOOKS):
            at = book + (b * COUNT + centroid)[None, :] * WIDTH + e[:, None]
            c = tl.load(at, mask=(e < WIDTH)[:, None], other=0)
            table = lang.dot(xs, c.to(DTYPE), tl.zeros((LANES, COUNT), tl.float32))
            table = tl.reshape(table, (LANES * COUNT,))
            code = lang.code((words_of(tiles, j, first, n, K, LAYOUT, 1), j, LAYOUT, DTYPE, ()), b)
            # Banks follow the code: three passes a gather on average. A table by lanes would make
            # eight, since neighbouring threads hold neighbouring rows of the same few lanes.
            index = tl.reshape(code + lane[None, :] * COUNT, (ROWS * LANES,))
            total += tl.reshape(tl.gather(table, index, 0), (ROWS, LANES))
        total = tl.reshape(total, acc.shape)
        if GROUP == 0:
            acc += total
        else:
            group = first // GROUP + tl.arange(0, PARTS)
            s = tl.load(scale + group[None, :] * PADDED + n[:, None]).to(tl.float32)
            acc += total * s[:, :, None]
    return acc


@triton.jit
def _store(out, scale, bias, y, n, N, LAYOUT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if LAYOUT.group == 0:
        out *= tl.load(scale + n).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)


def supports(layout: Layout) -> bool:
    """A codebook of at most 8 bits whose scale groups are a whole part, or parts, of 32 vectors."""
    fmt, group, columns = layout.fmt, layout.group, layout.columns
    whole = not group or group % columns == 0 or columns % group == 0
    table_alone = [name for name, _ in layout.grid] == [fmt.lookup]
    return table_alone and fmt.bits <= 8 and fmt.width > 1 and whole


def launch(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    y: Tensor,
    layout: Layout,
    tile: Tile,
) -> None:
    """y (M, N) = x (M, K) W^T, a launch of programs for every token."""
    words, scale, grid, _, locks = split(layout, prepared)
    (m, k), n = x.shape, y.shape[1]
    padded = words[0].shape[2]
    rows = tile.rows if padded % tile.rows == 0 else PADDED_ROWS
    tiles = -(-n // rows)
    parts = min(tile.split, layout.granules(k)) if tiles * m <= LOCKS else 1
    partial = x.new_empty(m * parts * tiles * rows if parts > 1 else 0, dtype=torch.float32)
    psumbook[(tiles, parts, m)](
        x, words, scale, grid[0], bias, y, partial, locks, n, k, padded,
        layout.granules(k), x.stride(0), parts, LAYOUT=layout, HAS_BIAS=bias is not None,
        ROWS=rows, PARTS=max(1, layout.columns // layout.group) if layout.group else 1,
        SHARED=parts > 1, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
