"""Trellis codes as operands of tensor cores: windows of a string of bits, hashed in registers.

The 8 weights of a 16x16 tile that follow each other in its sequence are those that one lane holds
as fp16 or bf16 operands (`core/tiles.py`). So a lane stores its own 8 weights' bits as they follow
each other, byte by byte, and what it lacks for its first windows are the last two bytes of the lane
before it, around the warp's end: a shuffle or two for 32 weights. Nothing is stored twice.

DP4A adds the bytes of hashes up. Operands of int8 are held in another order, four columns to a
lane: there a product on the tensor core does it, which leaves its sums with the lanes that want
them. In 16 bits it is slower, since products that wait for each other take all of its time.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core import tiles
from anybit.kernels.cute.decode import BIAS, LIFT, MANTISSA, Constants, Decoder, HalfDecoder
from anybit.kernels.cute.lang import (
    LANES,
    Word,
    add_halves,
    byte_sums,
    bytes_of,
    dot4,
    fma2,
    from_lane,
    half_bits,
    lane,
    mask_flip,
    to_brain,
)

RUN = 8  # weights of a tile that follow each other in a lane
TILES = 4  # of a thread's half K tile
STATE_BYTES = 2
# Instructions for 32 weights that take as long as a plane of other codes, by bits of an operand: in
# int8 some wait for the tensor core.
PLANE = {16: 50, 8: 33}
HALVES = ("mcg", "3inst")
# What states are multiplied by; signed weights of the product's bytes, and what is added, for a
# step's first and second weight. Of "sum8" a one is missing, which `MIDDLE` makes good: zeros cost
# a product no registers.
SUMS: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "sum8": (0x83DCD12D, (0x40404040, 0x40404040), (0, 0)),
    "pair8": (0xCBAC1FED, (0xC000405A, 0x405A4000), (128 * 257 - 11475, 128 * 257 - 27795)),
    "mul1": (0x83DCD12D, (0x01010101, 0x01010101), (0x6400, 0x6400)),  # fp16's exponent of 1024
}
MIDDLE = {"sum8": 127, "pair8": 128, "look": 128}  # what bytes of whole values are too large by
PAIRS = {"pair8": 2}  # weights of a step


class Window(NamedTuple):
    """Where a lane's window lies: 16 bits of a line that is shifted left, from a byte on.

    A line is four bytes of the string of a tile: the two before the lane's own, and its own.
    """

    line: int
    left: int
    byte: int


@cache
def windows(rate: int, bits: int) -> tuple[Window, ...]:
    """The windows of 8 weights of `rate` bits, by steps of `bits`, in few lines and shifts."""
    found: list[Window] = []
    last = max(0, rate + STATE_BYTES - 4)  # the last line
    for end in range(bits, RUN * rate + 1, bits):
        first, left = divmod(end, 8)
        size = STATE_BYTES + (left > 0)
        lines = [w.line for w in found if w.left == left] + [w.line for w in found]
        fit = [at for at in lines if at <= first and first + size <= at + 4]
        found.append(Window(at := fit[0] if fit else min(first, last), left, first - at))
    return tuple(found)


@dataclass(frozen=True)
class TrellisDecoder(HalfDecoder):
    """A code's values as fp16, bf16 or, if they are whole, as bytes that are `MIDDLE` too large.

    Attributes:
        code: As in `trellis.Trellis`.
    """

    code: str = "sum8"

    @property
    def held(self) -> int:
        return 16

    @property
    def finishing(self) -> int:  # type: ignore[override]
        return 1 if self.slot == 16 else 0

    @property
    def verbatim(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return self.instructions / PLANE[self.slot]

    @property
    def width(self) -> int:
        """Weights of a step."""
        return PAIRS.get(self.code, 1)

    @property
    def step(self) -> int:
        """Bits of a step."""
        return self.bits * self.width

    @cached_property
    def instructions(self) -> int:
        """About as many, if a line's bytes are in two words at most."""
        tile = self.finding + 2 * RUN // self.width
        tile += 2 * RUN if self.code in HALVES else RUN if self.slot == 16 else 2  # sums
        if self.slot == 8:
            tile += 6  # packed
        else:
            tile += RUN // 2 * (1 + (self.code not in HALVES))  # packed, and finished
        if self.operand == "bfloat16" and self.code not in MIDDLE:
            tile += RUN // 2 * 3
        return TILES * tile + min(self.bits, TILES)

    @property
    def finding(self) -> int:
        """Instructions that bring a tile's windows to whole bytes of a word."""
        plan = windows(self.bits, self.step)
        lines, shifts = {w.line for w in plan}, {w[:2] for w in plan if w.left}
        return len(lines) * (2 if self.bits in (1, 3) else 1) + len(shifts)

    # What is stored.

    def stored(self, codes: Tensor) -> Tensor:
        steps = tiles.cut(codes, tiles.SIDE // self.width)
        shifts = torch.arange(self.width - 1, -1, -1, device=codes.device) * self.bits
        each = (steps[..., None] >> shifts) & (1 << self.bits) - 1
        return tiles.from_sequences(each.flatten(1), len(codes))

    def order(self) -> Tensor:
        # `fragment` has registers (tile, half h, row v) of elements e; a run goes by (v, h, e).
        tile, h, v, e = torch.meshgrid(*map(torch.arange, (TILES, 2, 2, 2)), indexing="ij")
        weight = tile * RUN + v * 4 + h * 2 + e
        bit = weight.flatten()[:, None] * self.bits + torch.arange(self.bits - 1, -1, -1)
        place = bit // LANES * LANES + LANES - 1 - bit % LANES  # first bits are a word's highest
        return torch.argsort(place.flatten())

    # What a thread computes.

    def registers(
        self, words: list[Word], constants: list[tuple[Constants, Constants]]
    ) -> list[Word]:
        out: list[Word] = []
        previous = self.previous(words)
        for tile in range(TILES):
            values = self.values(self.states(words, previous, tile))
            if self.slot == 8:  # four columns of row g, and of row g + 8
                out += [four_bytes(values[i : i + 4]) for i in (0, 4)]
                continue
            # Of the string: rows g and g + 8, columns c, c + 1 and c + 8, c + 9.
            pairs = [self.pair(*values[i : i + 2]) for i in range(0, RUN, 2)]
            out += [pairs[i] for i in (0, 2, 1, 3)]
        return out

    def previous(self, words: list[Word]) -> list[dict[int, Word]]:
        """Words, by number, of the lanes that hold the first and the second byte before each."""
        if self.bits == 1:
            return [self.from_before(words, [0], lanes) for lanes in (2, 1)]
        ends = (tile * self.bits - i for tile in range(1, TILES + 1) for i in (2, 1))
        found = self.from_before(words, sorted({at // 4 for at in ends}), 1)
        return [found, found]

    def from_before(self, words: list[Word], wanted: list[int], lanes: int) -> dict[int, Word]:
        """Some of the words as the lane so many before this one in the sequence has them."""
        source = self.before(lane(words[0]), lanes)
        return {i: from_lane(words[i], source) for i in wanted}

    def before(self, mine: Word, lanes: int) -> Word:
        return (mine + (LANES - lanes)) & LANES - 1

    def states(self, words: list[Word], previous: list[dict[int, Word]], tile: int) -> list[Word]:
        """The states of the lane's steps in a tile: 16 bits, zeros above."""
        found = self.lines(words, previous, tile)
        return [bytes_of(line, 0x4400 | low + 1 << 4 | low) for line, low in found]

    def string(
        self, words: list[Word], previous: list[dict[int, Word]], tile: int
    ) -> list[tuple[Word, int]]:
        """Where the string's bytes lie, two before the lane's own first: the word, the number."""
        found: list[tuple[Word, int]] = []
        for i in range(-STATE_BYTES, self.bits):
            at = tile * self.bits + (i if i >= 0 else max(self.bits + i, 0))
            source = words[at // 4] if i >= 0 else previous[i + STATE_BYTES][at // 4]
            found.append((source, 3 - at % 4))
        return found

    def lines(
        self, words: list[Word], previous: list[dict[int, Word]], tile: int
    ) -> list[tuple[Word, int]]:
        """The same states as two bytes of a word: the word, and the lower one's number."""
        rate = self.bits
        places = self.string(words, previous, tile)
        whole: dict[int, Word] = {}
        shifted: dict[tuple[int, int], Word] = {}
        out = []
        for at, left, byte in windows(rate, self.step):
            if at not in whole:
                whole[at] = line(places[at : at + 4])
            if (at, left) not in shifted:
                shifted[at, left] = whole[at] << left if left else whole[at]
            out.append((shifted[at, left], STATE_BYTES - byte))
        return out

    def values(self, states: list[Word]) -> list[Word]:
        """What `pair` and `four_bytes` take: of two rows four columns, as operands want them.

        Whole numbers are in byte 1, plus `MIDDLE`, and byte 2 is zero; others are fp16 in the low
        half.
        """
        if self.code in HALVES:
            times, plus = (0xCBAC1FED, 0) if self.code == "mcg" else (89226354, 64248484)
            hashes = [s * times + plus if plus else s * times for s in states]
            return [add_halves(mask_flip(x, 0x8FFF8FFF, 0x3B603B60)) for x in hashes]
        times, weights, added = SUMS[self.code]
        hashes, width = [s * times for s in states], PAIRS.get(self.code, 1)
        if self.slot == 16:
            ways = list(zip(weights, added, strict=True))[:width]
            return [dot4(x, w, p) for x in hashes for w, p in ways]
        if width == 2:
            a, b, c, d = hashes  # columns c and c + 8 of row g, and of row g + 8
            found = [byte_sums([a, c, b, d], of_steps(a, weights, i), added) for i in (0, 1)]
            return [found[i][2 * v + e] for v in (0, 1) for i in (0, 1) for e in (0, 1)]
        first, second = ([hashes[e + i] for i in (0, 4, 2, 6)] for e in (0, 1))
        wanted = of_words(first[0], weights[0])
        both = zip(*(byte_sums(x, wanted, added) for x in (first, second)), strict=True)
        return [word for two in both for word in two]

    def pair(self, low: Word, high: Word) -> Word:
        """A register of two weights of a row."""
        if self.code in MIDDLE:
            return self.finish(bytes_of(low, 0x6521, high), ())
        both = bytes_of(low, 0x5410, high)
        if self.code == "mul1":
            slope, offset = (half_bits(v, "float16") for v in (0.00676727294921875, -10.3828125))
            both = fma2(both, both.constant(slope), both.constant(offset), "float16")
        return both if self.operand == "float16" else to_brain(both)


# Sums 2 t and 2 t + 1 of `byte_sums` are lane t's of a quad, which wants columns 4 t to 4 t + 3. Of
# lanes 2 t and 2 t + 1 those are c and c + 1, or of lanes 2 t - 4 and 2 t - 3 c + 8 and c + 9.


def of_words(like: Word, weights: int) -> list[Word]:
    """What makes `byte_sums` add up a word of each of two lanes."""
    number = lane(like)
    column, t = number >> 2, number & 3
    return [where(column ^ n, weights) for n in (t, t + 4)]


def of_steps(like: Word, weights: tuple[int, int], second: int) -> list[Word]:
    """What makes `byte_sums` add up a word of one lane, or of the `second`, in two ways."""
    number = lane(like)
    column, t = number >> 2, number & 3
    each = (column & 1) * (weights[1] - weights[0]) + weights[0]
    first = (column >> 1 << 1) + second
    return [where(n ^ t, each) for n in (first, first + 0xFFFFFFFC)]


def where(zero: Word, weights: int | Word) -> Word:
    """The weights where a number's low bits are zero, else zero."""
    return (((zero & 31) + 0xFFFFFFFF) >> 31) * weights


def line(places: list[tuple[Word, int]]) -> Word:
    """Bytes (word, byte), the highest first; what is left below three is anything."""
    sources = list(dict.fromkeys(word for word, _ in places))
    out = sources[0]
    if len(sources) == 1 and [byte for _, byte in places] == list(range(3, 3 - len(places), -1)):
        return out
    inside: set[Word] = {out}
    taken = {3 - i: byte for i, (word, byte) in enumerate(places) if word is out}
    for other in sources[1:] or [out]:
        selector = 0
        for place, (word, byte) in zip((3, 2, 1, 0), places, strict=False):
            digit = 4 + byte if word is other else taken.get(place, 0)
            selector |= digit << 4 * place
        out = bytes_of(out, selector, other)
        inside.add(other)
        taken = {3 - i: 3 - i for i, (word, _) in enumerate(places) if word in inside}
    return out


def four_bytes(values: list[Word]) -> Word:
    """Byte 1 of each."""
    a, b, c, d = values
    return bytes_of(bytes_of(a, 0x51, b), 0x5410, bytes_of(c, 0x51, d))


def decoder_of(kind: type[TrellisDecoder], code: str, rate: int, operand: str) -> Decoder | str:
    """The decoder of a code with so many bits a weight, or the reason why there is none."""
    places = tuple(range(rate))
    if operand == "int8":
        if code not in MIDDLE:
            return f"the values of code={code} are no whole numbers; it takes 16-bit activations"
        return kind("uint8", places, middle=MIDDLE[code], code=code)
    if operand not in MANTISSA:
        return "trellis codes have no decoder to fp8"
    if code not in MIDDLE:
        return kind(operand, places, code=code)
    shift = BIAS[operand] - 1 + MANTISSA[operand]
    lift = min(shift, LIFT[operand])
    return kind(operand, places, shift=shift, lift=lift, center=MIDDLE[code], code=code)
