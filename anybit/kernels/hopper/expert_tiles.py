"""Which tile the experts of a layer get: expected costs under random routing; no DSL needed.

How many tokens an expert gets is known on the device only. If each of M rows meets one of E experts
at random, an expert's number of rows is binomial: that gives the experts that are read at all, and
the tiles of tokens that they have together.
"""

import math
from collections.abc import Iterator
from functools import cache, lru_cache

from anybit.kernels.backend import COUNTS
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.hopper.tiles import (
    EXCHANGE,
    fitted,
    gpu_for,
    grid,
    has_mma,
    places,
    scaled,
    suited,
)
from anybit.kernels.mma import tiles as mma

READ = 1.035  # weights in a cycle, of what the memory can bring: at a clock below the highest
LAUNCH = 11_300  # cycles of a launch: of the first copies and the last outputs, too
# Cycles of a K tile: for each of its products and of the instructions that decode, and others.
PRODUCT, INSTRUCTION, STEP = 0.85, 4.7, 169
# Cycles of a tile beside its K tiles: any, and for each of its outputs.
TILE, OUTPUT = 200, 0.137
DRAIN = 650  # of a K tile whose sums get scales, while no other CTA multiplies: of two times
START = 2000  # cycles of a CTA of a cluster: an estimate
MOST_CLUSTERED = 4  # CTAs of clusters that are launched, for each multiprocessor
WHOLE = 0.6  # how far the last wave of tiles counts as a whole one
SHARPNESS = 9  # of the maximum of reading and multiplying
REREAD = 0.65  # of a weight's reading: of what a further tile of its expert reads from the L2
# Of `few_cycles`: cycles of a launch and of a tile; what reading reaches; how far the last wave
# counts. Of a warp's K tile: for each 16 rows and instruction that decodes 64 weights of a lane,
# for each 16 rows and bit of a number of tokens, and others.
FEW_LAUNCH, FEW_TILE, FEW_READ, FEW_WHOLE = 3550, 1400, 0.94, 0.8
FEW_INSTRUCTION, FEW_PRODUCT, FEW_STEP = 0.6, 0.133, 14.6
DEVIATIONS = 9  # of a binomial distribution beyond which nothing is counted


@cache
def family_grouped(decoder: Decoder) -> tuple[Tile, ...]:
    """The tiles that experts' kernels are compiled for."""
    every = [Tile(8, split=4), Tile(8, split=2), Tile(8, ctas=2, split=2)]
    every += [Tile(tokens, ctas=2) for tokens in (8, 16, 32, 64)]
    every += [Tile(128)]
    # Numbers of tokens vary between experts, and their mean is often a power of two: with tiles for
    # somewhat more, an expert is read and decoded once instead of a second time for few tokens.
    every += [] if slow(decoder) else [Tile(48, ctas=2), Tile(96), Tile(160)]
    if decoder.slot == 8 or decoder.cost < 2 or decoder.entries < 2:  # others would spill
        every += [Tile(128, rows=256)]
    every += [Tile(256)] if decoder.slot == 8 else []  # 16-bit operands would leave two stages
    return tuple(fitted(tile, decoder, grouped=True) for tile in suited(every, decoder))


