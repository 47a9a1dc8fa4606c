"""Integers, bits, predicates and moves."""

from collections.abc import Callable
from functools import cache

import numpy as np

from tests.ptx.parse import Instruction, PtxError, names
from tests.ptx.state import LANES, WARP, Handler, Lanes, State, Warp, Words

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32}
DIGITS = np.arange(0, 16, 4, dtype=np.uint64)
MASK = {bits: np.uint64((1 << bits) - 1) for bits in (8, 16, 32, 64)}


def signed(x: Words, bits: int) -> np.ndarray:
    """The low bits as int64."""
    return x.view(np.int64) if bits == 64 else x.astype(SIGNED[bits]).astype(np.int64)


def operands(s: State, w: Warp, i: Instruction) -> tuple[list[np.ndarray], int]:
    """Sources of an instruction whose name ends in its type, and the type's bits.

    Signed ones are int64, unsigned ones and bits uint64.
    """
    _, is_signed, bits = parts(i.op)
    values = [s.read(w, name) for name in i.args[1:]]
    if is_signed:
        return [signed(value, bits) for value in values], bits
    return [value & MASK[bits] for value in values], bits


@cache
def parts(op: str) -> tuple[str, bool, int]:
    """Of "mul.wide.s32": ("mul.wide", signed, 32)."""
    name, kind = op.rsplit(".", 1)
    return name, kind[0] == "s", 32 if kind == "pred" else int(kind[1:])


def low(x: np.ndarray, bits: int) -> Words:
    return x.view(np.uint64) & MASK[bits]


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    size = np.abs(a).view(np.uint64) // np.abs(b).view(np.uint64)  # of -2**63, too
    return np.where((a < 0) ^ (b < 0), -size, size).astype(a.dtype)


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "not": np.invert,
    "mul.lo": np.multiply,
    "mul.wide": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
}


