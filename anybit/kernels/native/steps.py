"""Trellis codes by look-up, `trellis:code=look`: a row's values from the bits of its tiles.

In a tile of 16x16 a lane holds 8 weights that follow each other, 4 of row r and then 4 of row
r + 8, in columns c, c + 1, c + 8 and c + 9 (`core/tiles.py`). So the lanes of both rows lie
together, and a state's bits are those of its own lane and of one or two before it: of the same
rows, or the last ones of the rows above. A word of 16 bits decodes four weights of a lane.

    (N / 16, 8 pairs of rows, blocks of 512 columns, planes, 128 lanes)

where planes of 16 and 8 bits hold the 8 * rate bits of a lane, low ones first.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core import tiles
from anybit.core.packed import Packed
from anybit.kernels.native import decode, instructions, ir, memory
from anybit.kernels.native.ir import F32, I8, I16, I32, I64, Value, vec
from anybit.kernels.native.operand import BLOCK, Operand
from anybit.kernels.native.rows import Signed

LANES = 4  # of a row in a tile
PLANES = {1: (8,), 2: (16,), 3: (16, 8), 4: (16, 16)}  # bits of a lane, low ones first
DTYPES = {8: torch.uint8, 16: torch.int16}
ROWS = 256  # words of a half of the table


@dataclass(frozen=True)
class Steps:
    """What kernels are compiled for, beside `Codes` and `Vectors` of `decode.py`."""

    code: tiles.Hashed

    def block_bytes(self, count: int = BLOCK) -> int:
        """Bytes of a block of two rows, of whatever count."""
        return BLOCK * self.code.rate // 4

    def table(self, operand: Operand, where: Value) -> "Lookup":
        return Lookup(self, operand, where)

    def row(self, table: Any, row: Value, blocks: Value, tail: int) -> Value:
        """Bytes before the first block of a row, which the table decodes next."""
        pair, size = row & 7, (blocks + (1 if tail else 0)) * self.block_bytes()
        table.begin(row, ((pair + 7 & 7) - pair) * size)
        return ((row >> 4 << 3) + pair) * size

    def unit(self, block: Value, unit: int, table: "Lookup", count: int = BLOCK) -> list[Value]:
        """The numbers of a unit, in the operand's vectors and order."""
        operand = table.operand
        parts = operand.ordered(table.columns(block, unit * operand.codes, operand.codes))
        if operand.kind == "fixed":
            return [part.cast("sext", operand.vector) for part in parts]
        if operand.whole:  # whole numbers from -128 on
            if operand.kind != "s8":
                parts = [part ^ 128 for part in parts]
            return [part.cast("zext", operand.vector) for part in parts]
        real = [part.cast("sitofp", vec(operand.codes // operand.vectors, F32)) for part in parts]
        return [part.cast("fptrunc", operand.vector) for part in real]  # which hold all of them

    def lay_out(self, packed: Packed) -> Tensor:
        """(N / 2, bytes) uint8."""
        (n, k), bits = packed.shape, packed.format.bits
        steps = tiles.cut(packed.codes(), tiles.SIDE // self.code.width).to(torch.int32)
        parts = steps.view(n // tiles.SIDE, k // tiles.SIDE, 8, LANES, 8 // self.code.width)
        lanes = parts[..., 0]
        for i in range(1, parts.shape[-1]):
            lanes = lanes << bits | parts[..., i]
        blocks = -(-k // BLOCK)
        lanes = pad(lanes.transpose(1, 2).flatten(2), (0, blocks * BLOCK // 4 - k // 4))
        lanes = lanes.reshape(n // 2, blocks, -1)
        low, planes = 0, []
        for size in PLANES[self.code.rate]:
            plane = lanes >> low & ((1 << size) - 1)
            planes.append(plane.to(DTYPES[size]).contiguous().view(torch.uint8))
            low += size
        out = memory.empty(n // 2, blocks * self.block_bytes())
        return out.copy_(torch.cat(planes, 2).flatten(1))

    @staticmethod
    def stored(table: Tensor) -> Tensor:
        """The format's table as halves (2, ROWS) int16: of words, or of neighbours."""
        return table.view(torch.int16).view(ROWS, 2).T.contiguous()


Coded = decode.Codes | decode.Vectors | Signed | Steps


class Lookup:
    """The table, and the rows that are being decoded."""

    def __init__(self, steps: Steps, operand: Operand, where: Value):
        """where: the table, see `Steps.stored`."""
        self.code, self.operand, self.where, f = steps.code, operand, where, where.function
        self.lanes = operand.isa.bits // 16
        self.parts: list[list[Value]] = []
        if operand.isa.bits == 512:
            kind, size = vec(self.lanes, I16), 2 * ROWS
            self.parts = [
                [f.load(kind, where, half + i) for i in range(0, size, 64)] for half in (0, size)
            ]
        self.known: dict[tuple[str, int], Value] = {}

    def begin(self, row: Value, above: Value) -> None:
        """Decode this row; above: bytes from its lanes to those of the rows above."""
        second = (0 - (row >> 3 & 1)).cast("trunc", I16)
        self.second, self.above = second.splat(self.lanes), above

    def columns(self, block: Value, first: int, count: int) -> Value:
        """int8 of `count` columns of a block."""
        size = LANES * self.lanes
        chunks = range(first // size, -(-(first + count) // size))
        at = first % size
        return decode.joined([self._chunk(block, i) for i in chunks]).pick(range(at, at + count))

    def _chunk(self, block: Value, chunk: int) -> Value:
        """int8 of the columns of a vector of lanes."""
        key = (block.text, chunk)
        if key not in self.known:
            self.known[key] = self._decoded(block, chunk)
        return self.known[key]

    def _decoded(self, block: Value, chunk: int) -> Value:
        code, (word, above) = self.code, self._bits(block, chunk)
        pairs = self._step(word)
        if code.width == 2:  # the last one's bits are the lowest
            bits = 2 * code.rate
            pairs = self._step(word >> bits | above << 16 - bits) + pairs
        tile = vec(self.lanes // LANES, I64)  # columns 0 to 7, and 8 to 15
        low, high = (pair.bits(tile) for pair in pairs)
        count = ir.lanes(tile)
        both = low.shuffle(high, [i for j in range(count) for i in (j, j + count)])
        return both.bits(vec(LANES * self.lanes, I8))

    def _step(self, state: Value) -> list[Value]:
        """Pairs of neighbours of each state: bytes of words."""
        code, kind, n = self.code, state.kind, self.lanes
        h = (state & 255) * code.low + (state >> 8) * code.high
        signs = [h * (code.spread & 0xFFFF)]
        low = h.function.constant(code.spread & 0xFFFF, vec(n, I32))
        if code.width == 4:
            product = h.cast("zext", low.kind) * low
            signs.append((product >> 16).cast("trunc", kind) + h * (code.spread >> 16))
        out = []
        for pair, sign in zip(self._look(h), signs, strict=True):
            values, minus = (some.bits(vec(2 * n, I8)) for some in (pair, sign))
            negative = minus < minus.function.zero(minus.kind)
            out.append(values ^ negative.cast("sext", values.kind))
        return out

    def _look(self, h: Value) -> list[Value]:
        """Words of the table: of steps of four weights from both halves, of two from either."""
        at, other = h >> 7 & ROWS - 1, (h & 2).compare("ne", h.function.zero(h.kind))
        if self.parts:
            found = [
                decode.chosen(instructions.look_up_words(half, at), at, 8) for half in self.parts
            ]
            return found if self.code.width == 4 else [other.select(found[1], found[0])]
        if self.code.width == 2:
            return [decode.loaded(self.where, at + ((h & 2) << 7), I16)]
        return [decode.loaded(h.function.at(self.where, half), at, I16) for half in (0, 2 * ROWS)]

    def _bits(self, block: Value, chunk: int) -> tuple[Value, Value]:
        """The string of bits that ends in each lane's row: its last 16, and those above them."""
        rate, kind = self.code.rate, vec(self.lanes, I16)
        own = self._lanes(block, chunk)
        other = self._lanes(block.function.at(block, self.above), chunk)

        def before(count: int) -> Value:
            """The lowest plane of what is so many lanes before each."""
            size = PLANES[rate][0]
            tile = vec(self.lanes // LANES, f"i{LANES * size}")
            a, b = (lanes[0].bits(tile) for lanes in (own, other))
            moved = a << count * size | b >> (LANES - count) * size
            return moved.bits(own[0].kind).cast("zext", kind)

        words = [plane.cast("zext", kind) for plane in own]
        if rate == 1:
            words = [words[0] | before(1) << 8, before(2)]
        elif rate == 3:
            words = [words[0], words[1] | before(1) << 8, before(1) >> 8]
        else:
            words.append(before(1))
        skip, down = divmod(4 * rate, 16)  # of row r, what is before the bits of row r + 8
        found = []
        for at in range(2):
            low, *high = words[at + skip : at + skip + 2] or [block.function.zero(kind)]
            first = low >> down
            if high and down:
                first = first | high[0] << 16 - down
            found.append(first ^ (first ^ words[at]) & self.second)
        return found[0], found[1]

    def _lanes(self, block: Value, chunk: int) -> list[Value]:
        """The planes of a vector of lanes."""
        at, planes = 0, []
        for size in PLANES[self.code.rate]:
            kind = vec(self.lanes, {8: I8, 16: I16}[size])
            planes.append(block.function.load(kind, block, at + chunk * self.lanes * size // 8))
            at += BLOCK // 4 * size // 8
        return planes
