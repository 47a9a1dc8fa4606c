"""Codes that are rows of a table, with or without a sign for each weight: `Format.rows`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core.frame import Rows
from anybit.kernels.native import ir
from anybit.kernels.native.decode import InRows, Table, joined
from anybit.kernels.native.ir import F32, I8, I16, I32, I64, Value, vec
from anybit.kernels.native.operand import BLOCK, RUN, Operand


@dataclass(frozen=True)
class Signed(InRows):
    """Numbers of rows of `width` weights each, in `bits` bits, and signs where there are any.

    A block holds the lowest bytes of all its numbers, then what is above them, in as many bits as
    divide a byte, then a bit for each weight. The table is bf16 (2**bits, width), then fp32.
    """

    bits: int
    width: int
    signed: bool

    @property
    def high(self) -> int:
        """Bits of a number that are stored above its lowest byte: 0, 1, 2, 4 or 8."""
        above = max(0, self.bits - 8)
        return 1 << (above - 1).bit_length() if above else 0

    def block_bytes(self, count: int = BLOCK) -> int:
        """Bytes of a block, of which a short one has as many."""
        whole = BLOCK // self.width * (8 + self.high) // 8 + BLOCK // 8 * self.signed
        return whole if count else 0

    def offset(self, operand: Operand) -> int:
        """Where the operand's table begins, in bytes."""
        return 0 if operand.kind == "bf16" else 2 * self.width << self.bits

    @staticmethod
    def stored(values: Tensor) -> Tensor:
        """The tables (2**bits, width) fp32 as bytes."""
        both = values.bfloat16(), values
        return torch.cat([table.contiguous().view(torch.uint8).flatten() for table in both])

    def lay_out(self, rows: Rows, blocks: int) -> Tensor:
        """Codes of a weight in so many blocks, (N, bytes) uint8; columns beyond K are of row 0."""
        n = len(rows.row)

        def blocked(numbers: Tensor, bits: int) -> Tensor:
            """Numbers (N, positions) of so many bits -> (N, blocks, bytes)."""
            per = 8 // bits
            numbers = pad(numbers, (0, blocks * BLOCK // self.width - numbers.shape[1]))
            places = torch.arange(0, 8, bits, dtype=torch.int32)
            bytes_ = (numbers.view(n, -1, per) << places).sum(-1, dtype=torch.int32)
            return bytes_.to(torch.uint8).view(n, blocks, -1)

        parts = [blocked(rows.row & 255, 8)]
        if self.high:
            parts.append(blocked(rows.row >> 8, self.high))
        if rows.signs is not None:
            parts.append(blocked(rows.signs, self.width))
        return torch.cat(parts, -1).flatten(1)

    def unit(self, block: Value, unit: int, table: Table, count: int = BLOCK) -> list[Value]:
        """The numbers of a unit, in the operand's vectors and order."""
        f, operand = block.function, table.operand
        per, after = RUN // self.width, BLOCK // self.width
        size, kind = (2, ir.BF16) if operand.kind == "bf16" else (4, F32)
        if unit == 0:
            self._places(block, table, size * self.width // 8)
        parts = []
        for i in range(unit * per, (unit + 1) * per):
            # Volatile, for LLVM would take them out of registers, which is slower.
            place = f.emit(f"load volatile i16, ptr {f.at(table.room(after), 2 * i).text}", I16)
            at = place.cast("zext", I64) * 8
            parts.append(f.load(vec(self.width, kind), table.memory, at))
        numbers = joined(parts)
        if self.signed:
            first = after * (8 + self.high) // 8 + unit * RUN // 8
            minus = f.load(I32, block, first).bits(vec(RUN, "i1"))
            words = numbers.bits(vec(RUN, I16 if size == 2 else I32))
            words = minus.select(words ^ (1 << (8 * size - 1)), words)
            numbers = words.bits(numbers.kind)
        if operand.vectors == 1:
            return [numbers]
        return operand.ordered(numbers)

    def _places(self, block: Value, table: Table, scale: int) -> None:
        """Put the places of a block's rows in the table, in units of 8 bytes, on the stack."""
        f, count = block.function, BLOCK // self.width
        lanes = f.isa.bits // 16
        kind = vec(lanes, I16)
        for first in range(0, count, lanes):
            at = f.load(vec(lanes, I8), block, first).cast("zext", kind)
            if self.high:
                item = min(16, lanes * self.high)  # bits that are loaded as a number
                some = vec(lanes * self.high // item, f"i{item}")
                words = f.load(some, block, count + first * self.high // 8)
                each = words.pick([i * self.high // item for i in range(lanes)])
                each = each.cast("zext", kind)
                down = ", ".join(f"i16 {i * self.high % item}" for i in range(lanes))
                above = f.emit(f"lshr {kind} {each.text}, <{down}>", kind)
                at = at | (above & ((1 << self.high) - 1)) << 8
            at = at << scale.bit_length() - 1
            place = f.at(table.room(count), 2 * first).text
            f.lines.append(f"store volatile {kind} {at.text}, ptr {place}, align 1")
