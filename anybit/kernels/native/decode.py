"""The layout of codes in memory, and how a few instructions make numbers of them.

A row is cut into blocks of 512 codes. A block holds the planes of `anybit.core.planes`, widest
first; a plane of w bits takes w vectors of 64 bytes, and a vector 16 / w runs of 32 codes. Code i
of a run lies in the 16-bit word i of the vector: runs 0, 2, 4, ... in the low byte from bit 0 on,
runs 1, 3, 5, ... in the high byte. So one shift aligns the 32 codes of a run in words of 16
bits, 16 of them in words of 32, or the 64 of two runs in bytes; processors with shorter vectors
shift each part of it. The last block of a row may have fewer runs; a plane takes as many vectors
there as hold them.

**Bands.** On x86, what stands for a row is a band of 16 of them: of each two columns, the two codes
of the first row, of the second, and so on. So a run is two columns, a block 32, and a lane of 32
bits belongs to one row: sums need not be added up across lanes, and scales lie in vectors.

The bits of a code are put together in any order that is cheap, since the table can be permuted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.core.planes import segments
from anybit.kernels.native import instructions, ir
from anybit.kernels.native.ir import F32, I8, I16, I32, Value, vec
from anybit.kernels.native.operand import BLOCK, RUN, Operand


def place(run: int, width: int) -> int:
    """The lowest bit of a run's codes in the 16-bit words of a plane of `width` bits."""
    run %= 16 // width
    return run // 2 * width + 8 * (run % 2)


class InRows:
    """Codes whose rows lie one after the other, `block_bytes` for each block."""

    bits: int

    def block_bytes(self, count: int = BLOCK) -> int:
        raise NotImplementedError

    def table(self, operand: Operand, memory: Value) -> "Table":
        return Table(self, operand, memory)

    def row(self, table: Any, row: Value, blocks: Value, tail: int) -> Value:
        """Bytes before the first block of a row. blocks: whole ones. tail: as in `gemv.Few`."""
        return row * (blocks * self.block_bytes() + self.block_bytes(tail))


