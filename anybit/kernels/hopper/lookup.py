"""Codebooks in the main loop for more than 16 tokens: what it reads, and when it is chosen; no DSL.

The main loop of `gemm.py` with look-ups in the place of decoding (`lookup_gemm.py`). It reads the
same cells as the kernels for up to 16 tokens, so a weight lies in memory once.

A thread of a WGMMA holds two columns of a row in a register: one word of a centroid. An entry of
the table in shared memory is 128 bytes of copies of one centroid, one copy for each lane that may
ask for the same word; so lanes never meet in a bank, whatever their codes are. Two codebooks lie
side by side in entries of 256 bytes, so that a code is the second byte of an address; a codebook
without a second one has a table of 32 KB, which leaves room for more stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from anybit.core.format import Format
from anybit.kernels.choice import Work, cycles
from anybit.kernels.cute.cells import CELL, ROWS, Cells, cells_of
from anybit.kernels.cute.decode import K_TILE, MANTISSA, Decoder
from anybit.kernels.hopper import codebook_tiles, tiles
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.codebook_tiles import TABLE, Plan
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.hopper.tiles import fits_once, fitted
from anybit.kernels.tuned import Winner, fastest

TILES_OF_BLOB = 128 // ROWS  # row tiles of cells in a tile of the GEMM
# Tokens, by codebook, from which a decoded copy is faster: with tiles of 256 tokens, and without.
DENSE_FROM, SOON = 16384, 4096
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


@cache
def candidates(d: LookupDecoder) -> tuple[Tile, ...]:
    """Tiles that leave room for at least two K tiles beside the table.

    Spills: 256 tokens with fine groups; equal shares of 128 tokens with four codebooks. 256 rows
    were slower. Clusters of four and six are for weights whose tiles leave most multiprocessors
    idle.
    """
    every = [Tile(t, split=s) for t in (32, 64) for s in (2, 4, 6)]
    every += [Tile(128), Tile(128, split=2)]
    every += [Tile(tokens, stream_k=True) for tokens in (32, 64)]
    if d.cells.m < 4:
        every += [Tile(128, stream_k=True)]
    if d.groups <= 4:
        every += [Tile(256), Tile(256, stream_k=True), WideTile(192, stream_k=True)]
    every = [staged(tile, d) for tile in every]
    return tuple(tile for tile in every if tile.stages * tile.columns >= 2 * K_TILE)


def staged(tile: Tile, d: LookupDecoder) -> Tile:
    """The tile with all stages that fit, of a K tile or of halves.

    Two whole ones do not hide the copies of 192 tokens and more: halves take 0.95 of the time in
    the mean. Where three fit, halves take 1.03 to 1.04.
    """
    whole = fitted(tile, d)
    if tile.tokens <= 128 or whole.stages > 2:
        return whole
    return fitted(replace(tile, columns=K_TILE // 2), d)


def choose(
    d: LookupDecoder, m: int, n: int, k: int, chip: Chip = H200, found: Winner | None = None
) -> Plan | Tile | None:
    """The kernel for few tokens or the tile for more; None: by a dense weight.

    found: as `tuned.fastest` takes it.
    """
    return fastest(lambda count: ways(d, count, n, k, chip), m, found)


def ways(
    d: LookupDecoder, m: int, n: int, k: int, chip: Chip = H200
) -> Iterator[tuple[float, Plan | Tile]]:
    """All ways, with their clock cycles; none for thousands of tokens."""
    for plan in codebook_tiles.plans(d.cells, m, k, d.operand, chip) if m <= MOST_FEW else ():
        yield cycles(codebook_tiles.work(plan, m, n, k, chip), chip.read), plan
    every = candidates(d)
    most = max((tile.tokens for tile in every), default=0)
    if FEW < m < (DENSE_FROM if most == 256 else SOON) / d.cells.m:
        least = min(m, MOST_HELD, most)
        for tile in every:
            if tile.tokens >= least and fits_once(tile, d, m, n, k, chip):
                yield cycles(work(tile, d, m, n, k, chip), chip.read), tile


def work(tile: Tile, d: LookupDecoder, m: int, n: int, k: int, chip: Chip = H200) -> Work:
    """What a launch does: look-ups take the place of decoding."""
    looked_up = d.cells.m * (270 + 1080 / d.cells.v)  # cycles of a K tile, as was timed
    return tiles.work(tile, d, m, n, k, chip)._replace(kind="lookup", decode=looked_up)


def kernels_of(cells: Cells) -> list[Kernel]:
    """Every kernel that `choose` may name."""
    decoders = [LookupDecoder(dtype, cells=cells) for dtype in MANTISSA]
    return [Kernel(d, tile, d.operand) for d in decoders for tile in candidates(d)]
