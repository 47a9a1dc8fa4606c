"""Which tile the experts of a layer get: expected costs under random routing; no DSL needed.

How many tokens an expert gets is known on the device only. If each of M rows meets one of E experts
at random, an expert's number of rows is binomial: that gives the experts that are read at all, and
the tiles of tokens that they have together, of which each reads its expert's weights again.
"""

import math
from collections.abc import Iterator
from functools import cache

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.hopper.tiles import (
    FIXED,
    MULTIPROCESSORS,
    Tile,
    fitted,
    places,
    staged,
    step_cycles,
    suited,
)

CLOCK = 1.755e3  # cycles in a microsecond
READ, SHARED = 2390, 3300  # bytes in a cycle: from memory, and from the L2
TOGETHER = 4  # how sharply the slowest of reading, sharing and multiplying decides
DEVIATIONS = 9  # of a binomial distribution beyond which nothing is counted


def family_grouped(decoder: Decoder) -> list[Tile]:
    """The tiles that experts' kernels are compiled for."""
    every = [Tile(tokens, ctas=2) for tokens in (8, 16, 32, 64)]
    every += [Tile(128), Tile(128, rows=256)]
    every += [Tile(256)] if decoder.slot == 8 else []  # 16-bit operands would leave two stages
    return [fitted(tile, decoder, grouped=True) for tile in suited(every, decoder)]


@cache
def choose_grouped(decoder: Decoder, m: int, n: int, k: int, experts: int) -> Tile:
    """The tile for m rows of tokens, each for one of the experts (n, k)."""
    return min(family_grouped(decoder), key=lambda tile: cycles(tile, decoder, m, n, k, experts))


def microseconds(tile: Tile, decoder: Decoder, m: int, n: int, k: int, experts: int) -> float:
    """What `cycles` expects of an H200."""
    return cycles(tile, decoder, m, n, k, experts) / CLOCK


def cycles(tile: Tile, decoder: Decoder, m: int, n: int, k: int, experts: int) -> float:
    """Clock cycles: of reading what is touched, of every tile's copies, of decoding and products.

    The three run at the same time, so the slowest counts most.
    """
    rows, steps = -(-n // tile.rows), k_tiles(k)
    count = rows * token_tiles(tile.tokens, m, experts)
    room = MULTIPROCESSORS * places(tile, decoder, grouped=True)
    waves, busy = math.ceil(count / room), min(count, room)
    weights = touched(m, experts) * -(-n // ROWS) * steps * decoder.blob_bytes
    reading = (weights + m * (k * decoder.slot // 8 + 2 * n)) / READ
    sharing = count * steps * staged(tile, decoder) / SHARED
    multiplying = waves * steps * step_cycles(tile, decoder) * math.ceil(busy / MULTIPROCESSORS)
    parts = (reading, sharing, multiplying)
    return FIXED + math.fsum(part**TOGETHER for part in parts) ** (1 / TOGETHER)


def touched(m: int, experts: int) -> float:
    """Experts that get a row, expected."""
    return experts * (1 - (1 - 1 / experts) ** m)


@cache
def token_tiles(tokens: int, m: int, experts: int) -> float:
    """Tiles of so many tokens of all experts, expected."""
    return experts * math.fsum(p * -(-count // tokens) for count, p in counts(m, experts))


def counts(m: int, experts: int) -> Iterator[tuple[int, float]]:
    """Numbers of rows that an expert may get, and how likely each is."""
    p = 1 / experts
    if experts == 1:
        yield m, 1.0
        return
    reach = DEVIATIONS * (math.sqrt(m * p) + 1)
    for count in range(max(0, int(m * p - reach)), min(m, int(m * p + reach)) + 1):
        ways = math.lgamma(m + 1) - math.lgamma(count + 1) - math.lgamma(m - count + 1)
        yield count, math.exp(ways + count * math.log(p) + (m - count) * math.log1p(-p))
