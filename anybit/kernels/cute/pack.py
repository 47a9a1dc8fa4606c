"""Canonical planes -> the order in which threads want them: one permutation of bits.

The weight is cut into blobs of 128 rows x 128 columns, each contiguous, so that one bulk copy
brings it to shared memory. Inside a blob every thread of two warpgroups finds its own words, 16
bytes at a time and side by side with its neighbours': no bank conflicts, no swizzle (FP6-LLM's
pre-packing, LiquidGEMM's dual-MMA layout).

    blob  = codes [warpgroup 2][chunk][thread 128][4 words], grid [warpgroup][row pair 32][words]
    words of a thread = [half tile 2][bits]: one word for each bit of a code and 32 weights
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core import planes as planes_of
from anybit.core.packed import Packed
from anybit.kernels.cute.decode import K_TILE, Decoder

ROWS = 128  # of a blob
ROW_MULTIPLE = 256  # weight rows are padded to this; no tile has more
CHUNK_BYTES = 1 << 28  # of temporaries


class Layout(NamedTuple):
    """Where the kernels of a family find a weight's codes: a permutation of a blob's bits.

    Attributes:
        fragment: Codes (rows, K) and the bits of an operand's element -> (row tile, K tile, ...,
            32): last, what a thread decodes together, in the order of its registers.
        chunk: A word for each bit of 32 codes, (..., bits) -> (row tile, K tile, words of a blob).
    """

    fragment: Callable[[Tensor, int], Tensor]
    chunk: Callable[[Tensor], Tensor]


def pack(packed: Packed, decoder: Decoder, layout: Layout) -> Tensor:
    """(row tiles, K tiles, bytes) uint8; rows past N and columns past K hold zeros.

    Whatever number a zero code is, it meets activations that are zero there.
    """
    n, k = packed.shape
    grid = decoder.grid(packed)
    tiles = -(-n // ROW_MULTIPLE) * ROW_MULTIPLE // ROWS
    shape = tiles, k_tiles(k), decoder.blob_bytes
    blobs = torch.zeros(shape, dtype=torch.uint8, device=packed.planes[0].device)
    step = max(1, CHUNK_BYTES // (ROWS * k * decoder.bits))
    size = K_TILE * K_TILE * decoder.bits // 8
    for start in range(0, -(-n // ROWS), step):
        rows = slice(start * ROWS, min(n, (start + step) * ROWS))
        own = packed.rows(rows)
        codes = own.format.digits(own.codes(), own.grid)
        part = pad_columns(decoder.stored(pad_rows(codes)))
        out = blobs[start : start + len(part) // ROWS]
        out[..., :size] = pack_codes(part, decoder, layout)
        if grid is not None:
            out[..., size:] = pack_grid(pad_rows(grid[rows]), decoder, k)
    return blobs


def packed_bytes(n: int, k: int, decoder: Decoder) -> int:
    """Of the blobs that hold a weight (n, k): what a kernel reads of it."""
    return -(-n // ROWS) * k_tiles(k) * decoder.blob_bytes


def pack_codes(codes: Tensor, decoder: Decoder, layout: Layout) -> Tensor:
    """(rows, K) -> (row tiles, K tiles, bytes of codes)."""
    f = layout.fragment(codes, decoder.held)
    b = torch.arange(decoder.bits, device=codes.device, dtype=torch.uint8)
    bits = ((f[..., None] >> b) & 1).flatten(-2)  # (..., 32 * bits): bit of code innermost
    stored = bits[..., decoder.order().to(codes.device)]
    words = planes_of.pack(stored.reshape(-1, stored.shape[-1]), 1)[0]
    words = ~words if decoder.verbatim else words
    return layout.chunk(words.view(*f.shape[:-1], decoder.bits)).view(torch.uint8)


def pack_grid(grid: Tensor, decoder: Decoder, k: int) -> Tensor:
    """(rows, groups, words) of 16 bits -> (row tiles, K tiles, bytes of the grid)."""
    rows, groups, words = grid.shape
    tiles = k_tiles(k)
    if groups == 1 or decoder.group > K_TILE:  # one group spans several K tiles
        grid = grid.repeat_interleave(-(-tiles // groups), 1)
    missing = tiles * decoder.entries - grid.shape[1]
    grid = torch.cat((grid, grid.new_zeros(rows, missing, words)), 1) if missing else grid
    g = grid.view(rows // ROWS, 2, 4, 2, 8, tiles, decoder.entries, decoder.grid_words)
    g = g.permute(0, 5, 1, 2, 4, 6, 7, 3)  # row tile, K tile, warpgroup, warp, g, entry, word, v
    both = g[..., 0] | g[..., 1] << 16
    return both.reshape(rows // ROWS, tiles, -1).contiguous().view(torch.uint8)


def fragment(codes: Tensor, slot: int) -> Tensor:
    """(rows, K) -> (row tile, K tile, warpgroup 2, thread 128, half 2, 32): by thread.

    The last axis runs over registers and the elements inside each. Thread t = 32 w + 4 g + t4 of a
    warpgroup holds in register 4 kb + 2 h + v the row 16 w + 8 v + g and, counted in elements of
    e = 32 / slot to a register, the columns kb (8 e) + h (4 e) + t4 e of the half tile.
    """
    e = 32 // slot
    rows, k = codes.shape
    f = codes.view(rows // ROWS, 2, 4, 2, 8, k // K_TILE, 2, 8 // e, 2, 4, e)
    f = f.permute(0, 5, 1, 2, 4, 9, 6, 7, 8, 3, 10)
    return f.reshape(rows // ROWS, k // K_TILE, 2, 128, 2, 32)


def chunk(words: Tensor) -> Tensor:
    """(..., thread 128, half 2, bits) words -> (row tile, K tile, words of a blob), by 16 bytes."""
    flat = words.flatten(-2)
    count = flat.shape[-1]
    whole = count - count % 4
    parts = [flat[..., i : i + 4].flatten(-2) for i in range(0, whole, 4)]
    if count > whole:
        parts.append(flat[..., whole:].flatten(-2))
    return torch.cat(parts, -1).flatten(2)


# The left operand of WGMMA, and of `mma.sync`, where threads hold it in registers.
REGISTERS = Layout(fragment, chunk)


def k_tiles(k: int) -> int:
    """K tiles of a weight; the last may have fewer columns."""
    return -(-k // K_TILE)


def pad_columns(rows: Tensor) -> Tensor:
    """Zero columns at the end, up to whole K tiles."""
    missing = -rows.shape[1] % K_TILE
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def pad_rows(rows: Tensor) -> Tensor:
    """Zero rows at the end, up to whole blobs."""
    missing = -rows.shape[0] % ROWS
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
