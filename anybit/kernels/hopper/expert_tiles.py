"""Which tile the experts of a layer get: expected work under random routing; no DSL needed.

How many tokens an expert gets is known on the device only. If each of M rows meets one of E experts
at random, an expert's number of rows is binomial: that gives the experts that are read at all, and
the tiles of tokens that they have together.
"""

import math
from collections.abc import Iterator
from functools import cache, lru_cache

from anybit.kernels.backend import COUNTS
from anybit.kernels.choice import Work, cycles
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import k_tiles, packed_bytes
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.hopper.tiles import (
    fitted,
    gpu_for,
    has_mma,
    of_step,
    places,
    staged,
    suited,
)
from anybit.kernels.mma import tiles as mma
from anybit.kernels.mma import work

WHOLE = 0.6  # how far the last wave of tiles counts as a whole one
DEVIATIONS = 9  # of a binomial distribution beyond which nothing is counted


@cache
def family_grouped(decoder: Decoder) -> tuple[Tile, ...]:
    """The tiles that experts' kernels are compiled for."""
    every = [Tile(8, ctas=2), Tile(16, ctas=2), Tile(32, ctas=2)]
    # Numbers of tokens vary between experts, and their mean is often a power of two: with tiles for
    # somewhat more, an expert is read and decoded once instead of a second time for few tokens.
    more = [Tile(48, ctas=2), Tile(96), Tile(160)]
    every += [Tile(64, ctas=2)] if slow(decoder) else more
    if slow(decoder) or decoder.crowded:  # whose tiles of 160 tokens would spill
        every += [Tile(128)]
    if decoder.slot == 8 or decoder.cost < 2 or decoder.entries < 2:  # others would spill
        every += [Tile(128, rows=256)]
    return tuple(fitted(tile, decoder, grouped=True) for tile in suited(every, decoder))


@lru_cache(COUNTS)
def choose_experts(
    d: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> Tile | mma.Tile:
    """The tile for m rows of tokens, each for one of the experts (n, k).

    Those of `kernels/mma` are faster with one token nearly everywhere (1.1 to 1.8 times).
    """
    problem = m, n, k, experts, chip
    times: dict[Tile | mma.Tile, float] = {
        tile: cycles(grouped_work(tile, d, *problem), chip.read) for tile in family_grouped(d)
    }
    for few in family_few(d, chip):
        times[few] = cycles(few_work(few, d, *problem), chip.read)
    return min(times, key=times.__getitem__)


def grouped_work(
    tile: Tile, d: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> Work:
    """What a launch of this family's does: what routing at random makes of it."""
    first, every = touched(m, experts), token_tiles(tile.tokens, m, experts)
    count = -(-n // tile.rows) * every
    room = chip.multiprocessors * places(tile, d, grouped=True)
    waves = waves_of(count / room)
    shared = math.ceil(min(count, room) / chip.multiprocessors)
    weight = packed_bytes(n, k, d)
    steps = waves * k_tiles(k)
    return Work(
        kind=f"experts {d.slot}",
        steps=steps,
        beside=shared,
        **of_step(tile, d),
        copied=steps * shared * staged(tile, d),
        read=first * weight + m * (k * d.slot / 8 + 2 * n),
        again=(every - first) * weight,
        uneven=1,
        ends=waves * shared * tile.tokens * tile.rows,
        turns=waves * shared,
    )


def waves_of(waves: float) -> float:
    """Turns of CTAs, of which the last is filled in part: numbers of tokens are expected ones."""
    return max(1, WHOLE * math.ceil(waves) + (1 - WHOLE) * waves)


@cache
def family_few(decoder: Decoder, chip: Chip = H200) -> tuple[mma.Tile, ...]:
    """The tiles of `kernels/mma/few.py`, which read the same blobs."""
    return tuple(mma.family_few(decoder, gpu_for(chip))) if has_mma(decoder) else ()


def few_work(
    tile: mma.Tile, d: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> Work:
    """What a launch of `kernels/mma/few.py` does, likewise.

    Launches overlap, so CTAs crowd on a multiprocessor, up to as many as find room, even if others
    are free.
    """
    count = token_tiles(tile.tokens, m, experts) * -(-n // tile.rows)
    waves = waves_of(count / (chip.multiprocessors * tile.ctas))
    read = touched(m, experts) * packed_bytes(n, k, d) + m * (k * d.slot / 8 + 2 * n)
    return work.of_split(f"few {d.slot}", tile, d, k, waves, tile.ctas, read)


def touched(m: int, experts: int) -> float:
    """Experts that get a row, expected."""
    return experts * (1 - (1 - 1 / experts) ** m)


@lru_cache(COUNTS)
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