def arithmetic(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    name = parts(i.op)[0]
    values, bits = operands(s, w, i)
    if name in ("div", "rem"):
        values[1] = np.where(active, values[1], 1)
        if (values[1] == 0).any():
            raise PtxError("division by zero")
    r = ARITHMETIC[name](*values)
    s.write(w, i.args[0], low(r, 2 * bits if name == "mul.wide" else bits), active)


def logic(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Of predicates."""
    a = [s.read(w, name) != 0 for name in i.args[1:]]
    name = i.op.split(".")[0]
    s.write(w, i.args[0], ~a[0] if name == "not" else ARITHMETIC[name](*a), active)


def shift(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """By up to the type's bits; further is as far."""
    name, is_signed, bits = parts(i.op)
    n = np.minimum(s.read(w, i.args[2]) & MASK[32], np.uint64(bits))
    value = s.read(w, i.args[1]) & MASK[bits]
    if is_signed:
        r = signed(value, bits) >> np.minimum(n, np.uint64(bits - 1)).astype(np.int64)
    else:
        inside = np.minimum(n, np.uint64(bits - 1))
        r = value << inside if name == "shl" else value >> inside
        r = np.where(n == bits, np.uint64(0), r)
    s.write(w, i.args[0], low(r, bits), active)


def high_product(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    (a, b), bits = operands(s, w, i)
    s.write(w, i.args[0], low(a * b >> a.dtype.type(bits), bits), active)


def funnel(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    (bottom, top, n), _ = operands(s, w, i)
    wide = (top << np.uint64(32) | bottom) << (n & np.uint64(31))
    s.write(w, i.args[0], wide >> np.uint64(32), active)


def permute(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    (a, b, selector), _ = operands(s, w, i)
    both = (b << np.uint64(32) | a).view(np.uint8).reshape(WARP, 8)
    digits = (selector[:, None] >> DIGITS).astype(np.int64)
    byte = both[LANES[:, None], digits & 7]
    sign = (byte >> 7) * np.uint8(255)
    r = np.where(digits & 8, sign, byte).view(np.uint32)[:, 0]
    s.write(w, i.args[0], r, active)


def look_up(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Bits of three words by a table of eight entries."""
    a, b, c = (s.read(w, name) & MASK[32] for name in i.args[1:4])
    table, r = int(i.args[4], 0), np.zeros(WARP, np.uint64)
    for entry in range(8):
        if table >> entry & 1:
            parts = [x if entry >> at & 1 else ~x for x, at in ((a, 2), (b, 1), (c, 0))]
            r |= parts[0] & parts[1] & parts[2]
    s.write(w, i.args[0], r & MASK[32], active)


def dot4(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Four unsigned bytes times four of either kind, plus a number."""
    a, b, c = (s.read(w, name) for name in i.args[1:])
    total = signed(c, 32).copy()
    for at in (0, 8, 16, 24):
        byte = (a >> np.uint64(at) & MASK[8]).astype(np.int64)
        other = b >> np.uint64(at)
        total += byte * (signed(other, 8) if i.op.endswith("s32") else signed(other & MASK[8], 64))
    s.write(w, i.args[0], low(total, 32), active)


def count_bits(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    counts = [int(value).bit_count() for value in s.read(w, i.args[1]) & MASK[32]]
    s.write(w, i.args[0], np.array(counts, dtype=np.uint64), active)


def select(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    a, b, p = (s.read(w, name) for name in i.args[1:])
    s.write(w, i.args[0], np.where(p != 0, a, b), active)


COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    (a, b), _ = operands(s, w, i)
    s.write(w, i.args[0], COMPARE[i.op.split(".")[1]](a, b), active)


def move(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """A register, or a pair of halves from or to one."""
    to, source = i.args
    bits = 16 if i.op.endswith("32") else 32  # of each part of a pair
    if source.startswith("{"):
        bottom, top = (s.read(w, name) & MASK[bits] for name in names(source))
        s.write(w, to, top << np.uint64(bits) | bottom, active)
    elif to.startswith("{"):
        value = s.read(w, source)
        bottom_name, top_name = names(to)
        s.write(w, bottom_name, value & MASK[bits], active)
        s.write(w, top_name, value >> np.uint64(bits) & MASK[bits], active)
    else:
        value = s.read(w, source)
        s.write(w, to, value & MASK[32] if i.op.endswith("32") else value, active)


def convert(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Cut off to the result's bits; signed results fill their register with the sign."""
    _, to, source = i.op.split(".")
    bits = int(to[1:])
    value = s.read(w, i.args[1]) & MASK[int(source[1:])]
    if source[0] == "s":
        value = signed(value, int(source[1:])).astype(np.uint64)
    value = value & MASK[bits]
    if to[0] == "s":
        value = low(signed(value, bits), max(bits, 32))
    s.write(w, i.args[0], value, active)


HANDLERS: dict[str, Handler] = {
    r"(add|sub|mul\.lo|mad\.lo|min|max|div|rem)\.[su](16|32|64)": arithmetic,
    r"neg\.s(16|32|64)": arithmetic,
    r"(and|or|xor|not)\.b(16|32|64)": arithmetic,
    r"mul\.wide\.[su](16|32)": arithmetic,
    r"min\.relu\.s32": arithmetic,
    r"(and|or|xor|not)\.pred": logic,
    r"(shl\.b|shr\.[bsu])(16|32|64)": shift,
    r"mul\.hi\.[su](16|32)": high_product,
    r"shf\.l\.wrap\.b32": funnel,
    r"prmt\.b32": permute,
    r"lop3\.b32": look_up,
    r"popc\.b32": count_bits,
    r"dp4a\.u32\.[us]32": dot4,
    r"selp\.[bsuf](16|32|64)": select,
    r"setp\.(eq|ne|lt|le|gt|ge)\.[sub](16|32|64)": compare,
    r"mov\.([bsuf](16|32|64)|pred)|cvta\..*": move,
    r"cvt\.[su](8|16|32|64)\.[su](8|16|32|64)": convert,
}
