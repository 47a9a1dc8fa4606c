"""Decoders that look values up: four bytes of a table of eight are one PRMT.

e2m1 @ fp8           e2m1 has eight magnitudes, so with the exponent of its group added to each
                     it is a table of e4m3 numbers in two registers. The groups of a row share
                     one power of two, by which the outputs are multiplied, as long as they lie
                     close enough to each other; then no product is rounded.
tables @ int8        sixteen whole numbers are two tables of eight bytes
tables @ fp16/bf16   sixteen numbers of 16 bits are four tables of eight bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anybit.core.groups import grouped
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.cute.decode import MANTISSA, Constants, Decoder
from anybit.kernels.cute.lang import Word, bytes_of, mul2
from anybit.kernels.cute.levels import Levels

GROUP = 32  # columns of a WGMMA of bytes
LEAST, MOST = -5, 6  # exponents that a group may add: 0.5 stays a normal e4m3, 6 below 448
LOW, HIGH = 0x14100800, 0x24201C18  # 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in e4m3, times 2**LEAST
SMALLEST = -126  # exponent of an fp32 number that no processor takes for zero


@dataclass(frozen=True)
class Digits(Decoder):
    """Codes of four bits, as bytes.

    A word holds the codes of two registers. Its digits are three bits of them, which PRMT takes as
    they are; the fourth bits of the digits are those of the codes, of the first register in every
    second digit.
    """

    def order(self) -> Tensor:
        out = torch.empty(4, 32, dtype=torch.int64)
        for word in range(4):
            for second in range(2):
                for element in range(4):
                    code = ((2 * word + second) * 4 + element) * 4
                    digit = 16 * second + 4 * element
                    out[word, digit : digit + 3] = torch.arange(code, code + 3)
                    out[word, 8 * element + (3 if second else 7)] = code + 3
        return out.flatten()


@dataclass(frozen=True)
class Numbers(Digits):
    """Sixteen whole numbers of a table, as int8; sums are multiplied by scales.

    Attributes:
        numbers: the table.
    """

    numbers: tuple[int, ...] = ()

    @cached_property
    def instructions(self) -> int:
        """Thirteen for each of four words."""
        return 4 * 13

    def registers(
        self, words: list[Word], constants: list[tuple[Constants, Constants]]
    ) -> list[Word]:
        four = torch.tensor(self.numbers, dtype=torch.int8).view(torch.int32).tolist()
        table, out = [words[0].constant(word) for word in four], []
        for word in words:
            digits = word & 0x77777777
            for second, halves in enumerate((word, word << 4)):
                upper = bytes_of(halves, 0xBA98)
                out.append(look_up(table, digits >> 16 if second else digits, upper))
        return out


@dataclass(frozen=True)
class Folded(Digits):
    """e2m1 with powers of two for groups of 32 or more, as e4m3."""

    grid_words = 1
    octaves = MOST - LEAST

    @cached_property
    def instructions(self) -> int:
        """Seven for each of four words, three for each of two rows and groups."""
        return 4 * 7 + 4 * 3

    def grid(self, packed: Packed) -> Tensor:
        """What is added to the tables of both groups of 64 columns: a byte each."""
        exponents, live = exponents_of(packed)
        more = exponents - self._first(exponents, live)
        if bool((live & ((more < LEAST) | (more > MOST))).any()):
            raise InvalidInput(
                f"{packed.format.spec!r}: scales of a row are more than {self.octaves} powers of "
                "two apart, and do not fit into fp8 weights; leave activations in 16 bits, or "
                "choose another backend"
            )
        steps = 8 * (more.clamp(LEAST, MOST) - LEAST)
        steps = steps.repeat_interleave(packed.shape[1] // GROUP // steps.shape[1], 1)
        steps = torch.nn.functional.pad(steps, (0, steps.shape[1] % 2))
        return (steps[:, ::2] | steps[:, 1::2] << 8)[..., None]

    def row_scale(self, packed: Packed) -> Tensor:
        first = self._first(*exponents_of(packed))
        return torch.ldexp(torch.ones_like(first, dtype=torch.float32), first).flatten()

    def _first(self, exponents: Tensor, live: Tensor) -> Tensor:
        """(N, 1) int32: the exponent of the row's unit."""
        top = torch.where(live, exponents, SMALLEST).amax(1, keepdim=True)
        return (top - MOST).clamp_min(SMALLEST)

    def constants(self, words: list[Word]) -> tuple[Constants, Constants]:
        """The tables of two groups, for row g and for row g + 8."""
        rows: list[Constants] = []
        for row in range(2):
            bytes_ = [bytes_of(words[0], 0x4440 + 2 * row + group) for group in range(2)]
            rows.append(tuple(b * n + c for b in bytes_ for n, c in TABLE))
        return rows[0], rows[1]

    def registers(
        self, words: list[Word], constants: list[tuple[Constants, Constants]]
    ) -> list[Word]:
        out = []
        for i, word in enumerate(words):
            group, digits = i // 2, word & 0x77777777
            for second, signs in enumerate((word, word << 4)):
                low, high = constants[0][second][2 * group : 2 * group + 2]
                found = bytes_of(low, digits >> 16 if second else digits, high)
                out.append(found | (signs & 0x80808080))
        return out


