"""Codebook weights as kernels in CuTe DSL read them -> a dense weight, for many tokens."""

import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.triton.lang import settle

ROWS, VECTORS, CELL = tl.constexpr(16), tl.constexpr(32), tl.constexpr(512)


@triton.jit
def _decode(
    blocks,
    row_scale,
    book,
    out,
    N,
    K,
    BOOKS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One block: 16 rows x 32 vectors of WIDTH columns; see `cute/cells.py`."""
    BYTES: tl.constexpr = BOOKS * CELL + GROUPS * 32
    tile, block = tl.program_id(1), tl.program_id(0)
    row, vector, place = tl.arange(0, ROWS), tl.arange(0, VECTORS), tl.arange(0, WIDTH)
    pair = row % 8 * 2 + row // 8
    at = blocks + (tile.to(tl.int64) * tl.num_programs(0) + block) * BYTES
    codes = at + (vector * ROWS)[None, :] + pair[:, None]
    total = tl.zeros((ROWS, VECTORS, WIDTH), tl.float32)
    for b in tl.static_range(BOOKS):
        # A thread has a whole centroid, which is one load.
        entry = (tl.load(codes + b * CELL).to(tl.int32) + b * 256) * WIDTH
        total += tl.load(book + entry[:, :, None] + place[None, None, :]).to(tl.float32)
    scales = (at + BOOKS * CELL).to(tl.pointer_type(tl.float16))
    group = vector * GROUPS // VECTORS
    scale = tl.load(scales + (group * ROWS)[None, :] + pair[:, None]).to(tl.float32)
    n = tile * ROWS + row
    scale *= tl.load(row_scale + n)[:, None]
    column = (block * VECTORS + vector[:, None]) * WIDTH + place[None, :]
    to = out + n.to(tl.int64)[:, None, None] * K + column[None, :, :]
    inside = (n < N)[:, None, None] & (column < K)[None, :, :]
    tl.store(to, (total * scale[:, :, None]).to(out.dtype.element_ty), mask=inside)


def decode(
    blocks: Tensor, row_scale: Tensor, book: Tensor, shape: tuple[int, int], groups: int
) -> Tensor:
    """The weight (N, K) in the codebook's dtype; `cute.cells.pack` made the tensors."""
    n, k = shape
    books, _, width = book.shape
    out = book.new_empty(n, k)
    _decode[(blocks.shape[1], blocks.shape[0])](
        blocks, row_scale, book, out, n, k, BOOKS=books, WIDTH=width, GROUPS=groups
    )
    return out


settle(globals())
