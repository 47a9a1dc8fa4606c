"""What each family of processors calls the same operation: products that are added up, look-ups."""

from collections.abc import Sequence

from anybit.kernels.native import ir
from anybit.kernels.native.ir import I8, I16, I32, Value, vec

X86_PAIRS = {256: "llvm.x86.avx2.pmadd.wd", 512: "llvm.x86.avx512.pmaddw.d.512"}
X86_BYTES = {256: "llvm.x86.avx2.pshuf.b", 512: "llvm.x86.avx512.pshuf.b.512"}


def dot_bf16(total: Value, a: Value, b: Value) -> Value:
    """total + products of bf16: lane i gets those of numbers 2 i and 2 i + 1."""
    isa = total.function.isa
    name = f"llvm.x86.avx512bf16.dpbf16ps.{isa.bits}"
    return total.call("llvm.aarch64.neon.bfdot.v4f32.v8bf16" if isa.arm else name, a, b)


def dot_words(total: Value, a: Value, b: Value) -> Value:
    """total + products of 16-bit integers: lane i gets those of numbers 2 i and 2 i + 1."""
    isa, kind = total.function.isa, total.kind
    if isa.byte_operand == "u8":
        name = f"llvm.x86.avx512.vpdpwssd.{isa.bits}"
        return total.call(name, a.bits(kind), b.bits(kind))
    if not isa.arm:
        return total + total.function.call(kind, X86_PAIRS[isa.bits], a, b)
    low, high = (_long_product(a, b, vec(4, I32), half) for half in (0, 4))
    return total + low.call("llvm.aarch64.neon.addp.v4i32", high)


def dot_bytes(total: Value, a: Value, b: Value) -> Value:
    """total + products of bytes, any four in a lane; a is unsigned on x86, all else is signed."""
    isa, kind = total.function.isa, total.kind
    if not isa.arm:
        name = f"llvm.x86.avx512.vpdpbusd.{isa.bits}"
        return total.call(name, a.bits(kind), b.bits(kind))
    if "dotprod" in isa.features:
        return total.call("llvm.aarch64.neon.sdot.v4i32.v16i8", a, b)
    for half in (0, 8):
        products = _long_product(a, b, vec(8, I16), half)
        total = total + total.function.call(kind, "llvm.aarch64.neon.saddlp.v4i32.v8i16", products)
    return total


def _long_product(a: Value, b: Value, kind: str, first: int) -> Value:
    """Signed products in twice the bits, of as many numbers from the first on as `kind` holds."""
    some = range(first, first + ir.lanes(kind))
    name = f"llvm.aarch64.neon.smull.v{ir.lanes(kind)}{ir.scalar(kind)}"
    return a.function.call(kind, name, *(part.pick(some) for part in (a, b)))


def look_up(parts: Sequence[Value], code: Value, bits: int) -> Value:
    """Bytes of a table at codes of `bits` bits.

    Args:
        parts: the table in registers: 16 bytes each, the same in every 128 bits of a register. As
            many as a power of two; bits of a code beyond them are looked at nowhere.
        code: a vector of bytes that are the codes.
        bits: of a code.
    """
    isa, size = code.function.isa, 16 * len(parts)
    if not isa.arm:
        at = code & 15 if bits == 8 else code  # the instruction gives 0 where bit 7 is set
        found = [part.call(X86_BYTES[isa.bits], at) for part in parts]
        bit = 4
        while len(found) > 1:
            upper = highest(code, bit) < code.function.zero(code.kind)
            found = [upper.select(b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
            bit += 1
        return found[0]
    at = code & (size - 1) if size < 1 << bits else code
    count = min(4, len(parts))
    total = parts[0].call(f"llvm.aarch64.neon.tbl{count}.v16i8", *parts[1:count], at)
    for first in range(4, len(parts), 4):  # which keeps what lies elsewhere
        at = at - 64
        total = total.call("llvm.aarch64.neon.tbx4.v16i8", *parts[first : first + 4], at)
    return total


def look_up_words(parts: Sequence[Value], at: Value) -> list[Value]:
    """Words of a table at indices, from each register or pair of registers that hold it: of x86."""
    if len(parts) == 1:
        return [parts[0].call("llvm.x86.avx512.permvar.hi.512", at)]
    return _from_pairs("llvm.x86.avx512.vpermi2var.hi.512", parts, at)


def look_up_floats(parts: Sequence[Value], at: Value) -> list[Value]:
    """fp32 of a table at indices, from each register or pair of registers that hold it: of x86."""
    if ir.lanes(parts[0].kind) == 8:
        return [part.call("llvm.x86.avx2.permps", at) for part in parts]
    if len(parts) == 1:
        return [parts[0].call("llvm.x86.avx512.permvar.sf.512", at)]
    return _from_pairs("llvm.x86.avx512.vpermi2var.ps.512", parts, at)


def _from_pairs(name: str, parts: Sequence[Value], at: Value) -> list[Value]:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [a.call(name, at, b) for a, b in pairs]


def highest(code: Value, bit: int) -> Value:
    """This bit of bytes as their highest; below it is anything."""
    if code.function.isa.arm:
        return code << (7 - bit)
    return (code.bits(vec(ir.lanes(code.kind) // 2, I16)) << (7 - bit)).bits(code.kind)


def crossed(low: Value, high: Value) -> tuple[Value, Value]:
    """Numbers of twice the bits: their lower and upper halves in even lanes, and those in odd."""
    count = ir.lanes(low.kind)
    wide = vec(count // 2, {I8: I16, I16: I32}[ir.scalar(low.kind)])
    even, odd = (
        low.shuffle(high, [side + i for i in range(first, count, 2) for side in (0, count)])
        for first in (0, 1)
    )
    return even.bits(wide), odd.bits(wide)
