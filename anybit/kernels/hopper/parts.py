"""A product of many tokens in two launches: whole waves of tiles, and the rows that are left.

Tiles that make some waves and a little more leave most multiprocessors idle at the end. The last
rows get a launch of their own then, in tiles that fill the processor: smaller ones, or clusters
that split K. CTAs with equal shares would fill it as well, but pay for sums that meet in memory.
"""

from typing import NamedTuple

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import ROW_MULTIPLE
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.hopper.tiles import BEGIN, choose, expected, family

WORTH = 0.98  # of the time of one launch, that two may take


class Part(NamedTuple):
    """Rows `first` to `first + rows` of a weight, in one launch."""

    tile: Tile
    first: int
    rows: int


def parts_of(decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> list[Part]:
    """The launches for y (m, n) = x (m, k) w (n, k)^T: one, or two by the model of `expected`."""
    one = choose(decoder, m, n, k, chip)
    best = [Part(one, 0, n)]
    if m <= 64 or decoder.slot == 8 or slow(decoder):
        return best
    least = WORTH * expected(one, decoder, m, n, k, chip)
    for tile in family(decoder):
        if tile.shared or tile.split > 1 or tile.tokens < 128:
            continue
        across = -(-m // tile.tokens)
        waves = -(-n // tile.rows) * across // chip.multiprocessors
        rows = waves * chip.multiprocessors // across * tile.rows // ROW_MULTIPLE * ROW_MULTIPLE
        if not 0 < rows < n:
            continue
        first = expected(tile, decoder, m, rows, k, chip)
        if first + BEGIN >= least:
            continue
        rest = choose(decoder, m, n - rows, k, chip)
        both = first + expected(rest, decoder, m, n - rows, k, chip)
        if both < least:
            best, least = [Part(tile, 0, rows), Part(rest, rows, n - rows)], both
    return best
