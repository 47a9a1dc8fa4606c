"""Trellis codes by look-up, `trellis:code=look`: a row's values from the bits of its tiles.

In a tile of 16x16 a lane holds 8 weights that follow each other, 4 of row r and then 4 of row
r + 8, in columns c, c + 1, c + 8 and c + 9 (`core/tiles.py`). So the lanes of both rows lie
together, and a state's bits are those of its own lane and of one or two before it: of the same
rows, or the last ones of the rows above. Every lane of a vector decodes four weights.

    (N / 16, 8 pairs of rows, blocks of 512 columns, planes, 128 lanes)

where planes of 16 and 8 bits, or one of 32, hold the 8 * rate bits of a lane.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core import tiles
from anybit.core.packed import Packed
from anybit.kernels.native import decode, instructions, ir, memory
from anybit.kernels.native.ir import F32, I8, I16, I32, Function, Value, vec
from anybit.kernels.native.operand import BLOCK, Operand
from anybit.kernels.native.rows import Signed

LANES = 4  # of a row in a tile
PLANES = {1: (8,), 2: (16,), 3: (16, 8), 4: (32,)}  # bits of a lane, low ones first
DTYPES = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


@dataclass(frozen=True)
class Steps:
    """What kernels are compiled for, beside `Codes` and `Vectors` of `decode.py`."""

    code: tiles.Hashed

    def block_bytes(self, count: int = BLOCK) -> int:
        """Bytes of a block of two rows, of whatever count."""
        return BLOCK * self.code.rate // 4

    def table(self, f: Function, operand: Operand, where: Value) -> "Lookup":
        return Lookup(f, self, operand, where)

    def row(self, f: Function, table: Any, row: Value, blocks: Value, tail: int) -> Value:
        """Bytes before the first block of a row, which the table decodes next."""
        pair, size = row & 7, (blocks + (1 if tail else 0)) * self.block_bytes()
        table.begin(f, row, ((pair + 7 & 7) - pair) * size)
        return ((row >> 4 << 3) + pair) * size

    def unit(
        self, f: Function, operand: Operand, block: Value, unit: int, table: "Lookup",
        count: int = BLOCK,
    ) -> list[Value]:  # fmt: skip
        """The numbers of a unit, in the operand's vectors and order."""
        some = table.columns(f, block, unit * operand.codes, operand.codes)
        order, lanes = operand.order(), operand.codes // operand.vectors
        parts = [
            f.shuffle(some, some, order[i : i + lanes]) for i in range(0, operand.codes, lanes)
        ]
        if operand.whole:  # whole numbers from -128 on
            if operand.kind != "s8":
                parts = [part ^ 128 for part in parts]
            return [f.cast("zext", part, operand.vector) for part in parts]
        real = [f.cast("sitofp", part, vec(lanes, F32)) for part in parts]
        return [f.cast("fptrunc", part, operand.vector) for part in real]  # which hold all of them

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


Coded = decode.Codes | decode.Vectors | Signed | Steps


class Lookup:
    """The table, and the rows that are being decoded."""

    def __init__(self, f: Function, steps: Steps, operand: Operand, where: Value):
        """where: 256 words of the table."""
        self.code, self.isa, self.where = steps.code, operand.isa, where
        self.lanes = self.isa.floats
        self.parts: list[Value] = []
        if self.isa.bits == 512:
            kind = vec(self.lanes, F32)
            self.parts = [f.load(kind, where, i) for i in range(0, 1024, 4 * self.lanes)]
        self.known: dict[tuple[str, int], Value] = {}

    def begin(self, f: Function, row: Value, above: Value) -> None:
        """Decode this row; above: bytes from its lanes to those of the rows above."""
        self.second, self.above = f.compare("ne", row & 8, f.integer(0)), above

    def columns(self, f: Function, block: Value, first: int, count: int) -> Value:
        """int8 of `count` columns of a block."""
        size = 4 * self.lanes
        parts = [
            self._chunk(f, block, i) for i in range(first // size, -(-(first + count) // size))
        ]
        while len(parts) > 1:
            both = range(2 * ir.lanes(parts[0].kind))
            parts = [f.shuffle(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        at = first % size
        return f.shuffle(parts[0], parts[0], range(at, at + count))

    def _chunk(self, f: Function, block: Value, chunk: int) -> Value:
        """int8 of the columns of a vector of lanes."""
        key = (block.text, chunk)
        if key not in self.known:
            self.known[key] = self._decoded(f, block, chunk)
        return self.known[key]

    def _decoded(self, f: Function, block: Value, chunk: int) -> Value:
        code, n = self.code, self.lanes
        z = self._bits(f, block, chunk)
        words, signs = self._step(f, z)
        if code.width == 2:  # the last one's bits are the lowest
            others = self._step(f, z >> 2 * code.rate)
            words, signs = (
                last << 16 | first & 0xFFFF
                for last, first in zip((words, signs), others, strict=True)
            )
        kind = vec(4 * n, I8)
        negative = f.compare("slt", f.bits(signs, kind), f.zero(kind))
        values = f.bits(words, kind) ^ f.cast("sext", negative, kind)
        tile = [4 * (j % 8 // 2) + j // 8 * 2 + j % 2 for j in range(tiles.SIDE)]
        order = [start + j for start in range(0, 4 * n, tiles.SIDE) for j in tile]
        return f.shuffle(values, values, order)

    def _step(self, f: Function, z: Value) -> tuple[Value, Value]:
        """Words of the states in the low halves, whose low half is of two weights, and signs."""
        code = self.code
        h = (z & 255) * code.low + (z >> 8 & 255) * code.high
        word = self._look(f, h >> 7 & 255)
        if code.width == 2:
            word = f.select(f.compare("ne", h & 2, f.zero(h.kind)), word >> 16, word)
        return word, h * code.spread

    def _bits(self, f: Function, block: Value, chunk: int) -> Value:
        """The bits of each lane up to the row's own last ones, the last one lowest: 32 or fewer."""
        own = self._lanes(f, block, chunk)
        other = self._lanes(f, f.at(block, self.above), chunk)
        size = 8 * self.code.rate

        def before(count: int) -> Value:
            """What is so many lanes before each."""
            at = range(self.lanes)
            return f.shuffle(
                own, other,
                [i - count if i % LANES >= count else self.lanes + i + LANES - count for i in at],
            )  # fmt: skip

        last, first = own, own >> size // 2
        for count in (1, 2) if size == 8 else (1,):
            some = before(count)
            first = first | some << count * size - size // 2
            if size < 32:
                last = last | some << count * size
        return f.select(self.second, last, first)

    def _lanes(self, f: Function, block: Value, chunk: int) -> Value:
        """The bits of a vector of lanes."""
        at, low, total = 0, 0, None
        for size in PLANES[self.code.rate]:
            kind = vec(self.lanes, {8: I8, 16: I16, 32: I32}[size])
            part = f.load(kind, block, at + chunk * self.lanes * size // 8)
            part = f.cast("zext", part, vec(self.lanes, I32)) << low
            total = part if total is None else total | part
            at, low = at + BLOCK // 4 * size // 8, low + size
        assert total is not None
        return total

    def _look(self, f: Function, at: Value) -> Value:
        """Words of the table at indices."""
        if self.parts:
            found = instructions.look_up_floats(f, self.parts, at)
            return f.bits(decode.chosen(f, found, at, 8), at.kind)
        return decode.loaded(f, self.where, at, I32)
