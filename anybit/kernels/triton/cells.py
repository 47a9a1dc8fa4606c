"""Codebook weights as kernels in CuTe DSL read them -> a dense weight, for many tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = tl.constexpr(16)
CELL = tl.constexpr(512)


@triton.jit
def _decode(
    blocks, row_scale, book, out, N, K,
    BOOKS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One block: 16 rows x 32 vectors of WIDTH columns; see `cute/cells.py`."""
    COLUMNS: tl.constexpr = 32 * WIDTH
    BYTES: tl.constexpr = BOOKS * CELL + GROUPS * 32
    tile, block = tl.program_id(1), tl.program_id(0)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row % 8 * 2 + row // 8
    at = blocks + (tile.to(tl.int64) * tl.num_programs(0) + block) * BYTES
    codes = at + (column // WIDTH * 16)[None, :] + place[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for b in tl.static_range(BOOKS):
        code = tl.load(codes + b * CELL).to(tl.int32)
        total += tl.load(book + (b * 256 + code) * WIDTH + (column % WIDTH)[None, :]).to(tl.float32)
    scales = (at + BOOKS * CELL).to(tl.pointer_type(tl.float16))
    group = column // (COLUMNS // GROUPS)
    scale = tl.load(scales + (group * 16)[None, :] + place[:, None]).to(tl.float32)
    n = tile * ROWS + row
    scale *= tl.load(row_scale + n)[:, None]
    to = out + n.to(tl.int64)[:, None] * K + (block * COLUMNS + column)[None, :]
    inside = (n[:, None] < N) & ((block * COLUMNS + column)[None, :] < K)
    tl.store(to, (total * scale).to(out.dtype.element_ty), mask=inside)


def decode(
    blocks: Tensor, row_scale: Tensor, book: Tensor, shape: tuple[int, int], groups: int
) -> Tensor:
    """The weight (N, K) in the codebook's dtype; `cute.cells.pack` made the tensors."""
    n, k = shape
    books, _, width = book.shape
    out = torch.empty(n, k, dtype=book.dtype, device=book.device)
    _decode[(blocks.shape[1], blocks.shape[0])](
        blocks, row_scale, book, out, n, k, BOOKS=books, WIDTH=width, GROUPS=groups
    )
    return out