@lru_cache(COUNTS)
def choose_grouped(
    decoder: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> Tile:
    """The tile for m rows of tokens, each for one of the experts (n, k).

    K is split where there are few tiles: a cluster multiplies one, so nothing hides its beginning.
    Where each of its CTAs can have a multiprocessor, none shares one: clusters crowd on some even
    if others are free, and took 1.2 to 1.4 times as long.
    """
    most = {1: chip.multiprocessors, 2: MOST_CLUSTERED * chip.multiprocessors}
    found = [
        tile
        for tile in family_grouped(decoder)
        if tile.split == 1 or grid(tile, m, n, experts, chip) <= most[tile.ctas]
    ]
    return min(found, key=lambda tile: cycles(tile, decoder, m, n, k, experts, chip))


def cycles(
    tile: Tile, decoder: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> float:
    """Clock cycles, at 1.755 GHz: of reading what is touched, of all tiles' decoding and products.

    Both run at the same time, so the slower counts. The constants fit 224 times of an H200 (models'
    experts in `benchmarks/experts.py`) with an error of 10 %; 144 later ones differ by 7 % (int4,
    fp6 and liquid of four models). That a tile reads weights which another one has read shows in
    two of the first, FP8 with 32 tokens an expert and 1.45 tiles.
    """
    first, every = touched(m, experts), token_tiles(tile.tokens, m, experts)
    count = -(-n // tile.rows) * every * tile.split
    room = chip.multiprocessors * places(tile, decoder, grouped=True)
    waves = max(1, WHOLE * math.ceil(count / room) + (1 - WHOLE) * count / room)
    # CTAs share a multiprocessor's rates. Clusters crowd on some even if others are free.
    shared = tile.ctas if tile.split > 1 else math.ceil(min(count, room) / chip.multiprocessors)
    steps = -(-k_tiles(k) // tile.split)
    products = tile.rows * tile.tokens * K_TILE * decoder.slot / 32768
    decoded = decoder.instructions * tile.rows / ROWS
    step = PRODUCT * products + INSTRUCTION * decoded + scaled(tile, decoder) + STEP
    beside = TILE + START * (tile.split > 1)
    every_step = max(shared * step, step + DRAIN * (decoder.sums > 0))
    ends = shared * (beside + OUTPUT * tile.tokens * tile.rows)
    multiplying = waves * (steps * every_step + ends)
    read = first + REREAD * (every - first)
    weights = read * -(-n // ROWS) * k_tiles(k) * decoder.blob_bytes
    reading = (weights + m * (k * decoder.slot // 8 + 2 * n)) / (READ * chip.read)
    both = math.fsum(part**SHARPNESS for part in (reading, multiplying)) ** (1 / SHARPNESS)
    return LAUNCH + both + EXCHANGE * (tile.split > 1)


@cache
def family_few(decoder: Decoder, chip: Chip = H200) -> tuple[mma.Tile, ...]:
    """The tiles of `kernels/mma/few.py`, which read the same blobs."""
    return tuple(mma.family_few(decoder, gpu_for(chip))) if has_mma(decoder) else ()


@lru_cache(COUNTS)
def choose_few(
    decoder: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> mma.Tile | None:
    """The tile of `kernels/mma/few.py` where it is faster than that of `choose_grouped`.

    That is with one token nearly everywhere (1.1 to 1.8 times as fast), and where int4 is read by
    64 rows until experts get more tokens than a tile has.
    """
    problem = m, n, k, experts, chip
    usual = cycles(choose_grouped(decoder, *problem), decoder, *problem)
    times = {tile: few_cycles(tile, decoder, *problem) for tile in family_few(decoder, chip)}
    best = min(times, key=times.__getitem__, default=None)
    return best if best and times[best] < usual else None


def few_cycles(
    tile: mma.Tile, decoder: Decoder, m: int, n: int, k: int, experts: int, chip: Chip = H200
) -> float:
    """Clock cycles with a tile of `kernels/mma/few.py`, as `cycles`.

    The constants fit 135 times of an H200 with an error of 8 %. Launches overlap, so CTAs crowd on
    a multiprocessor, up to as many as find room, even if others are free.
    """
    count = token_tiles(tile.tokens, m, experts) * -(-n // tile.rows)
    room = chip.multiprocessors * tile.ctas
    waves = max(1, FEW_WHOLE * math.ceil(count / room) + (1 - FEW_WHOLE) * count / room)
    steps = -(-k_tiles(k) // tile.warps)  # of a warp
    each = FEW_INSTRUCTION * decoder.instructions + FEW_PRODUCT * tile.tokens * decoder.slot
    step = tile.ctas * tile.warps * (tile.slices * each + FEW_STEP)
    weights = touched(m, experts) * -(-n // ROWS) * k_tiles(k) * decoder.blob_bytes
    parts = waves * (steps * step + FEW_TILE), weights / (FEW_READ * chip.read)
    return FEW_LAUNCH + math.fsum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)


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
