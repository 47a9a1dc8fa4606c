"""How a product is multiplied on Hopper: of all ways, the one of the least time (`choice.py`).

One launch of this family's main loop; two, where tiles leave the last wave nearly empty, so that
most multiprocessors would have nothing to do for as long as a tile takes: whole waves of tiles, and
the last rows by other tiles; a kernel of `kernels/mma` for few tokens, which reads the same blobs;
or, of a weight that decodes slowly, a decoded copy and its product. What `anybit tune` has found on
the user's GPU comes before the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import NamedTuple

from anybit.kernels.backend import COUNTS
from anybit.kernels.choice import Work, cycles
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS, k_tiles
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.mma import tiles as mma
from anybit.kernels.mma import work
from anybit.kernels.tuned import Winner, fastest

BYTES = Decoder("uint8", tuple(range(8)), middle=128)  # of a weight's copy in bytes
DECODED = 256 << 20  # bytes of a decoded copy, or of a part of it, at most
SECOND = Work("second", 0, 0, 0, 0, 0, 0, 1, 0)  # launch: what it costs beside its own
WORTH = 0.96  # of one launch's time: what two may take


class Part(NamedTuple):
    """A launch for some of a weight's rows: `rows` of them, from `first` on."""

    tile: Tile
    first: int
    rows: int


class Choice(NamedTuple):
    """How a problem is multiplied.

    Attributes:
        few: The tile of `kernels/mma` that does it; None: another does.
        copy: Whether the weight is decoded first.
        parts: This family's launches; none where `few` or, after a copy, the library multiplies.
    """

    few: mma.Tile | None = None
    copy: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        """What `anybit tune` calls it: by its tiles; rows follow from them and the problem."""
        some = [self.few.name] if self.few else [part.tile.name for part in self.parts]
        return " + ".join(["copy"] * self.copy + some)


def one(tile: Tile, n: int) -> Choice:
    """One launch of this family."""
    return Choice(parts=(Part(tile, 0, n),))


@lru_cache(COUNTS)
def choose(
    d: Decoder, m: int, n: int, k: int, chip: Chip = H200, found: Winner | None = None
) -> Choice:
    """The way for y (m, n) = x (m, k) w (n, k)^T. found: as `tuned.fastest` takes it."""
    best = fastest(lambda count: ways(d, count, n, k, chip), m, found)
    assert best is not None
    return best


def ways(d: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> Iterator[tuple[float, Choice]]:
    """All ways, with their clock cycles."""
    gpu = tiles.gpu_for(chip)
    for few in mma.candidates(d, gpu, m, n) if tiles.has_mma(d) else ():
        yield cycles(work.of_narrow(few, d, gpu, m, n, k), chip.read), Choice(few)
    single = launches(tiles.family(d), d, m, n, k, chip)
    yield from ((time, one(tile, n)) for time, tile in single)
    if m > tiles.MOST_HELD:
        if d.slot == 16 and not slow(d):
            most = WORTH * min(time for time, _ in single)
            yield from (way for way in two_launches(d, m, n, k, chip) if way[0] < most)
        if tiles.may_copy(d):
            copied = cycles(decoding(d, n, k, chip), chip.read)
            if d.slot == 16:
                yield copied + cycles(library(m, n, k, chip), chip.read), Choice(copy=True)
            else:
                for time, tile in launches(copied_tiles(), BYTES, m, n, k, chip):
                    yield copied + time, one(tile, n)._replace(copy=True)


def launches(
    family: Sequence[Tile], d: Decoder, m: int, n: int, k: int, chip: Chip
) -> list[tuple[float, Tile]]:
    """The tiles that suit a problem, with the clock cycles of one launch."""
    found = [t for t in family if tiles.suits(t, d, m, n, k, chip)]
    found = found or [t for t in family if t.split == 1 and not t.stream_k]
    return [(cycles(tiles.work(t, d, m, n, k, chip), chip.read), t) for t in found]


@cache
def copied_tiles() -> tuple[Tile, ...]:
    """Tiles for the product of a copy in bytes."""
    some = [Tile(128), Tile(128, rows=256)]
    every = (*some, *(replace(t, stream_k=True) for t in some))
    return tuple(tiles.fitted(t, BYTES) for t in every)


def two_launches(d: Decoder, m: int, n: int, k: int, chip: Chip) -> Iterator[tuple[float, Choice]]:
    """Whole waves of a tile's, and the last rows by the tile that is fastest for them."""
    behind: dict[int, tuple[float, Tile]] = {}
    for first in tiles.family(d):
        rows = whole_waves(first, m, n, chip)
        if not rows:
            continue
        if rows not in behind:
            rest = launches(tiles.family(d), d, m, n - rows, k, chip)
            behind[rows] = min(rest, key=itemgetter(0))
        time, last = behind[rows]
        time += cycles(tiles.work(first, d, m, rows, k, chip), chip.read)
        time += cycles(SECOND, chip.read)
        yield time, Choice(parts=(Part(first, 0, rows), Part(last, rows, n - rows)))


def whole_waves(tile: Tile, m: int, n: int, chip: Chip = H200) -> int:
    """Rows of most waves that a tile fills, and not all n; 0: none, or not a tile for that.

    A multiple of 256: a weight's rows are padded to that, so any tile finds whole ones behind them.
    With tiles of 96 tokens two launches were 1.06 to 1.10 times as long as one.
    """
    if tile.split > 1 or tile.stream_k or tile.tokens <= 96 or tile.tokens >= 4 * m:
        return 0
    tokens, room = -(-m // tile.tokens), chip.multiprocessors * tile.ctas
    waves = -(-n // tile.rows) * tokens // room
    rows = waves * room // tokens * tile.rows // ROW_MULTIPLE * ROW_MULTIPLE
    return rows if rows < n else 0


def decoding(d: Decoder, n: int, k: int, chip: Chip) -> Work:
    """What a launch that writes a decoded copy does."""
    steps = -(-n // ROWS) * k_tiles(k) / chip.multiprocessors
    written = n * k * (d.bits + d.slot) / 8
    return Work("decode", steps, 1, 0, 4 * d.instructions, 0, written, 1, 0)


def library(m: int, n: int, k: int, chip: Chip) -> Work:
    """What the library's product with a decoded copy does, in tiles that fill all waves."""
    steps = n * m / (ROWS * ROWS) * k_tiles(k) / chip.multiprocessors
    read = 2 * (n * k + m * k + m * n)
    return Work("library", steps, 1, ROWS * ROWS * K_TILE / 2048, 0, 0, read, 1, 0)


def decoded_rows(k: int) -> int:
    """Rows of a weight that are decoded at a time."""
    return max(1, DECODED // (2 * k * ROWS)) * ROWS
