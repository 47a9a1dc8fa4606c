"""Codebooks in the main loop for more than 16 tokens: what it reads, and in which tiles; no DSL.

The main loop of `gemm.py` with look-ups in the place of decoding (`lookup_gemm.py`). It reads the
same cells as the kernels for up to 16 tokens, so a weight lies in memory once.

A thread of a WGMMA holds two columns of a row in a register: one word of a centroid. An entry of
the table in shared memory is 128 bytes of copies of one centroid, one copy for each lane that may
ask for the same word; so lanes never meet in a bank, whatever their codes are. Two codebooks lie
side by side in entries of 256 bytes, so that a code is the second byte of an address; a codebook
without a second one has a table of 32 KB, which leaves room for more stages.
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
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.hopper.tiles import fits_once, fitted

TILES_OF_BLOB = 128 // ROWS  # row tiles of cells in a tile of the GEMM
DENSE_FROM = 4096  # tokens, by codebook
FEW, MOST_FEW = 8, codebook_tiles.TOKENS[-1]  # tokens that never, or not always, come here
HALF = K_TILE // 2  # columns of a stage of many tokens: two whole ones do not hide the copies
LOOK_UPS = {4: 470, 8: 340, 16: 400}  # cycles of a codebook's look-ups for 128 rows, by v
# Cycles of each output of a tile that is not the first of its CTA, and of each sum that goes
# through the memory; the latter fits int4's times.
END, SUM = 0.2, 0.32
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
        return self.cells.m * TABLE // 2


def lookup(fmt: Format, dtype: torch.dtype) -> LookupDecoder | str:
    """The decoder of a codebook format for activations of this dtype, or why there is none."""
    cells = cells_of(fmt)
    if isinstance(cells, str):
        return cells
    name = str(dtype).removeprefix("torch.")
    if name not in MANTISSA:
        return f"codebooks are multiplied by fp16 and bf16 activations, not by {dtype}"
    return LookupDecoder(name, cells=cells)


@dataclass(frozen=True)
class WideTile(Tile):
    """A tile whose consumers take registers of idle producers: 192 tokens would spill otherwise."""

    @property
    def wide(self) -> bool:
        return True


def candidates(d: LookupDecoder) -> list[Tile]:
    """Tiles that leave room for at least two K tiles beside the table.

    Spills: 256 rows with more than one codebook, or with fine groups; 256 tokens with fine groups;
    equal shares of 128 tokens with four codebooks. 256 rows of 128 tokens were slower, and those of
    64 no faster. Clusters of four were slower than those of two.
    """
    every = [Tile(tokens, split=split) for tokens in (32, 64, 96, 128) for split in (1, 2)]
    every = every[d.cells.m > 1 :]  # shares of 32 tokens were 1.13 to 1.2 times as fast
    every += [Tile(tokens, shared=True) for tokens in (32, 64, 96)]
    if d.cells.m < 4:
        every += [Tile(128, shared=True)]
    if d.cells.m == 1 and d.cells.v == 4 and d.groups <= 4:
        every += [Tile(96, rows=256, columns=HALF)]
    if d.groups <= 4:
        every += [Tile(256, columns=HALF, shared=shared) for shared in (False, True)]
        every += [WideTile(192, columns=HALF, shared=True)]
    every = [fitted(tile, d) for tile in every]
    return [tile for tile in every if tile.stages * tile.columns >= 2 * K_TILE]


def choose(d: LookupDecoder, m: int, n: int, k: int, chip: Chip = H200) -> Tile | None:
    """The tile for m tokens; None where there is none, or another way is faster.

    That is a dense weight for thousands of tokens, or the kernel for up to 16, unless it takes 3 %
    longer. Equal shares where they take a tenth less by the model.
    """
    if m <= FEW or m * d.cells.m >= DENSE_FROM:
        return None
    every = candidates(d)
    least = min(m, MOST_HELD, max((tile.tokens for tile in every), default=0))
    found = [tile for tile in every if tile.tokens >= least and fits_once(tile, d, m, n, k, chip)]

    def time(tile: Tile) -> float:
        doubt = 0.9 if tile.shared else 1
        return cycles(tile, d, m, n, k, chip) / doubt

    best = min(found, key=time, default=None)
    plan = codebook_tiles.choose(d.cells, m, n, k, d.operand, chip) if m <= MOST_FEW else None
    if best and plan and 1.03 * time(best) >= codebook_tiles.cycles(plan, m, n, k, chip):
        return None
    return best


def cycles(tile: Tile, d: LookupDecoder, m: int, n: int, k: int, chip: Chip) -> float:
    """Clock cycles of a product: of a K tile's look-ups, and of each of its tokens.

    The numbers fit times of an H200. Two stages do not hide all of the copies' latency.
    """
    blocks = tile.rows // pack.ROWS
    looked_up = LOOK_UPS[d.cells.v] * d.cells.m * blocks + 200 * d.cells.m * (tile.stages == 2)
    step = looked_up + (7 if blocks == 1 else 13) * tile.tokens
    met = tiles.parts_met(tile, m, n, k, chip) * SUM * tile.rows * tile.tokens
    met += tiles.EXCHANGE * (tile.split > 1)
    steps = tiles.most_steps(tile, m, n, k, chip)
    ends = max(0, steps / pack.k_tiles(k) - 1) * END * tile.rows * tile.tokens
    return steps * step + ends + tiles.FIXED + met


def kernels_of(cells: Cells) -> list[Kernel]:
    """Every kernel that `choose` may name."""
    decoders = [LookupDecoder(dtype, cells=cells) for dtype in MANTISSA]
    return [Kernel(d, tile, d.operand) for d in decoders for tile in candidates(d)]