@dataclass(frozen=True)
class Looked(Levels):
    """Sixteen numbers, times a factor for each group.

    A word holds the codes of four registers: as in `Folded`, for each pair of them three bits that
    PRMT takes, and the fourth, which says which half of the table it is.

    Attributes:
        numbers: the table.
    """

    numbers: tuple[float, ...] = ()

    crowded = True  # by the table

    @cached_property
    def instructions(self) -> int:
        """25 for each of four words, and the factors."""
        return 4 * 25 + self.entries * self.preparing // 2

    def order(self) -> Tensor:
        out = torch.empty(4, 32, dtype=torch.int64)
        for word in range(4):
            for second in range(2):
                for element in range(4):
                    register = 4 * word + element // 2 * 2 + second
                    code = (2 * register + element % 2) * 4
                    digit = 16 * second + 4 * element
                    out[word, digit : digit + 3] = torch.arange(code, code + 3)
                    out[word, 8 * element + (3 if second else 7)] = code + 3
        return out.flatten()

    def registers(
        self, words: list[Word], constants: list[tuple[Constants, Constants]]
    ) -> list[Word]:
        numbers = torch.tensor(self.numbers, dtype=torch.float32)
        table = numbers.to(getattr(torch, self.operand)).view(torch.uint8)
        of_byte = [
            [words[0].constant(int(w)) for w in table[at::2].contiguous().view(torch.int32)]
            for at in range(2)
        ]
        out = []
        for i, word in enumerate(words):
            digits = word & 0x77777777
            pairs = []
            for second, halves in enumerate((word, word << 4)):
                digit = digits >> 16 if second else digits
                upper = bytes_of(halves, 0xBA98)
                low, high = (look_up(four, digit, upper) for four in of_byte)
                both = [bytes_of(low, selector, high) for selector in (0x5140, 0x7362)]
                if constants:
                    factor = constants[i * len(constants) // len(words)][second][0]
                    both = [mul2(numbers, factor, self.operand) for numbers in both]
                pairs.append(both)
            out += [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
        return out


def look_up(table: Sequence[Word], digits: Word, upper: Word) -> Word:
    """Bytes of a table of sixteen in four words; `upper` has 255 where they are of the last two."""
    first, last = (bytes_of(table[i], digits, table[i + 1]) for i in (0, 2))
    return (first & (upper ^ 0xFFFFFFFF)) | (last & upper)


TABLE = ((0x01010100, LOW), (0x01010101, HIGH))


def exponents_of(packed: Packed) -> tuple[Tensor, Tensor]:
    """Exponents of the groups' scales (N, groups) int32, and which groups have a weight at all."""
    scale = packed.grid["scale"]
    exponents = scale.view(torch.uint8).to(torch.int32) - 127
    return exponents, grouped(packed.codes() & 7 != 0, scale).any(-1)


def folded(group: int) -> Decoder | str:
    """The decoder of e2m1 in groups with e8m0 scales for fp8 activations, or why there is none."""
    if group % GROUP:
        return f"groups of {group} columns; fp8 weights take multiples of {GROUP}"
    return Folded("float8_e4m3fn", (2, 3, 4, 7), group=2 * GROUP)


def looked(numbers: Sequence[float], group: int, operand: str) -> Decoder | str:
    """The decoder of a table of sixteen numbers with a factor for each group, or why not.

    int8 takes whole numbers from -128 to 127.

    Args:
        numbers: The table.
        group: Columns that share a factor; 0 means the whole row.
        operand: As in `decode.decoder`.
    """
    places = tuple(range(4))
    if operand == "int8":
        if any(number != round(number) or not -128 <= number <= 127 for number in numbers):
            return "its table has numbers that are no whole ones from -128 to 127 (int8 products)"
        whole = tuple(round(number) for number in numbers)
        return Numbers("int8", places, group=group, sums=2, numbers=whole)
    if operand not in MANTISSA:
        return f"numbers of a table are multiplied by 16-bit activations, not by {operand}"
    return Looked(operand, places, group=group, numbers=tuple(numbers))
