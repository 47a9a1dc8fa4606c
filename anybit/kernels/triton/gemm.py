"""One GEMM for every format: y = x W^T, W decoded in registers on its way to the matrix unit.

The tile of W is the left operand (y^T = W x^T), so that on Hopper it goes from registers into the
matrix unit, and few tokens waste little of it. A program multiplies ROWS outputs with TOKENS tokens
over a range of granules of K. If SHARED, SPLIT programs share an output tile: each writes its
partial sum, and the last one to arrive adds all of them in a fixed order, so that results do not
depend on who was last.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from anybit.errors import InvalidType
from anybit.kernels.triton import lang
from anybit.kernels.triton.gpu import shared_memory
from anybit.kernels.triton.lang import floats, settle
from anybit.kernels.triton.layout import LOCKS, Layout, split
from anybit.kernels.triton.tiles import Tile

BAND = 8
DENSE_ROWS = 32
RESERVED = 16 << 10  # bytes of shared memory left for layout changes and tables
# By layout and x's dtype, what a compiler took over what was counted, where that had no room.
TAKEN: dict[tuple[Layout, torch.dtype], float] = {}
MOST_SUMS = 64  # of a thread, up to which it has registers for a group's sums and the total


@triton.jit(do_not_specialize=["M", "SPLIT", "pairs"])
def gemm(
    x, x_scale, words, scale, grid, factor, bias, y, partial, locks, pairs,
    M, N, K, PADDED, PIECES, X_STRIDE, SPLIT,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, EVEN_K: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SHARED: tl.constexpr, CUT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """x (M, K), y (M, N); see `layout.py` for the weight's tensors and `backend.py` for the rest.

    MODE: where the scale goes: "row" (the output), "partial" (a group's sum), "weight".
    pairs: how many times two rows of x, from the first on, have one of y; see `backend.Pairs`.
    BAND: tiles of outputs that run side by side before the next tokens, to stay in the L2 cache.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_n = tl.cdiv(N, ROWS)
    tiles_m = tl.cdiv(M, TOKENS)
    band = tile // (BAND * tiles_m)
    wide = min(tiles_n - band * BAND, BAND)
    tile_n = band * BAND + tile % (BAND * tiles_m) % wide
    tile_m = tile % (BAND * tiles_m) // wide
    n = tile_n * ROWS + tl.arange(0, ROWS)
    m = tile_m * TOKENS + tl.arange(0, TOKENS)
    x += m.to(tl.int64)[None, :] * X_STRIDE

    INTEGER: tl.constexpr = x.dtype.element_ty == tl.int8
    acc = tl.zeros((ROWS, TOKENS), tl.int32 if INTEGER and MODE == "row" else tl.float32)
    share = tl.cdiv(tl.cdiv(PIECES, STEPS), SPLIT) * STEPS
    first = part * share
    last = min(first + share, PIECES)
    AHEAD: tl.constexpr = MODE == "partial"
    ahead = load_scales(scale, min(first, PIECES - 1), n, PADDED, LAYOUT, CUT, AHEAD)
    for i in tl.range(first, last, STEPS, num_stages=STAGES):
        for step in tl.static_range(STEPS):
            now = ahead  # loaded an iteration ago: Triton pipelines loads of operands alone
            ahead = load_scales(scale, min(i + step + 1, PIECES - 1), n, PADDED, LAYOUT, CUT, AHEAD)
            acc = _piece(
                acc, x, words, scale, now, grid, i + step, n, m, M, K, PADDED,
                LAYOUT, DECODE, MODE, EVEN_K, INTEGER, CUT,
            )  # fmt: skip

    if not SHARED:
        _store(acc, x_scale, scale, factor, bias, y, pairs, n, m, M, N, MODE)
    else:
        tiles = tiles_m * tiles_n
        at = tl.arange(0, ROWS)[:, None] + tl.arange(0, TOKENS)[None, :] * ROWS
        mine = partial + (part.to(tl.int64) * tiles + tile) * (ROWS * TOKENS)
        tl.store(mine + at, acc)
        tl.debug_barrier()
        if tl.atomic_add(locks + tile, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.load(partial + tile.to(tl.int64) * (ROWS * TOKENS) + at)
            for other in range(1, SPLIT):
                theirs = partial + (tl.cast(other, tl.int64) * tiles + tile) * (ROWS * TOKENS)
                acc += tl.load(theirs + at)
            tl.store(locks + tile, 0)
            _store(acc, x_scale, scale, factor, bias, y, pairs, n, m, M, N, MODE)


@triton.jit
def _piece(
    acc, x, words, scale, scales, grid, i, n, m, M, K, PADDED,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, EVEN_K: tl.constexpr,
    INTEGER: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """acc + W x^T over the columns of piece i; CUT pieces make a granule."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    COLUMNS: tl.constexpr = LAYOUT.columns
    GROUP: tl.constexpr = LAYOUT.group
    FIELDS: tl.constexpr = LAYOUT.fields // CUT
    FORMAT: tl.constexpr = LAYOUT.fmt
    tiles = load_piece(words, i // CUT, i % CUT, n, PADDED, LAYOUT, CUT)
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    part = tl.zeros(acc.shape, SUM)
    for j in tl.static_range(FIELDS):
        first = (i * FIELDS + j) * COLUMNS
        if lang.new_groups(LAYOUT, j):
            value = grid_of(grid, first, n, PADDED, LAYOUT)
        own = words_of(tiles, j, first, n, K, LAYOUT, CUT)
        w = DECODE(FORMAT, (own, j, LAYOUT, DTYPE, value))
        if MODE == "weight":
            if lang.new_scale(LAYOUT, j):
                s = load_grid(scale, GROUP, COLUMNS, 1, first, n, PADDED).to(tl.float32)
            w = w.to(DTYPE).to(tl.float32) * s
        k = first + tl.arange(0, COLUMNS)
        mask = (m < M)[None, :]
        if not EVEN_K:
            mask = mask & (k < K)[:, None]
        xt = tl.load(x + k[:, None], mask=mask, other=0)
        if MODE == "partial":
            part = lang.dot(w.to(DTYPE), xt, part)
            if (j + 1) * COLUMNS % GROUP == 0 or j + 1 == FIELDS:
                s = scales[lang.scale_of(LAYOUT, j, CUT)][:, None].to(tl.float32)
                acc += part.to(tl.float32) * s
                part = tl.zeros(acc.shape, SUM)
        else:
            acc = lang.dot(w.to(DTYPE), xt, acc)
    return acc


@triton.jit
def _store(
    acc,
    x_scale,
    scale,
    factor,
    bias,
    y,
    pairs,
    n,
    m,
    M,
    N,
    MODE: tl.constexpr,
):
    """Scales of rows and tokens and the bias, in fp32; then the output's dtype."""
    acc = acc.to(tl.float32)
    if MODE == "row":
        acc *= tl.load(scale + n).to(tl.float32)[:, None]
    if factor is not None:
        acc *= tl.load(factor + n)[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + m, mask=m < M, other=0)[None, :]
    there, row = m < M, m
    if pairs is not None:
        two = tl.load(pairs)
        there = there & ((m >= 2 * two) | (m % 2 == 0))
        row = m - tl.minimum((m + 1) // 2, two)
    if bias is not None:
        offset = floats(bias + n, n < N)[:, None]
        acc += offset if pairs is None else tl.where(there[None, :], offset, 0.0)
    if pairs is not None:  # outputs of second rows are added to those before them
        ROWS: tl.constexpr = acc.shape[0]
        HALF: tl.constexpr = acc.shape[1] // 2
        even, _ = tl.split(tl.reshape(m, (HALF, 2)))
        first, second = tl.split(tl.reshape(acc, (ROWS, HALF, 2)))
        first = tl.where((even < 2 * two)[None, :], first + second, first)
        acc = tl.reshape(tl.join(first, second), (ROWS, 2 * HALF))
    mask = (n < N)[:, None] & there[None, :]
    tl.store(y + row.to(tl.int64)[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def dense(
    words,
    scale,
    grid,
    factor,
    w,
    N,
    K,
    PADDED,
    LAYOUT: tl.constexpr,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The decoded weight (N, K) in w's dtype; a program writes ROWS rows of a granule."""
    DTYPE: tl.constexpr = w.dtype.element_ty
    COLUMNS: tl.constexpr = LAYOUT.columns
    GROUP: tl.constexpr = LAYOUT.group
    FIELDS: tl.constexpr = LAYOUT.fields
    FORMAT: tl.constexpr = LAYOUT.fmt
    g = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tiles = load_piece(words, g, 0, n, PADDED, LAYOUT, 1)
    for j in tl.static_range(FIELDS):
        first = (g * FIELDS + j) * COLUMNS
        if lang.new_groups(LAYOUT, j):
            value = grid_of(grid, first, n, PADDED, LAYOUT)
        s = load_grid(scale, GROUP, COLUMNS, 1, first, n, PADDED)
        if factor is not None:
            s = s.to(tl.float32) * tl.load(factor + n)[:, None]
        own = words_of(tiles, j, first, n, K, LAYOUT, 1)
        v = DECODE(FORMAT, (own, j, LAYOUT, DTYPE, value)).to(DTYPE).to(tl.float32) * s
        k = first + tl.arange(0, COLUMNS)
        mask = (n < N)[:, None] & (k < K)[None, :]
        tl.store(w + n.to(tl.int64)[:, None] * K + k[None, :], v.to(DTYPE), mask=mask)


@triton.jit
def load_scales(scale, i, n, PADDED, LAYOUT: tl.constexpr, CUT: tl.constexpr, AHEAD: tl.constexpr):
    """Scales (N,) of the groups of piece i, or nothing where they are not wanted ahead."""
    GROUP: tl.constexpr = LAYOUT.group
    COLUMNS: tl.constexpr = LAYOUT.granule // CUT
    COUNT: tl.constexpr = lang.scale_count(LAYOUT, CUT) if AHEAD else 0
    out = ()
    for j in tl.static_range(COUNT):
        out = out + (tl.load(scale + (i * COLUMNS // GROUP + j) * PADDED + n),)
    return out


@triton.jit
def load_piece(words, g, c, n, PADDED, LAYOUT: tl.constexpr, CUT: tl.constexpr):
    """All tiles (N, lanes) of piece c of granule g: for each book, each plane, as many as it has.

    Fields of the piece count from its own first one. CUT = 1 means the whole granule. Sequences are
    read where they are needed.
    """
    PLANES: tl.constexpr = lang.plane_count(LAYOUT)
    ALL: tl.constexpr = 0 if LAYOUT.fmt.window else LAYOUT.fmt.books * PLANES
    out = ()
    for i in tl.static_range(ALL):
        out = out + _load_tiles(words[i], g, c, n, PADDED, LAYOUT, i % PLANES, CUT)
    return words if LAYOUT.fmt.window else out


@triton.jit
def _load_tiles(
    words, g, c, n, PADDED, LAYOUT: tl.constexpr, PLANE: tl.constexpr, CUT: tl.constexpr
):
    LANES: tl.constexpr = LAYOUT.lanes
    TILES: tl.constexpr = lang.tile_count(LAYOUT, PLANE)
    MINE: tl.constexpr = lang.cut_tiles(LAYOUT, PLANE, CUT)
    SHIFT: tl.constexpr = lang.cut_shift(LAYOUT, PLANE, CUT)
    lane = tl.arange(0, LANES)
    out = ()
    for t in tl.static_range(MINE):
        tile = g * TILES + c * TILES // CUT + t
        w = tl.load(words + tile * PADDED * LANES + n[:, None] * LANES + lane[None, :])
        if SHIFT > 0:
            w = lang.shifted(w, c % (CUT // TILES) * SHIFT)
        out = out + (w,)
    return out


@triton.jit
def words_of(tiles, J: tl.constexpr, first, n, K, LAYOUT: tl.constexpr, CUT: tl.constexpr):
    """The tiles of a piece that hold its field J; of sequences, the windows of its columns."""
    PLANES: tl.constexpr = lang.plane_count(LAYOUT)
    ALL: tl.constexpr = LAYOUT.fmt.books * PLANES
    out = ()
    if LAYOUT.fmt.window:
        out = out + (_windows(tiles[0], first, n, K, LAYOUT),)
    else:
        for i in tl.static_range(ALL):
            out = out + (tiles[lang.tile_of(LAYOUT, i, J, CUT)],)
    return out


@triton.jit
def _windows(words, first, n, K, LAYOUT: tl.constexpr):
    """Bits of the sequences that end with each step's own ones, (N, steps) uint32.

    The columns are those of a field, `first` being the first of them; see `core/tiles.py`.
    """
    BITS: tl.constexpr = LAYOUT.fmt.bits
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    STEPS: tl.constexpr = LAYOUT.columns // WIDTH
    WORDS: tl.constexpr = 256 // WIDTH * BITS // 32  # of a sequence
    k = first + tl.arange(0, STEPS)[None, :] * WIDTH
    row, column = n[:, None] % 16, k % 16
    if WIDTH == 4:  # of columns c, c + 1, c + 8 and c + 9
        column = column // 2
    own = column % 2 + column // 8 * 2 + row // 8 * 4
    step = (row % 8 * 32 + column % 8 // 2 * 8 + own) // WIDTH
    end = (step + 1) * BITS  # counted in bits, high ones first
    tile = n[:, None].to(tl.int64) // 16 * (K // 16) + tl.minimum(k, K - 1) // 16
    at = words + tile * WORDS
    low = tl.load(at + (end - 1) // 32).to(tl.uint32, bitcast=True)
    high = tl.load(at + (end + (WORDS * 32 - 16)) // 32 % WORDS).to(tl.uint32, bitcast=True)
    shift = (-end & 31).to(tl.uint32)
    return (low >> shift | high << (31 - shift) << 1) & ((1 << LAYOUT.fmt.window) - 1)


@triton.jit
def grid_of(grid, first, n, PADDED, LAYOUT: tl.constexpr):
    """Grid values for the columns of a field, `first` being the first of them."""
    TENSORS: tl.constexpr = lang.grid_count(LAYOUT)
    out = ()
    for i in tl.static_range(TENSORS):
        out = out + (_load_entry(grid[i], i, first, n, PADDED, LAYOUT),)
    return out


@triton.jit
def _load_entry(t, I: tl.constexpr, first, n, PADDED, LAYOUT: tl.constexpr):
    GROUP: tl.constexpr = lang.grid_group(LAYOUT, I)
    COLUMNS: tl.constexpr = LAYOUT.columns
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    if GROUP < 0:
        return t
    else:
        return load_grid(t, GROUP, COLUMNS, WIDTH, first, n, PADDED)


@triton.jit
def load_grid(t, GROUP: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, first, n, PADDED):
    """Grid values for COLUMNS columns from `first` on: (N, 1) if all share one, or one each."""
    if GROUP == 0:
        return tl.load(t + n)[:, None]
    elif GROUP % COLUMNS == 0:
        return tl.load(t + (first // GROUP) * PADDED + n)[:, None]
    else:
        k = first + tl.arange(0, COLUMNS // WIDTH) * WIDTH
        return tl.load(t + (k // GROUP)[None, :] * PADDED + n[:, None])


class Plan(NamedTuple):
    """What a launch of `gemm` needs beside tensors.

    Attributes:
        grid: tiles, and programs that share one.
        pieces: of K.
        sums: the shape of sums that meet, and their dtype.
        constants: of the kernel.
        counted: bytes of shared memory, by `counted`.
    """

    grid: tuple[int, int]
    pieces: int
    sums: tuple[tuple[int, ...], torch.dtype]
    constants: dict[str, Any]
    counted: int


def launch(
    x: Tensor,
    x_scale: Tensor | None,
    prepared: list[Tensor],
    bias: Tensor | None,
    y: Tensor,
    layout: Layout,
    tile: Tile,
    pairs: Tensor | None = None,
) -> None:
    """y (M, N) = x (M, K) W^T, with x's scales (M,) and a bias (N,) where there are any.

    pairs: `Pairs.count`.
    """
    words, scale, grid, factor, locks = split(layout, prepared)
    (m, k), n = x.shape, y.shape[1]
    plan = planned(layout, tile, x.dtype, x.device, m, n, k)
    shape, accumulator = plan.sums
    try:
        gemm[plan.grid](
            x, x_scale, words, scale, grid, factor, bias, y,
            x.new_empty(shape, dtype=accumulator), locks, pairs,
            m, n, k, scale.shape[1], plan.pieces, x.stride(0), plan.grid[1], **plan.constants,
        )  # fmt: skip
    except OutOfResources as error:
        more = TAKEN.get((layout, x.dtype), 0) * error.required / error.limit
        TAKEN[layout, x.dtype] = max(more, error.required / plan.counted)
        planned.cache_clear()
        if planned(layout, tile, x.dtype, x.device, m, n, k) == plan:
            raise
        launch(x, x_scale, prepared, bias, y, layout, tile, pairs)


@lru_cache(4096)
def planned(
    layout: Layout, tile: Tile, dtype: torch.dtype, device: torch.device, m: int, n: int, k: int
) -> Plan:
    """The launch for x (M, K) of a dtype and N outputs."""
    if dtype == torch.int8 and layout.unit != 8:  # which Triton's compiler answers by an abort
        raise InvalidType("codes in int8 need a layout of 8-bit units; give them in fp16 or bf16")
    # A cut tile is decoded before it has the operand's layout, as `lang.multiply_add` needs it.
    most = layout.fields if layout.unit == 16 else 1
    tile = fitted(replace(tile, cut=min(tile.cut, most)), layout, dtype, device)
    pieces = layout.granules(k) * tile.cut
    steps = tile.steps if pieces % tile.steps == 0 else 1
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    parts = min(tile.split, pieces // steps) if tiles <= LOCKS else 1
    mode = layout.scale_mode
    sums = tile.rows * tile.tokens // (32 * tile.warps)
    if mode == "partial" and sums > MOST_SUMS and dtype != torch.int8:
        mode = "weight"
    accumulator = torch.int32 if dtype == torch.int8 and mode == "row" else torch.float32
    size = (parts, tiles, tile.rows * tile.tokens) if parts > 1 else (0,)
    constants = {
        "LAYOUT": layout,
        "DECODE": lang.jit(type(layout.fmt).triton_decode),
        "MODE": mode,
        "EVEN_K": k % layout.granule == 0,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "SHARED": parts > 1,
        "CUT": tile.cut,
        "STEPS": steps,
        "STAGES": tile.stages,
        "BAND": BAND,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    taken = counted(tile, layout, dtype)
    return Plan((tiles, parts), pieces, (size, accumulator), constants, taken)


def fitted(tile: Tile, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile with as many stages and as large pieces as shared memory holds."""
    room = shared_memory(device) - RESERVED
    if more := TAKEN.get((layout, dtype)):
        room = int(shared_memory(device) / more)
    while counted(tile, layout, dtype) > room:
        if tile.steps > 1:
            tile = replace(tile, steps=1)
        elif tile.stages > 3 or tile.cut >= layout.fields or layout.unit == 8:
            if tile.stages == 1:
                return tile
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, cut=tile.cut * 2)
    return tile


def counted(tile: Tile, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of shared memory that loads in flight take."""
    words = tile.rows * layout.lanes * layout.unit // 8 * layout.fmt.books
    tiles = sum(layout.cut_tiles(p, tile.cut) for p in range(len(layout.segments)))
    columns = layout.granule // tile.cut
    piece = words * tiles + tile.tokens * columns * dtype.itemsize
    # Groups narrower than a field: a value is loaded for every column.
    narrow = sum(0 < group < layout.columns for group in layout.grid_groups)
    piece += tile.rows * columns * narrow
    return piece * tile.steps * max(1, tile.stages)


def launch_dense(prepared: list[Tensor], layout: Layout, w: Tensor) -> None:
    """Decode the weight into w (N, K), contiguous, fp16 or bf16."""
    words, scale, grid, factor, _ = split(layout, prepared)
    n, k = w.shape
    dense[(layout.granules(k), -(-n // DENSE_ROWS))](
        words,
        scale,
        grid,
        factor,
        w,
        n,
        k,
        scale.shape[1],
        LAYOUT=layout,
        DECODE=lang.jit(type(layout.fmt).triton_decode),
        ROWS=DENSE_ROWS,
    )


settle(globals())
