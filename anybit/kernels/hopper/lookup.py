"""Codebooks in the main loop for more than 16 tokens: what it reads, and in which tiles; no DSL.

The main loop of `gemm.py` with look-ups in the place of decoding (`lookup_gemm.py`). It reads the
same cells as the kernels for up to 16 tokens, so a weight lies in memory once.

A thread of a WGMMA holds two columns of a row in a register: one word of a centroid. The table in
shared memory is laid out by words. An entry of 128 bytes holds a centroid once for each lane that
may ask for the same word, so the lanes of a warp never meet in a bank, whatever their codes are. Two
codebooks lie side by side in entries of 256 bytes, so that a code is the second byte of an address.
"""

from dataclasses import dataclass, field

import torch

from anybit.format import Format
from anybit.kernels.hopper.cells import CELL, ROWS, TABLE, Cells, cells_of
from anybit.kernels.hopper.decode import K_TILE, MANTISSA, Decoder
from anybit.kernels.hopper.tiles import Kernel, Tile, fits_once, fitted

TILES_OF_BLOB = 128 // ROWS  # row tiles of cells in a tile of the GEMM


@dataclass(frozen=True)
class LookupDecoder(Decoder):
    """Cells to fp16 or bf16: the sum of m centroids, times the scale of their group."""

    places: tuple[int, ...] = ()
    cells: Cells = field(kw_only=True)

    sources = ("cells.py", "fragments.py", "lookup_gemm.py")

    @property
    def bits(self) -> int:
        """Of a weight's codes, rounded up."""
        return -(-8 * self.cells.m // self.cells.v)

    @property
    def k_tiles(self) -> int:
        """K tiles in a block of cells."""
        return self.cells.columns // K_TILE

    @property
    def piece(self) -> int:
        """Bytes of a cell that a K tile takes."""
        return CELL // self.k_tiles

    @property
    def groups(self) -> int:
        """Scales of a row in a K tile."""
        return max(1, self.cells.groups // self.k_tiles)

    @property
    def tile_bytes(self) -> int:
        """Of 16 rows and a K tile: a piece of each cell, then scales."""
        return self.cells.m * self.piece + 2 * ROWS * self.groups

    @property
    def blob_bytes(self) -> int:
        return TILES_OF_BLOB * self.tile_bytes

    @property
    def table_bytes(self) -> int:
        return -(-self.cells.m // 2) * TABLE


def lookup(fmt: Format, dtype: torch.dtype) -> LookupDecoder | str:
    """The decoder of a codebook format for activations of this dtype, or why there is none."""
    cells = cells_of(fmt)
    if isinstance(cells, str):
        return cells
    name = str(dtype).removeprefix("torch.")
    if name not in MANTISSA:
        return f"codebooks are multiplied by fp16 and bf16 activations, not by {dtype}"
    return LookupDecoder(name, cells=cells)


def candidates(d: LookupDecoder) -> list[Tile]:
    """Tiles that leave room for at least two stages beside the table."""
    every = [
        Tile(tokens, split=split) for tokens in (32, 64, 128) for split in (1, 2, 4)
    ] + [Tile(32, ctas=2), Tile(32, ctas=2, split=2), Tile(64, ctas=2), Tile(256)]
    tiles = [fitted(tile, d) for tile in every]
    return [tile for tile in tiles if tile.stages >= 2]


def choose(d: LookupDecoder, m: int, n: int, k: int) -> Tile | None:
    """The tile for m tokens, or None where there is none."""
    tokens = next((t for t in (32, 64) if m <= t), 128)
    found = [t for t in candidates(d) if t.tokens <= tokens and fits_once(t, m, n, k)]
    most = max((t.tokens for t in found), default=0)
    return max((t for t in found if t.tokens == most), key=lambda t: t.split, default=None)


def kernels_of(d: LookupDecoder) -> list[Kernel]:
    return [Kernel(d, tile, d.operand) for tile in candidates(d)]