def vectors(width: int, count: int) -> int:
    """Vectors of 64 bytes that a plane of `width` bits takes for so many codes of a block."""
    return -(-count * width // 512)


@dataclass(frozen=True)
class Codes(InRows):
    """How codes of `bits` bits become numbers.

    first: where the table is first, first + 1, ...: whole numbers in steps of 1, which need no
        table. None: a table of 2**bits numbers.
    signed: whether the highest bit of a code is the sign of its number.
    short: whether the numbers of the table are ones of bf16.
    half: where the bits of a code below its sign are those of a number of fp16, how far up they
        lie there. None: they are not.
    """

    bits: int
    first: int | None
    signed: bool = False
    short: bool = False
    half: int | None = None

    def block_bytes(self, count: int = BLOCK) -> int:
        """Bytes of a block of so many codes."""
        return sum(64 * vectors(width, count) for width in segments(self.bits))

    def planes(self, count: int = BLOCK) -> list[tuple[int, int, int]]:
        """(width, bytes before it in a block, its lowest bit in a code) of every plane."""
        out, at, low = [], 0, self.bits
        for width in segments(self.bits):
            low -= width
            out.append((width, at, low))
            at += 64 * vectors(width, count)
        return out

    def permuted(self) -> list[int]:
        """Code of each index that `_index` makes where it need not be the code itself."""
        order = []
        for index in range(1 << self.bits):
            code, at = 0, 0
            for width, _, low in self.planes():
                code |= ((index >> at) & ((1 << width) - 1)) << low
                at += width
            order.append(code)
        return order

    def _index(
        self,
        block: Value,
        count: int,
        run: int,
        skip: int,
        kind: str,
        shift: int,
        true: bool,
    ) -> Value:
        """Indices in the lanes of a vector.

        Args:
            block: the address of the block.
            count: codes in it.
            run: which 32 codes.
            skip: bytes of a plane's vector that lie before.
            kind: the vector's type.
            shift: 16 for the codes in the upper halves of 32-bit lanes.
            true: whether indices are the codes; else bits above them are left as they are.
        """
        f, total, at = block.function, None, 0
        # x86 shifts no bytes.
        bytes_ = ir.scalar(kind) == I8 and not f.isa.arm
        lanes16 = vec(ir.lanes(kind) // 2, I16) if bytes_ else kind
        for width, start, low in self.planes(count):
            per = 16 // width
            bit = place(run, width) + shift
            part = f.load(lanes16, block, start + 64 * (run // per) + skip)
            up = (low if true else at) - bit
            part = part << up if up > 0 else part >> -up
            part = part.bits(kind)
            at += width
            if true or at < self.bits:
                part = part & (((1 << width) - 1) << (low if true else at - width))
            elif at > width:
                part = part & -(1 << (at - width))
            total = part if total is None else total | part
        assert total is not None
        return total

    def unit(self, block: Value, unit: int, table: "Table", count: int = BLOCK) -> list[Value]:
        """The numbers of a unit, in the operand's vectors and order. count: codes of the block."""
        operand = table.operand
        bits, indices = operand.isa.bits, partial(self._index, block, count)
        if table.way == "bytes":
            index = partial(indices, unit // 2 * 2, shift=0, true=True)
            return table.pair((block.text, unit // 2), index)[unit % 2]
        out = []
        if table.way == "halves":
            for skip in range(0, 2 * RUN, bits // 8):
                words = indices(unit, skip, vec(bits // 16, I16), 0, True)
                out += self._halves(operand, words)
            return out
        for j in range(operand.vectors):
            if operand.integer:
                run = 2 * unit if operand.itemsize == 1 else unit
                codes = indices(run, j * bits // 8, operand.vector, 0, True)
                if operand.kind == "fixed":
                    assert self.first is not None
                    codes = codes + self.first if self.first else codes
                out.append(codes ^ 128 if operand.kind == "s8" and self.bits == 8 else codes)
            elif operand.kind == "bf16":
                out.append(
                    table.bf16(partial(indices, unit, j * bits // 8, vec(bits // 16, I16), 0))
                )
            else:
                skip, odd = j // 2 * bits // 8, 16 * (j % 2)
                out.append(table.fp32(partial(indices, unit, skip, vec(bits // 32, I32), odd)))
        return out

    def _halves(self, operand: Operand, code: Value) -> list[Value]:
        """bf16 of a vector of words; or fp32 of its even and of its odd codes."""
        assert self.half is not None
        up = (code << (16 - self.bits)).bits(code.kind)
        down = code.like(16 - self.bits - self.half)
        words = code.function.emit(f"ashr {code.kind} {up.text}, {down.text}", code.kind)
        words = words & (((1 << (self.bits - 1)) - 1) << self.half | 1 << 15)
        lanes = ir.lanes(code.kind)
        if operand.kind == "bf16":
            return [short(words.bits(vec(lanes, "half")).cast("fpext", vec(lanes, F32)))]
        parts = (words.pick(range(odd, lanes, 2)) for odd in (0, 1))
        return [
            part.bits(vec(lanes // 2, "half")).cast("fpext", vec(lanes // 2, F32)) for part in parts
        ]


@dataclass(frozen=True)
class Vectors(InRows):
    """Codes that stand for `width` weights each, sums of the vectors of `books` codes.

    They lie one after the other, in bytes or in 16-bit words where `bits` is 16. The table is
    fp32, (books, 2**bits, width). half: sums are rounded to fp16, as the reference rounds them.
    """

    bits: int
    width: int
    books: int
    half: bool

    @property
    def item(self) -> int:
        """Bytes of a code."""
        return 2 if self.bits > 8 else 1

    def block_bytes(self, count: int = BLOCK) -> int:
        """Bytes of a block of so many weights."""
        return count // self.width * self.books * self.item

    def unit(self, block: Value, unit: int, table: "Table", count: int = BLOCK) -> list[Value]:
        """As `Codes.unit`."""
        f, operand, per = block.function, table.operand, RUN // self.width
        parts = []
        for at in range(unit * per, (unit + 1) * per):
            total = None
            for book in range(self.books):
                offset = (at * self.books + book) * self.item
                code = f.load(I16 if self.item == 2 else I8, block, offset).cast("zext", ir.I64)
                place = code * (4 * self.width) + book * (4 * self.width << self.bits)
                vector = f.load(vec(self.width, F32), table.memory, place)
                total = vector if total is None else total + vector
            assert total is not None
            parts.append(total)
        numbers = joined(parts)
        if operand.kind == "bf16":
            numbers = numbers.cast("fptrunc", vec(RUN, ir.BF16))
            if operand.vectors == 1:
                return [numbers]
        if self.half:
            half = numbers.cast("fptrunc", vec(RUN, "half"))
            numbers = half.cast("fpext", numbers.kind)
        return operand.ordered(numbers)


class Table:
    """The table of a format, or the arithmetic that needs none.

    way: "registers" hold the numbers; "bytes": registers hold their bytes, but for those that are
    all zero; "memory" holds them; "halves": a code is a number of fp16, but for the place of its
    bits; "sum": a number is the code and the first; "": there are no numbers to be found.
    """

    def __init__(self, codes: InRows, operand: Operand, memory: Value):
        """memory: where the table lies, in the order of `Codes.permuted` for registers."""
        self.operand, self.memory, self.codes, f = operand, memory, codes, memory.function
        self.scratch: Value | None = None
        self.bits = codes.bits
        self.first = None if not isinstance(codes, Codes) else codes.first
        self.way = self.found(codes, operand)
        self.parts: list[Value] = []
        self.count = 1  # of tables, each of one byte of the numbers
        self.pairs: dict[tuple[str, int], tuple[list[Value], list[Value]]] = {}
        if self.way == "bytes" and isinstance(codes, Codes):
            sixteen, wide = vec(16, I8), list(range(16)) * (operand.isa.bits // 128)
            self.count = self.item_bytes(codes)
            size = self.count * self.kept_entries(codes, operand)
            some = [f.load(sixteen, memory, i) for i in range(0, size, 16)]
            self.parts = [part.pick(wide) for part in some]
        elif self.way == "registers":
            kind = vec(operand.isa.bits // 16, I16) if operand.kind == "bf16" else operand.vector
            step = operand.isa.bits // 8
            count = max(1, 2**codes.bits // ir.lanes(kind))
            self.parts = [f.load(kind, memory, i * step) for i in range(count)]

    def room(self, count: int) -> Value:
        """Room for `count` 16-bit words on the stack, the same in all calls."""
        if self.scratch is None:
            self.scratch = self.memory.function.allocate(I16, count)
        return self.scratch

    @staticmethod
    def found(codes: InRows, operand: Operand) -> str:
        """How numbers are found; see `way`."""
        if not isinstance(codes, Codes) or operand.integer:
            return ""
        whole, entries = codes.first is not None, 2**codes.bits
        if operand.isa.arm:
            if whole and codes.bits > 6:
                return "sum"
            if codes.half is not None:
                return "halves"
            return "bytes" if codes.short or entries <= operand.isa.entries else "memory"
        if operand.kind == "bf16":
            return "sum" if whole and codes.bits > 6 else "registers"
        if whole and (operand.isa.bits == 512 or codes.bits > 4):
            return "sum"
        if entries <= (64 if operand.isa.bits == 512 else 8):
            return "registers"
        if codes.half is not None:
            return "halves"
        if codes.short:
            return "bytes"
        return "registers" if entries <= 4 * operand.isa.floats else "memory"

    @staticmethod
    def item_bytes(codes: Codes) -> int:
        """Bytes of a number that are looked up: the highest ones, where the others are zero."""
        return 2 if codes.short else 4

    @staticmethod
    def kept_entries(codes: Codes, operand: Operand) -> int:
        """Entries in memory of a table of bytes: one byte of all numbers, then the next one.

        One that no instruction looks up is left without the signed half.
        """
        entries = 2**codes.bits
        return max(16, entries // 2 if codes.signed and entries > operand.isa.entries else entries)

    @staticmethod
    def stored(codes: Codes, operand: Operand, numbers: Tensor) -> Tensor:
        """The numbers of all codes, in the activation's dtype, as the bytes that kernels load."""
        way = Table.found(codes, operand)
        if way == "registers":
            numbers = numbers[torch.tensor(codes.permuted())]
        numbers = numbers.repeat(max(1, 32 // len(numbers)))
        if way == "bytes":
            kept = numbers[: Table.kept_entries(codes, operand)]
            some = kept.float().view(torch.uint8).view(-1, 4)
            return some[:, 4 - Table.item_bytes(codes) :].T.flatten()
        return (numbers if operand.kind == "bf16" else numbers.float()).view(torch.uint8)

    def pair(
        self, key: tuple[str, int], index: Callable[..., Value]
    ) -> tuple[list[Value], list[Value]]:
        """fp32 of two runs whose codes lie in the low and the high bytes of words.

        The second run is asked for after the first; both are decoded then.
        """
        if key in self.pairs:
            return self.pairs[key]
        size = self.operand.isa.bits // 8
        kind, words, wide = vec(size, I8), vec(size // 2, I16), vec(size // 4, I32)
        out: tuple[list[Value], list[Value]] = [], []
        for skip in range(0, 2 * RUN, size):
            parts = self._bytes(index(skip=skip, kind=kind))
            if self.operand.isa.arm:
                for run, vectors in zip(out, self._crossed(parts), strict=True):
                    run += [vector.bits(self.operand.vector) for vector in vectors]
                continue
            low, high = (a.bits(words) for a in parts)
            both = (low & 255) | (high << 8), (low >> 8) | (high & 0xFF00)
            for run, some in zip(out, both, strict=True):
                numbers = some.bits(wide)
                for half in (numbers << 16, numbers & -65536):
                    run.append(half.bits(self.operand.vector))
        self.pairs[key] = out
        return out

    def _crossed(self, parts: list[Value]) -> Iterator[Sequence[Value]]:
        """Numbers of the codes in the low bytes of words, then of those in the high bytes.

        parts: the lowest bytes of the numbers, the next ones, and so on.
        """
        words = [instructions.crossed(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
        for run in (0, 1):
            if self.operand.kind == "bf16":
                yield [words[0][run]]
            elif len(words) == 1:
                numbers = words[0][run].bits(vec(self.operand.isa.floats, I32))
                yield numbers << 16, numbers & -65536
            else:
                yield instructions.crossed(words[0][run], words[1][run])

    def _bytes(self, code: Value) -> list[Value]:
        """The bytes of the numbers of codes, the lowest ones first."""
        count = len(self.parts) // self.count
        starts = range(0, len(self.parts), count)
        parts = (self.parts[i : i + count] for i in starts)
        out = [instructions.look_up(part, code, self.bits) for part in parts]
        if count * 16 < 2**self.bits:
            out[-1] = out[-1] ^ (instructions.highest(code, self.bits - 1) & 128)
        return out

    def bf16(self, index: Callable[[bool], Value]) -> Value:
        """Numbers of a vector of codes."""
        if self.way == "sum":
            words, first = index(True), self.first or 0
            if self.operand.isa.arm:
                kind = vec(ir.lanes(words.kind), F32)
                return short((words + first).cast("sitofp", kind))
            pair = words.bits(vec(16, I32))
            even = ((pair & 0xFFFF) + first).cast("sitofp", vec(16, F32))
            odd = ((pair >> 16) + first).cast("sitofp", vec(16, F32))
            even, odd = even.bits(vec(16, I32)), odd.bits(vec(16, I32))
            return ((even >> 16) | (odd & -65536)).bits(self.operand.vector)
        return self._look(index(False), instructions.look_up_words).bits(self.operand.vector)

    def fp32(self, index: Callable[[bool], Value]) -> Value:
        """Numbers of as many codes as a vector has lanes."""
        if self.way == "sum":
            assert self.first is not None
            return (index(True) + self.first).cast("sitofp", self.operand.vector)
        if self.way == "registers":
            return self._look(index(False), instructions.look_up_floats)
        return loaded(self.memory, index(True), F32)

    def _look(self, at: Value, one: Callable[..., list[Value]]) -> Value:
        """Numbers at indices."""
        return chosen(one(self.parts, at), at, self.bits)


def chosen(found: list[Value], at: Value, bits: int) -> Value:
    """Numbers at indices of so many bits, whose highest no instruction saw: of each part, one."""
    bit = bits - (len(found).bit_length() - 1)
    while len(found) > 1:
        high = (at & (1 << bit)).compare("ne", at.function.zero(at.kind))
        found = [high.select(b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]


def loaded(memory: Value, at: Value, kind: str) -> Value:
    """Numbers of 16 or 32 bits at indices, one after the other from memory."""
    f, count, shift = memory.function, ir.lanes(at.kind), 1 if kind == I16 else 2
    total = Value(f, "poison", vec(count, kind))
    for i in range(count):
        place = at.lane(i).cast("zext", ir.I64) << shift
        one = f.load(kind, memory, place, align=1 << shift)
        total = f.emit(
            f"insertelement {total.kind} {total.text}, {kind} {one.text}, i32 {i}", total.kind
        )
    return total


def joined(parts: list[Value]) -> Value:
    """Vectors side by side in one, as many as a power of two."""
    while len(parts) > 1:
        both = range(2 * ir.lanes(parts[0].kind))
        parts = [a.shuffle(b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def short(numbers: Value) -> Value:
    """fp32 numbers that are ones of bf16, as such."""
    count = ir.lanes(numbers.kind)
    words = numbers.bits(vec(2 * count, I16))
    return words.pick(range(1, 2 * count, 2)).bits(vec(count, ir.BF16))
