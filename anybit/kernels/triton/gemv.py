"""One to four tokens on the CUDA cores: no matrix unit, no shared memory in the main loop.

A program owns ROWS outputs and walks along all of K. Every thread keeps sums of its own columns in
fp32; they are added across the threads once, at the end, in a fixed order. x is small and stays in
the L1 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.tiles import Tile
from anybit.kernels.triton import lang
from anybit.kernels.triton.gemm import grid_of, load_grid, load_piece, words_of
from anybit.kernels.triton.layout import Layout, split

MOST_TOKENS = 4


@triton.jit(do_not_specialize=["M"])
def gemv(
    x, x_scale, words, scale, grid, bias, y, M, N, K, PADDED, GRANULES, X_STRIDE,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, HAS_X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y (M, N) = x (M, K) W^T for M <= TOKENS; arguments as in `gemm`."""
    COLUMNS: tl.constexpr = LAYOUT.columns
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = ()
    for _ in tl.static_range(TOKENS):
        acc = acc + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for g in tl.range(0, GRANULES, num_stages=STAGES):
        acc = _granule(
            acc, x, words, scale, grid, g, n, M, K, PADDED, X_STRIDE,
            LAYOUT, DECODE, MODE, EVEN_K, TOKENS,
        )  # fmt: skip
    for m in tl.static_range(TOKENS):
        out = tl.sum(acc[m], axis=1)
        if MODE == "row":
            out *= tl.load(scale + n).to(tl.float32)
        if HAS_X_SCALE:
            out *= tl.load(x_scale + m, mask=m < M, other=0)
        if HAS_BIAS:
            out += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=(n < N) & (n - n + m < M))


@triton.jit
def _granule(
    acc, x, words, scale, grid, g, n, M, K, PADDED, X_STRIDE,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, EVEN_K: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """acc + the products of granule g, for every token, output and column of a field."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    COLUMNS: tl.constexpr = LAYOUT.columns
    GROUP: tl.constexpr = LAYOUT.group
    FIELDS: tl.constexpr = LAYOUT.fields
    FORMAT: tl.constexpr = LAYOUT.fmt
    tiles = load_piece(words, g, 0, n, PADDED, LAYOUT, 1)
    part = ()
    for _ in tl.static_range(TOKENS):
        part = part + (tl.zeros((n.shape[0], COLUMNS), tl.float32),)
    for j in tl.static_range(FIELDS):
        first = (g * FIELDS + j) * COLUMNS
        if lang.new_groups(LAYOUT, j):
            value = grid_of(grid, first, n, PADDED, LAYOUT)
        w = DECODE(FORMAT, (words_of(tiles, j, LAYOUT, 1), j, LAYOUT, DTYPE, value))
        w = w.to(DTYPE).to(tl.float32)
        if MODE == "weight":
            w *= load_grid(scale, GROUP, COLUMNS, 1, first, n, PADDED)
        k = first + tl.arange(0, COLUMNS)
        new = ()
        for m in tl.static_range(TOKENS):
            mask = k - k + m < M
            if not EVEN_K:
                mask = mask & (k < K)
            xm = tl.load(x + m * X_STRIDE + k, mask=mask, other=0).to(tl.float32)
            new = new + (part[m] + w * xm[None, :],)
        part = new
        if j + 1 == FIELDS or (MODE == "partial" and (j + 1) * COLUMNS % GROUP == 0):
            s = 1.0
            if MODE == "partial":
                s = load_grid(scale, GROUP, COLUMNS, 1, first, n, PADDED).to(tl.float32)
            total = ()
            clear = ()
            for m in tl.static_range(TOKENS):
                total = total + (acc[m] + part[m] * s,)
                clear = clear + (tl.zeros((n.shape[0], COLUMNS), tl.float32),)
            acc = total
            part = clear
    return acc


def launch(
    x: Tensor,
    x_scale: Tensor | None,
    prepared: list[Tensor],
    bias: Tensor | None,
    y: Tensor,
    layout: Layout,
    tile: Tile,
) -> None:
    """y (M, N) = x (M, K) W^T for M up to 4."""
    words, scale, grid, _ = split(layout, prepared)
    (m, k), n = x.shape, y.shape[1]
    if m > MOST_TOKENS or layout.unit == 8:
        raise ValueError(
            f"gemv multiplies up to {MOST_TOKENS} tokens of 16 bits, not {m} of {x.dtype}"
        )
    gemv[(triton.cdiv(n, tile.rows),)](
        x, x_scale, words, scale, grid, bias, y, m, n, k, words[0].shape[2], layout.granules(k),
        x.stride(0), LAYOUT=layout, DECODE=lang.jit(type(layout.fmt).triton_decode),
        MODE=layout.scale_mode, HAS_X_SCALE=x_scale is not None, HAS_BIAS=bias is not None,
        EVEN_K=k % layout.granule == 0, TOKENS=1 if m == 1 else 2 if m == 2 else MOST_TOKENS,
        ROWS=tile.rows, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
