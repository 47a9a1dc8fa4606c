"""A small writer of LLVM's language: Python runs once, at compile time, and emits instructions.

A Python `for` is an unrolled loop, a list of values is a set of registers, and `Function.loop` is a
loop of the machine. Values know their types, so that `(word >> 4) & 15` is three instructions
whether the word is a number or a vector.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from anybit.errors import InvalidType
from anybit.kernels.native.isa import Isa

I8, I16, I32, I64, F32, BF16, PTR = "i8", "i16", "i32", "i64", "float", "bfloat", "ptr"
ALIGNED = 64  # bytes of the stack: registers that LLVM puts there are no wider than a cache line


def vec(count: int, kind: str) -> str:
    """The type of a vector of `count` lanes."""
    return f"<{count} x {kind}>"


def lanes(kind: str) -> int:
    """Lanes of a type; 1 for a scalar."""
    found = re.match(r"<(\d+) x", kind)
    return int(found[1]) if found else 1


def suffix(kind: str) -> str:
    """What LLVM calls its intrinsics by, of fp32."""
    return f"v{lanes(kind)}f32" if lanes(kind) > 1 else "f32"


def scalar(kind: str) -> str:
    """The type of one lane."""
    return kind.split(" x ")[1][:-1] if kind.startswith("<") else kind


Operator = Callable[["Value", "Value | float"], "Value"]


def binary(whole: str, real: str = "") -> Operator:
    """An instruction of two numbers of one type, with another name where they are fractions."""

    def operator(a: "Value", other: "Value | float") -> "Value":
        b, name = a.like(other), real if scalar(a.kind) in (F32, BF16) else whole
        return a.function.emit(f"{name} {a.kind} {a.text}, {b.text}", a.kind)

    return operator


def shift(name: str) -> Callable[["Value", int], "Value"]:
    return lambda a, bits: binary(name)(a, bits) if bits else a


def order(how: str) -> Operator:
    return lambda a, other: a.compare(("o" if a.real else "s") + how, other)


class Value:
    """A register or constant of LLVM's: its text, and its type."""

    def __init__(self, function: "Function", text: str, kind: str):
        self.function, self.text, self.kind = function, text, kind

    def like(self, other: "Value | float") -> "Value":
        """A number of Python's as a constant of this type."""
        return other if isinstance(other, Value) else self.function.constant(other, self.kind)

    def __rsub__(self, other: float) -> "Value":
        return self.like(other) - self

    def __rfloordiv__(self, other: float) -> "Value":
        return self.like(other) // self

    __add__, __sub__ = binary("add", "fadd"), binary("sub", "fsub")
    __mul__, __floordiv__ = binary("mul", "fmul"), binary("udiv", "fdiv")
    __mod__ = binary("urem", "frem")
    __and__, __or__, __xor__ = binary("and"), binary("or"), binary("xor")
    __rshift__, __lshift__ = shift("lshr"), shift("shl")
    # Of numbers with a sign; `compare` knows others. The result is i1 or a vector of them.
    __lt__, __le__, __gt__, __ge__ = (order(how) for how in ("lt", "le", "gt", "ge"))

    @property
    def real(self) -> bool:
        """Whether it is fp32."""
        return scalar(self.kind) == F32

    def compare(self, how: str, other: "Value | float") -> "Value":
        """icmp, or fcmp for numbers with a fraction."""
        b, word = self.like(other), "fcmp" if self.real else "icmp"
        truth = vec(lanes(self.kind), "i1") if self.kind.startswith("<") else "i1"
        return self.function.emit(f"{word} {how} {self.kind} {self.text}, {b.text}", truth)

    def select(self, a: "Value", other: "Value | float") -> "Value":
        """One or the other, by this truth."""
        b = a.like(other)
        return self.function.emit(
            f"select {self.kind} {self.text}, {a.kind} {a.text}, {b.kind} {b.text}", a.kind
        )

    def smaller(self, other: "Value") -> "Value":
        """The smaller of two unsigned numbers."""
        return self.compare("ult", other).select(self, other)

    def cast(self, how: str, kind: str) -> "Value":
        """zext, sext, trunc, bitcast, sitofp, uitofp, fpext, fptrunc, inttoptr."""
        if self.kind == kind:
            return self
        return self.function.emit(f"{how} {self.kind} {self.text} to {kind}", kind)

    def bits(self, kind: str) -> "Value":
        """The same bits as another type."""
        return self.cast("bitcast", kind)

    def splat(self, count: int) -> "Value":
        """A scalar in every lane."""
        kind = vec(count, self.kind)
        text = f"insertelement {kind} poison, {self.kind} {self.text}, i32 0"
        return self.function.emit(text, kind).pick([0] * count)

    def lane(self, index: int) -> "Value":
        one = scalar(self.kind)
        return self.function.emit(f"extractelement {self.kind} {self.text}, i32 {index}", one)

    def shuffle(self, other: "Value", indices: Sequence[int]) -> "Value":
        """Lanes of this, counted from 0, and of another behind them."""
        mask = ", ".join(f"i32 {i}" for i in indices)
        both = f"{self.kind} {self.text}, {other.kind} {other.text}"
        kind = vec(len(indices), scalar(self.kind))
        return self.function.emit(f"shufflevector {both}, <{len(indices)} x i32> <{mask}>", kind)

    def pick(self, indices: Sequence[int]) -> "Value":
        """Some lanes."""
        return self.shuffle(self, indices)

    def call(self, name: str, *others: "Value") -> "Value":
        """An intrinsic of LLVM's, of this and others, whose result has this type."""
        return self.function.call(self.kind, name, self, *others)

    def fma(self, b: "Value", c: "Value") -> "Value":
        """This * b + c, rounded once."""
        return self.call(f"llvm.fma.{suffix(self.kind)}", b, c)

    def sum(self) -> "Value":
        """All lanes added up."""
        value = self
        while (count := lanes(value.kind)) > 1:
            value = value.pick(range(count // 2)) + value.pick(range(count // 2, count))
        return value.lane(0)


class Variable:
    """A value that changes in loops. LLVM turns it into a register."""

    def __init__(self, function: "Function", start: Value):
        self.function, self.kind = function, start.kind
        self.place = function.allocate(start.kind)
        self.set(start)

    def get(self) -> Value:
        return self.function.load(self.kind, self.place, align=0)

    def set(self, value: Value) -> None:
        self.function.store(value, self.place, align=0)


class Function:
    """One function under construction. All arguments are pointers or 64-bit integers."""

    def __init__(self, name: str, names: Sequence[str], isa: Isa, kinds: Sequence[str] = (PTR,)):
        """isa: what the processor can do."""
        self.name, self.names, self.isa = name, names, isa
        self.count = 0
        self.head: list[str] = []  # allocations, which belong into the first block
        self.lines: list[str] = []
        self.declared: set[str] = set()
        self.arguments = [Value(self, f"%a{i}", kind) for i, kind in enumerate(kinds)]

    def text(self) -> str:
        """The finished function, as a module."""
        listed = ", ".join(f"{a.kind} {a.text}" for a in self.arguments)
        body = "\n  ".join([*self.head, "br label %start"])
        rest = "\n  ".join(self.lines)
        return "\n".join(
            [
                *sorted(self.declared),
                f"define void @{self.name}({listed}) nounwind alignstack({ALIGNED}) {{",
                f"entry:\n  {body}\nstart:\n  {rest}\n  ret void\n}}\n",
            ]
        )

    # Its first argument.

    def address(self, name: str) -> Value:
        """Where a number of that block lies."""
        return self.at(self.arguments[0], 8 * self.names.index(name))

    def number(self, name: str) -> Value:
        return self.load(I64, self.address(name), align=8)

    def pointer(self, name: str) -> Value:
        return self.load(PTR, self.address(name), align=8)

    def listed(self, name: str, at: Value) -> Value:
        """A number of 32 bits of those that a pointer is of, in 64."""
        return self.load(I32, name, at << 2).cast("sext", I64)

    # Instructions.

    def _name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def emit(self, text: str, kind: str) -> Value:
        """An instruction that has a result."""
        name = self._name()
        self.lines.append(f"{name} = {text}")
        return Value(self, name, kind)

    def constant(self, number: float, kind: str) -> Value:
        """A number, in every lane."""
        if kind == PTR:
            raise InvalidType("a pointer has no constants")
        one = scalar(kind)
        if one == F32:
            single = struct.unpack("f", struct.pack("f", number))[0]
            text = f"0x{struct.unpack('Q', struct.pack('d', single))[0]:016X}"
        else:
            text = str(int(number))
        if kind != one:
            text = f"<{', '.join([f'{one} {text}'] * lanes(kind))}>"
        return Value(self, text, kind)

    def integer(self, number: int) -> Value:
        return self.constant(number, I64)

    def zero(self, kind: str) -> Value:
        return Value(self, "zeroinitializer" if kind.startswith("<") else "0", kind)

    def allocate(self, kind: str, count: int = 1, align: int = 64) -> Value:
        """Room for `count` values on the stack."""
        name = self._name()
        self.head.append(f"{name} = alloca {kind}, i64 {count}, align {align}")
        return Value(self, name, PTR)

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    def at(self, pointer: Value | str, offset: Value | int) -> Value:
        """The address `offset` bytes after a pointer, or the one of this name."""
        if isinstance(pointer, str):
            pointer = self.pointer(pointer)
        if isinstance(offset, int):
            if not offset:
                return pointer
            offset = self.integer(offset)
        return self.emit(f"getelementptr i8, ptr {pointer.text}, i64 {offset.text}", PTR)

    def load(
        self, kind: str, pointer: Value | str, offset: Value | int = 0, align: int = 1
    ) -> Value:
        tail = f", align {align}" if align else ""
        return self.emit(f"load {kind}, ptr {self.at(pointer, offset).text}{tail}", kind)

    def store(
        self, value: Value, pointer: Value | str, offset: Value | int = 0, align: int = 1
    ) -> None:
        place = self.at(pointer, offset)
        tail = f", align {align}" if align else ""
        self.lines.append(f"store {value.kind} {value.text}, ptr {place.text}{tail}")

    def take(self, pointer: Value, count: int) -> Value:
        """Add `count` to a 64-bit number that threads share; its value before."""
        return self.emit(f"atomicrmw add ptr {pointer.text}, i64 {count} monotonic", I64)

    def call(self, kind: str, name: str, *arguments: Value) -> Value:
        """An intrinsic of LLVM's."""
        listed = ", ".join(f"{a.kind} {a.text}" for a in arguments)
        kinds = ", ".join(a.kind for a in arguments)
        self.declared.add(f"declare {kind} @{name}({kinds})")
        return self.emit(f"call {kind} @{name}({listed})", kind)

    def run(self, target: Value, *arguments: Value) -> None:
        """Call a function without a result by its address."""
        listed = ", ".join(f"{a.kind} {a.text}" for a in arguments)
        self.lines.append(f"call void {target.text}({listed})")

    def prefetch(self, pointer: Value, offset: Value | int, locality: int = 3) -> None:
        place = self.at(pointer, offset)
        self.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.lines.append(
            f"call void @llvm.prefetch.p0(ptr {place.text}, i32 0, i32 {locality}, i32 1)"
        )

    # Control.

    def _label(self) -> str:
        self.count += 1
        return f"b{self.count}"

    def _block(self, label: str) -> None:
        self.lines.append(f"br label %{label}\n{label}:")

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)` at run time, of 64-bit integers."""
        first = start if isinstance(start, Value) else self.integer(start)
        last = stop if isinstance(stop, Value) else self.integer(stop)
        at = self.variable(first)
        test, body, done = self._label(), self._label(), self._label()
        self._block(test)
        i = at.get()
        more = i < last
        self.lines.append(f"br i1 {more.text}, label %{body}, label %{done}\n{body}:")
        yield i
        at.set(i + step)
        self.lines.append(f"br label %{test}\n{done}:")

    @contextmanager
    def when(self, truth: Value) -> Iterator[None]:
        """Run the body where a condition holds."""
        body, done = self._label(), self._label()
        self.lines.append(f"br i1 {truth.text}, label %{body}, label %{done}\n{body}:")
        yield
        self.lines.append(f"br label %{done}\n{done}:")

    @contextmanager
    def chunks(self, size: Value | int, total: Value) -> Iterator[tuple[Value, Value]]:
        """Parts [from, to) of range(total) that this thread takes, until none are left.

        `next` among the names is a number that all threads share; it counts parts from zero.
        """
        test, body, done = self._label(), self._label(), self._label()
        self._block(test)
        start = self.take(self.address("next"), 1) * size
        more = start < total
        self.lines.append(f"br i1 {more.text}, label %{body}, label %{done}\n{body}:")
        yield start, (start + size).smaller(total)
        self.lines.append(f"br label %{test}\n{done}:")


def rounded(value: Value, dtype: str) -> Value:
    """fp32 as another type, rounded to the nearest even, on any processor."""
    if dtype == F32:
        return value
    count = lanes(value.kind)

    def kind(one: str) -> str:
        return vec(count, one) if count > 1 else one

    if dtype != BF16:
        return value.cast("fptrunc", kind(dtype))
    bits = value.bits(kind(I32))
    up = bits + ((bits >> 16) & 1) + 0x7FFF
    nan = value.function.constant(0x7FC00000, bits.kind)
    return (value.compare("uno", value).select(nan, up) >> 16).cast("trunc", kind(I16))
