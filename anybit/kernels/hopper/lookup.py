"""Codebooks in the main loop for more than 16 tokens: what it reads, and in which tiles; no DSL.

The main loop of `gemm.py` with look-ups in the place of decoding (`lookup_gemm.py`). It reads the
same cells as the kernels for up to 16 tokens, so a weight lies in memory once.

A thread of a WGMMA holds two columns of a row in a register: one word of a centroid. An entry of
the table in shared memory is 128 bytes of copies of one centroid, one copy for each lane that may
ask for the same word; so lanes never meet in a bank, whatever their codes are. Two codebooks lie
side by side in entries of 256 bytes, so that a code is the second byte of an address.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from anybit.core.format import Format
from anybit.kernels.cute import pack
from anybit.kernels.cute.cells import CELL, ROWS, Cells, cells_of
from anybit.kernels.cute.decode import K_TILE, MANTISSA, Decoder
from anybit.kernels.hopper import codebook_tiles, tiles
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.codebook_tiles import TABLE
from anybit.kernels.hopper.tiles import Kernel, Tile, fits_once, fitted

TILES_OF_BLOB = 128 // ROWS  # row tiles of cells in a tile of the GEMM
DENSE_FROM = 4096  # tokens, by codebook
FEW, MOST_FEW = 8, codebook_tiles.TOKENS[-1]  # tokens that never, or not always, come here
MOST_HELD = 64  # tokens that one tile holds, if it may


@dataclass(frozen=True)
class LookupDecoder(Decoder):
    """Cells to fp16 or bf16: the sum of m centroids, times the scale of their group."""

    places: tuple[int, ...] = ()
    cells: Cells = field(kw_only=True)

    def main_loop(self) -> Any:
        from anybit.kernels.hopper import lookup_gemm

        return lookup_gemm.LookupGemm

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
    def table_bytes(self) -> int:  # type: ignore[override]
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
    """Tiles that leave room for at least two stages beside the table.

    Spills: 256 rows with more than one codebook, or with fine groups; 256 tokens with fine groups;
    equal shares of 128 tokens with four codebooks. 256 rows of 128 tokens were slower, and those of
    64 no faster. Clusters of four were slower than those of two.
    """
    every = [Tile(tokens, split=split) for tokens in (32, 64, 96, 128) for split in (1, 2)]
    every += [Tile(tokens, shared=True) for tokens in (32, 64, 96)]
    if d.cells.m < 4:
        every += [Tile(128, shared=True)]
    if d.cells.m == 1 and d.cells.v == 4 and d.groups <= 4:
        every += [Tile(96, rows=256)]
    every += [Tile(256, shared=shared) for shared in (False, True)] * (d.groups <= 4)
    return [tile for tile in (fitted(tile, d) for tile in every) if tile.stages >= 2]


def choose(d: LookupDecoder, m: int, n: int, k: int, chip: Chip = H200) -> Tile | None:
    """The tile for m tokens; None where there is none, or another way is faster.

    That is a dense weight for thousands, or the kernel for up to 16. Equal shares, and more rows,
    where they take a tenth less by the model.
    """
    if m <= FEW or m * d.cells.m >= DENSE_FROM:
        return None
    every = candidates(d)
    least = min(m, MOST_HELD, max((tile.tokens for tile in every), default=0))
    found = [tile for tile in every if tile.tokens >= least and fits_once(tile, d, m, n, k, chip)]

    def time(tile: Tile) -> float:
        doubt = 0.9 if tile.shared or tile.rows > pack.ROWS else 1
        return cycles(tile, d, m, n, k, chip) / doubt

    best = min(found, key=time, default=None)
    plan = codebook_tiles.choose(d.cells, m, n, k, d.operand, chip) if m <= MOST_FEW else None
    if best and plan and time(best) >= codebook_tiles.cycles(plan, m, n, k, chip):
        return None
    return best


def cycles(tile: Tile, d: LookupDecoder, m: int, n: int, k: int, chip: Chip) -> float:
    """Clock cycles of a product: shared memory is what look-ups and products wait for.

    A look-up of a word for every lane takes two cycles, one of more words a cycle for each and some
    more. A token of a K tile takes four for the products of 128 rows, and three to come and for the
    rest. The numbers fit times of an H200; two stages do not hide the copies' latency.
    """
    blocks = tile.rows // pack.ROWS
    looked_up = (512 if d.cells.v == 4 else 400) * d.cells.m * blocks + 500 * (tile.stages == 2)
    step = looked_up + (4 * blocks + 3) * tile.tokens
    return tiles.cycles(tile, d, m, n, k, chip, step)


def kernels_of(cells: Cells) -> list[Kernel]:
    """Every kernel that `choose` may name."""
    decoders = [LookupDecoder(dtype, cells=cells) for dtype in MANTISSA]
    return [Kernel(d, tile, d.operand) for d in decoders for tile in candidates(d)]
