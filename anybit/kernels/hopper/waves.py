"""Whole waves of tiles by one launch, and a product's last rows by another, of other tiles.

Where tiles leave the last wave nearly empty, most multiprocessors would have nothing to do for as
long as a tile takes. The last rows alone may be cut into smaller tiles, or split along K.
"""

from typing import NamedTuple

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import ROW_MULTIPLE
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.hopper.tiles import BEGIN, PRODUCTS, choose, expected, family

SECOND = 3200  # cycles that a second launch costs beside its own, which begins while the first ends
WORTH = 0.956  # of one launch's time: what two may take


class Part(NamedTuple):
    """A launch for some of a weight's rows: `rows` of them, from `first` on."""

    tile: Tile
    first: int
    rows: int


def parts(decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> tuple[Part, ...]:
    """The launches of a product, which cover all rows: one, or two where `expected` says so.

    Two took 0.95 of one's time in the mean of 98 such products (25 of weights and tokens in four
    formats), 1.03 at worst (notes/hopper_main_loop.md).
    """
    tile = choose(decoder, m, n, k, chip)
    best: tuple[Part, ...] = (Part(tile, 0, n),)
    if m <= 64 or decoder.slot < 16 or slow(decoder):
        return best
    least, behind = WORTH * expected(tile, decoder, m, n, k, chip), {}
    for first in family(decoder):
        if SECOND + BEGIN + shortest(m, n, k, chip) >= least:  # whatever the tiles are
            break
        rows = whole_waves(first, m, n, chip)
        if not rows:
            continue
        cycles = expected(first, decoder, m, rows, k, chip) + SECOND
        if cycles + shortest(m, n - rows, k, chip) >= least:
            continue
        if rows not in behind:
            behind[rows] = choose(decoder, m, n - rows, k, chip)
        rest = behind[rows]
        cycles += expected(rest, decoder, m, n - rows, k, chip)
        if cycles < least:
            least, best = cycles, (Part(first, 0, rows), Part(rest, rows, n - rows))
    return best


def shortest(m: int, n: int, k: int, chip: Chip) -> float:
    """Cycles that `expected` says of no tile, since all multiprocessors must multiply."""
    return min(PRODUCTS.values()) * m * n * k / (2048 * chip.multiprocessors) + BEGIN


def whole_waves(tile: Tile, m: int, n: int, chip: Chip = H200) -> int:
    """Rows of most waves that a tile fills, and not all n; 0: none, or not a tile for that.

    A multiple of 256: a weight's rows are padded to that, so any tile finds whole ones behind them.
    With tiles of 96 tokens two launches were 1.06 to 1.10 times as long as one.
    """
    if tile.split > 1 or tile.shared or tile.tokens <= 96 or tile.tokens >= 4 * m:
        return 0
    tokens, room = -(-m // tile.tokens), chip.multiprocessors * tile.ctas
    waves = -(-n // tile.rows) * tokens // room
    rows = waves * room // tokens * tile.rows // ROW_MULTIPLE * ROW_MULTIPLE
    return rows if rows < n else 0
