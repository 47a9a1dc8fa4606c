"""Decoders: how codes become the A operand of a WGMMA, in registers.

A decoder gathers the bits of a code into an operand element ("slot" of 8 or 16 bits) and finishes
with at most one multiply-add for all elements of a register:

    floats @ fp16            nothing: the bits under fp16's exponent are the value times
                             2**(bias - 15)
    floats @ bf16            one product, since such small bf16 products would underflow fp32
    integers @ fp16/bf16     one fma: a code in the mantissa of a subnormal is the code times
                             2**-shift
    integers @ int8          nothing: codes are an unsigned operand, and the epilogue subtracts the
                             zero point times the sum of the activations
    integers with scales of  nothing: codes minus the middle are the upper bits of a signed byte
    groups @ int8
    floats @ fp8             nothing: the bits under e4m3's exponent
    integers @ fp8           one sum: whole numbers are subnormals of e4m3, whose exponent goes on
                             without a gap

Scales of groups are multiplied in registers, in units of a power of two of the row so that nothing
overflows; for 8-bit operands, which have no room for them, they multiply the sums of a group's
products. Scales of rows, and what the bit moves left out, are applied to the output in fp32.

This module is what a format's `hopper_decode` is written with: it returns one of these decoders, a
subclass of its own, or the reason why there is none for this operand.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.cute.lang import (
    LANES,
    Plane,
    Word,
    add2,
    bytes_of,
    fma2,
    half_bits,
    mul2,
    planes,
    rotate,
)

K_TILE = 128  # columns of one packed blob
MANTISSA = {"float16": 10, "bfloat16": 7}
BIAS = {"float16": 15, "bfloat16": 127}
LIFT = {"float16": 15, "bfloat16": 120}  # log2 of the most that `HalfDecoder` multiplies by
Constants = tuple[Word, ...]


@dataclass(frozen=True)
class Decoder:
    """Codes to operand registers, with nothing to finish.

    Attributes:
        operand: Dtype of the A operand: uint8, int8, float16, bfloat16 or float8_e4m3fn.
        places: Bit i of a code belongs at places[i] of an operand element.
        shift: operand = value * 2**-shift; joins the row's scale.
        group: Columns that share grid words, a divisor or a multiple of 128; 0 when there are none.
            32 at least for 8-bit operands, the columns of one WGMMA.
        middle: What the epilogue subtracts from unsigned codes, times the sum of the activations.
        sums: Scales of groups multiply sums of products, in fp32: the grid words of one, 2 for any
            scale, 1 where bf16 holds them; 0 where no sums are multiplied.
    """

    operand: str
    places: tuple[int, ...]
    shift: int = 0
    group: int = 0
    middle: int = 0
    sums: int = 0

    finishing = 0  # instructions of `finish`
    preparing = 0  # instructions of `constants`
    octaves = 1 << 10  # powers of two that the scales of a row may lie apart
    table_bytes = 0  # of a table in shared memory
    arranges = False  # whether tokens of `mma.sync` may take another order instead of weights

    @property
    def bits(self) -> int:
        return len(self.places)

    @property
    def grid_words(self) -> int:
        """32-bit words for each group of two rows, g and g + 8 of a fragment."""
        return self.sums

    @property
    def slot(self) -> int:
        """Bits of an operand element."""
        return 16 if self.operand in MANTISSA else 8

    @property
    def held(self) -> int:
        """Bits of the element in whose fragments (`pack.fragment`) threads hold stored codes."""
        return self.slot

    @property
    def cost(self) -> float:
        """Time of decoding, in that of a code of one plane."""
        return len(planes(self.places, self.slot))

    @property
    def verbatim(self) -> bool:
        """Whether code words are operand registers; they are stored inverted then.

        A decoder must compute something: ptxas replaces a mere copy by its source, and would load
        the next stage's words into registers that a WGMMA still reads.
        """
        return self.places == tuple(range(self.slot)) and not self.finishing

    @property
    def entries(self) -> int:
        """Groups in a K tile."""
        if not self.grid_words:
            return 0
        return K_TILE // self.group if 0 < self.group < K_TILE else 1

    @property
    def blob_bytes(self) -> int:
        """Bytes of 128 rows x 128 columns: codes, then grid words."""
        return K_TILE * K_TILE * self.bits // 8 + 64 * 4 * self.entries * self.grid_words

    @property
    def crowded(self) -> bool:
        """Whether it takes many registers: for scales of 16 columns, or a second set of sums."""
        return self.sums > 0 or (self.slot == 16 and self.entries * self.preparing >= 32)

    @cached_property
    def instructions(self) -> int:
        """Of `registers` and `constants`: to decode a thread's 32 weights of half a K tile.

        One shift and one LOP3 for each plane of a register, what finishes it, and the constants of
        the groups, which each half makes for itself.
        """
        total = (
            self.slot * self.finishing
            + max(self.entries, 2 * bool(self.entries)) * (self.preparing) // 2
        )
        for plane in planes(self.places, self.slot):
            for register in range(self.slot):
                shift = plane.places[0] - plane.shifts[register % (self.slot // len(plane.bits))]
                total += (len(plane.bits) < self.slot) + (shift != 0 and not whole_byte(plane))
        return total

    def main_loop(self) -> Any:
        """Hopper's program for such operands, where it is not `hopper.gemm.Gemm`; needs the DSL."""
        return None

    def table(self) -> Tensor | None:
        """(256,) int32: what `lang.Table` has, which `registers` gets then."""
        return None

    # What is stored.

    def stored(self, codes: Tensor) -> Tensor:
        """Codes (rows, codes of a row) -> the bits to store for each weight, (rows, K) uint8."""
        return codes

    def order(self) -> Tensor:
        """(32 * bits,): which bit of which of 32 weights (weight * bits + bit) is stored where.

        The weights are those of half a tile and one thread, by register, as in `pack.fragment`;
        the places bits of its words.
        """
        each = 32 // self.slot
        order = torch.empty(self.bits * LANES, dtype=torch.int64)
        first = 0
        for plane in planes(self.places, self.slot):
            width = len(plane.bits)
            per_word = self.slot // width  # registers
            for register in range(self.slot):  # 8 or 16 of them in half a tile
                word = first + register // per_word
                left = plane.places[0] - plane.shifts[register % per_word]
                for element in range(each):
                    for bit, place in zip(plane.bits, plane.places, strict=True):
                        lane = (element * self.slot + place - left) % LANES
                        order[word * LANES + lane] = (register * each + element) * self.bits + bit
            first += width
        return order

    def grid(self, packed: Packed) -> Tensor | None:
        """Grid words (N, groups, grid_words) of 16 bits for each row, as int32."""
        if not self.sums:
            return None
        frame = packed.format.frame(packed.grid)
        scale = packed.grid["scale"].float() if frame is None else frame.factor
        bits = scale.contiguous().view(torch.int32)
        return torch.stack((bits & 0xFFFF, bits >> 16 & 0xFFFF)[-self.sums :], -1)

    def row_scale(self, packed: Packed) -> Tensor:
        """(N,) fp32: what an output is multiplied by."""
        if self.sums:
            fmt, grid = packed.format, packed.grid
            factor = fmt.row_factor(grid) if fmt.frame(grid) is None else fmt.scales(grid)
            rows = torch.ones(packed.shape[0], dtype=torch.float32, device=packed.planes[0].device)
            return (rows if factor is None else factor.flatten()) * 2.0**self.shift
        return packed.format.scales(packed.grid).flatten() * 2.0**self.shift

    def row_zero(self, packed: Packed) -> Tensor:
        """(N,) int32: subtracted from a sum of products, times the sum of the activations.

        Raises:
            InvalidInput: Zero points are not whole numbers, as int8 products need.
        """
        name = packed.format.zero_point
        if name is None or self.operand != "uint8":
            return torch.full((packed.shape[0],), self.middle, dtype=torch.int32)
        zero = packed.grid[name]
        if not torch.equal(zero.float(), zero.float().round()):
            raise InvalidInput(
                f"zero points of {packed.format.spec!r} are not whole numbers, as int8 products "
                "need; leave activations in 16 bits, or choose another backend"
            )
        return zero.flatten().to(torch.int32)

    # What a thread computes, for half a K tile (64 columns).

    def registers(
        self, words: list[Word], constants: list[tuple[Constants, Constants]]
    ) -> list[Word]:
        """Code words (bits of them) -> the half tile's A registers, 8 or 16 of them.

        Register i holds row g + 8 (i % 2), see `pack.fragment`. constants: for each group in this
        half tile, what `constants` made, for row g and row g + 8.
        """
        count = 32 * self.slot // 32
        out = []
        for i in range(count):
            which = i // 4 * len(constants) // (count // 4)
            row = constants[which][i % 2] if constants else ()
            gathered = self.gather(words, i)
            out.append(gathered ^ 0xFFFFFFFF if self.verbatim else self.finish(gathered, row))
        return out

    def arrange(self, tokens: list[Word]) -> list[Word]:
        """Where a decoder `arranges`: of four words of tokens, 64 columns, those that
        `registers` wants if it is told so.
        """
        return tokens

    def gather(self, words: list[Word], i: int) -> Word:
        """Register i: the bits of its 2 or 4 codes, each in its place."""
        out, first = None, 0
        for plane in planes(self.places, self.slot):
            width = len(plane.bits)
            each = self.slot // width
            mask = repeat(plane.places, self.slot)
            left = plane.places[0] - plane.shifts[i % each]
            if self.slot == 16 and whole_byte(plane):  # one PRMT; 4: a byte of zeros
                at = plane.shifts[i % each] // 8
                piece = bytes_of(words[first + i // each], 0x4240 + 0x101 * at)
            else:
                piece = rotate(words[first + i // each], left, mask)
                if mask != 0xFFFFFFFF:
                    piece = piece & mask
            out = piece if out is None else out | piece
            first += width
        assert out is not None
        return out

    def constants(self, words: list[Word]) -> tuple[Constants, Constants]:
        """A group's grid words -> what `finish` wants for row g and for row g + 8."""
        return (), ()

    def scales(self, words: list[Word]) -> tuple[Word, Word]:
        """A group's grid words -> scales of its sums, fp32, for row g and for row g + 8."""
        if len(words) == 1:
            return words[0] << 16, words[0] & 0xFFFF0000
        low, high = words
        return bytes_of(low, 0x5410, high), bytes_of(low, 0x7632, high)

    def finish(self, register: Word, row: Constants) -> Word:
        return register


@dataclass(frozen=True)
class HalfDecoder(Decoder):
    """fp16 or bf16: (bits - center) * scale, where bits are value * 2**-shift.

    Attributes:
        lift: log2 of what the operand is multiplied by, beside the group's scale.
        center: What is subtracted from every code.
        zeros: Every group has a zero point (`Format.zero_point`), subtracted instead.
    """

    lift: int = 0
    center: float = 0
    zeros: bool = False

    @property
    def grid_words(self) -> int:
        return (1 + self.zeros) if self.group or self.zeros else 0

    @property
    def finishing(self) -> int:  # type: ignore[override]
        return 2 if self.zeros else int(bool(self.grid_words or self.center or self.lift))

    @property
    def preparing(self) -> int:  # type: ignore[override]
        return 2 * self.grid_words + 2 * bool(self.grid_words and self.center)

    def grid(self, packed: Packed) -> Tensor | None:
        if not self.grid_words:
            return None
        scale = packed.grid["scale"].float()
        dtype = getattr(torch, self.operand)
        parts = [(scale / self._unit(scale) * 2.0**self.lift).to(dtype)]
        if self.zeros:
            assert packed.format.zero_point is not None
            zero = packed.grid[packed.format.zero_point]
            parts.append((-zero.double() * 2.0**-self.shift).to(dtype))
        return torch.stack(parts, -1).view(torch.int16).to(torch.int32) & 0xFFFF

    def row_scale(self, packed: Packed) -> Tensor:
        if not self.grid_words:
            return packed.format.scales(packed.grid).flatten() * 2.0 ** (self.shift - self.lift)
        unit = self._unit(packed.grid["scale"].float())
        factor = packed.format.row_factor(packed.grid)
        unit = unit if factor is None else unit * factor
        return unit.flatten() * 2.0 ** (self.shift - self.lift)

    def _unit(self, scale: Tensor) -> Tensor:
        """(N, 1): the power of two that bounds the row's scales; 1 where all are zero."""
        largest = scale.abs().amax(1, keepdim=True)
        return torch.exp2(torch.where(largest == 0, 1.0, largest).log2().ceil())

    def constants(self, words: list[Word]) -> tuple[Constants, Constants]:
        low, high = ([bytes_of(w, s) for w in words] for s in (0x1010, 0x3232))
        if not self.center:
            return tuple(low), tuple(high)
        middle = words[0].constant(half_bits(-self.center * 2.0**-self.shift, self.operand))
        return (
            (low[0], mul2(low[0], middle, self.operand)),
            (high[0], mul2(high[0], middle, self.operand)),
        )

    def finish(self, register: Word, row: Constants) -> Word:
        dtype = self.operand
        if not self.finishing:
            return register
        if self.zeros:
            return mul2(add2(register, row[1], dtype), row[0], dtype)
        if not row:
            lift = register.constant(half_bits(2.0**self.lift, dtype))
            if not self.center:
                return mul2(register, lift, dtype)
            low = half_bits(-self.center * 2.0 ** (self.lift - self.shift), dtype)
            return fma2(register, lift, register.constant(low), dtype)
        if self.center:
            return fma2(register, row[0], row[1], dtype)
        return mul2(register, row[0], dtype)


@dataclass(frozen=True)
class SignedDecoder(Decoder):
    """e4m3 from a sign at bit 7 and, below it, the whole number or what lies under its negative.

    -8 to 7 are stored as 0xxx or 1xxx, the latter meaning -(xxx + 1), so that four bits suffice.
    """

    finishing = 3

    def stored(self, codes: Tensor) -> Tensor:
        half = 2 ** (self.bits - 1)
        return torch.where(codes < half, 2 * half - 1 - codes.int(), codes.int() - half).byte()

    def finish(self, register: Word, row: Constants) -> Word:
        return register + ((register >> 7) & 0x01010101)


@dataclass(frozen=True)
class UpperDecoder(Decoder):
    """int8 from codes that stand for code - 2**(bits - 1): as its upper bits, they are signed."""

    def stored(self, codes: Tensor) -> Tensor:
        return codes ^ 2 ** (self.bits - 1)


def decoder(fmt: Format, operand: str) -> Decoder | str:
    """The decoder of a format for an operand, or the reason why there is none.

    Args:
        fmt: The format of the weight.
        operand: Dtype of the activations: "int8", "float8_e4m3fn", "float16" or "bfloat16".
    """
    if fmt.hopper_decode is None:
        return f"{type(fmt).__name__} has no hopper_decode"
    narrow = (16, 32, 64) if operand in MANTISSA else (32, 64)  # 16: a WGMMA of 16-bit operands
    if fmt.group and fmt.group not in narrow and fmt.group % K_TILE:
        listed = ", ".join(map(str, narrow))
        return f"groups of {fmt.group} columns; it takes {listed} and multiples of {K_TILE}"
    found: Decoder | str = fmt.hopper_decode(operand)
    return found


def number(fmt: Format, operand: str, minus: int = 0, times: int = 1) -> Decoder | str:
    """The decoder of values that are whole numbers, code * times - minus.

    A format with a `zero_point` subtracts that instead.

    Args:
        fmt: The format, with one scale a row or a group.
        operand: As in `decoder`.
        minus: What is subtracted from each code.
        times: 1 or 2.

    Raises:
        InvalidInput: `minus` or `times` is given for a format with zero points.
    """
    zeros = fmt.zero_point is not None
    if zeros and (minus, times) != (0, 1):
        raise InvalidInput(
            f"{fmt.spec!r} has zero points, so its values are code - zero; leave out minus={minus} "
            f"and times={times}"
        )
    if fmt.width * fmt.books != 1:
        return f"{fmt.spec!r} does not store one code per weight"
    low = times - 1  # twice the code is the code one place higher
    width = fmt.bits + low
    if operand == "int8":
        half = 2 ** (fmt.bits - 1)
        if fmt.group and zeros:
            return "zero points of groups cannot be subtracted from int8 products"
        if fmt.group and (minus, times) != (half, 1):
            return f"int8 and scales of groups take codes of {fmt.bits} bits minus {half} only"
        if fmt.group:
            places = tuple(range(8 - fmt.bits, 8))
            return UpperDecoder("int8", places, shift=fmt.bits - 8, group=fmt.group, sums=2)
        if width > 8:
            return f"whole numbers of {width} bits do not fit into bytes"
        return Decoder("uint8", tuple(range(low, width)), middle=minus)
    if operand not in MANTISSA:
        if zeros:
            return "zero points cannot be subtracted from fp8 weights"
        if not 2 <= fmt.bits <= 5:
            return f"whole numbers of {fmt.bits} bits do not fit into e4m3; it takes 2 to 5"
        if (minus, times) != (2 ** (fmt.bits - 1), 1):
            return f"e4m3 takes codes of {fmt.bits} bits minus {2 ** (fmt.bits - 1)} only"
        places = (*range(fmt.bits - 1), 7)
        return SignedDecoder(operand, places, shift=9, group=fmt.group, sums=2 * (fmt.group > 0))
    # As a subnormal, a code is the code times 2**(1 - bias - mantissa bits); one bit more than the
    # mantissa still is, since the exponent's first step continues it without a gap.
    if width > MANTISSA[operand] + 1:
        return f"whole numbers of {width} bits do not fit into {operand}"
    first = max(MANTISSA[operand] - width, 0)
    if width == 8 and not (fmt.group or zeros):  # one instruction gathers whole bytes
        first = 0
    shift = BIAS[operand] - 1 + MANTISSA[operand] - first
    return HalfDecoder(
        operand,
        tuple(range(first + low, first + width)),
        shift=shift,
        group=fmt.group,
        lift=min(shift, LIFT[operand]),
        center=minus,
        zeros=zeros,
    )


def whole_byte(plane: Plane) -> bool:
    """Whether a plane is the lower byte of each element of 16 bits."""
    return plane.places == tuple(range(8))


def repeat(places: tuple[int, ...], slot: int) -> int:
    """A 32-bit mask with these bits set in every slot."""
    return sum(1 << (start + p) for start in range(0, 32, slot) for p in places)
