"""What each family of processors calls the same operation: products that are added up, look-ups."""

from collections.abc import Sequence

from anybit.kernels.native import ir
from anybit.kernels.native.ir import I8, I16, I32, Function, Value, vec
from anybit.kernels.native.isa import Isa

X86_PAIRS = {256: "llvm.x86.avx2.pmadd.wd", 512: "llvm.x86.avx512.pmaddw.d.512"}
X86_BYTES = {256: "llvm.x86.avx2.pshuf.b", 512: "llvm.x86.avx512.pshuf.b.512"}


def dot_bf16(f: Function, isa: Isa, total: Value, a: Value, b: Value) -> Value:
    """total + products of bf16: lane i gets those of numbers 2 i and 2 i + 1."""
    name = f"llvm.x86.avx512bf16.dpbf16ps.{isa.bits}"
    if isa.arm:
        name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
    return f.call(total.kind, name, total, a, b)


def dot_words(f: Function, isa: Isa, total: Value, a: Value, b: Value) -> Value:
    """total + products of 16-bit integers: lane i gets those of numbers 2 i and 2 i + 1."""
    if isa.byte_operand == "u8":
        name = f"llvm.x86.avx512.vpdpwssd.{isa.bits}"
        return f.call(total.kind, name, total, f.bits(a, total.kind), f.bits(b, total.kind))
    if not isa.arm:
        return total + f.call(total.kind, X86_PAIRS[isa.bits], a, b)
    low, high = (_long_product(f, a, b, vec(4, I32), half) for half in (0, 4))
    return total + f.call(total.kind, "llvm.aarch64.neon.addp.v4i32", low, high)


def dot_bytes(f: Function, isa: Isa, total: Value, a: Value, b: Value) -> Value:
    """total + products of bytes, any four in a lane; a is unsigned on x86, all else is signed."""
    if not isa.arm:
        name = f"llvm.x86.avx512.vpdpbusd.{isa.bits}"
        return f.call(total.kind, name, total, f.bits(a, total.kind), f.bits(b, total.kind))
    if "dotprod" in isa.features:
        return f.call(total.kind, "llvm.aarch64.neon.sdot.v4i32.v16i8", total, a, b)
    for half in (0, 8):
        products = _long_product(f, a, b, vec(8, I16), half)
        total = total + f.call(total.kind, "llvm.aarch64.neon.saddlp.v4i32.v8i16", products)
    return total


def _long_product(f: Function, a: Value, b: Value, kind: str, first: int) -> Value:
    """Signed products in twice the bits, of as many numbers from the first on as `kind` holds."""
    some = range(first, first + ir.lanes(kind))
    name = f"llvm.aarch64.neon.smull.v{ir.lanes(kind)}{ir.scalar(kind)}"
    return f.call(kind, name, *(f.shuffle(part, part, some) for part in (a, b)))


def look_up(f: Function, isa: Isa, parts: Sequence[Value], code: Value, bits: int) -> Value:
    """Bytes of a table at codes of `bits` bits.

    Args:
        f: what is compiled.
        isa: what the processor can do.
        parts: the table in registers: 16 bytes each, the same in every 128 bits of a register. As
            many as a power of two; bits of a code beyond them are looked at nowhere.
        code: a vector of bytes that are the codes.
        bits: of a code.
    """
    kind, size = code.kind, 16 * len(parts)
    if not isa.arm:
        at = code & 15 if bits == 8 else code  # the instruction gives 0 where bit 7 is set
        found = [f.call(kind, X86_BYTES[isa.bits], part, at) for part in parts]
        bit = 4
        while len(found) > 1:
            upper = f.compare("slt", highest(f, isa, code, bit), f.zero(kind))
            found = [f.select(upper, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
            bit += 1
        return found[0]
    at = code & (size - 1) if size < 1 << bits else code
    count = min(4, len(parts))
    total = f.call(kind, f"llvm.aarch64.neon.tbl{count}.v16i8", *parts[:count], at)
    for first in range(4, len(parts), 4):  # which keeps what lies elsewhere
        at = at - 64
        total = f.call(kind, "llvm.aarch64.neon.tbx4.v16i8", total, *parts[first : first + 4], at)
    return total


def look_up_words(f: Function, parts: Sequence[Value], at: Value) -> list[Value]:
    """Words of a table at indices, from each register or pair of registers that hold it: of x86."""
    if len(parts) == 1:
        return [f.call(at.kind, "llvm.x86.avx512.permvar.hi.512", parts[0], at)]
    return _from_pairs(f, "llvm.x86.avx512.vpermi2var.hi.512", parts, at)


def look_up_floats(f: Function, parts: Sequence[Value], at: Value) -> list[Value]:
    """fp32 of a table at indices, from each register or pair of registers that hold it: of x86."""
    kind = parts[0].kind
    if ir.lanes(kind) == 8:
        return [f.call(kind, "llvm.x86.avx2.permps", part, at) for part in parts]
    if len(parts) == 1:
        return [f.call(kind, "llvm.x86.avx512.permvar.sf.512", parts[0], at)]
    return _from_pairs(f, "llvm.x86.avx512.vpermi2var.ps.512", parts, at)


def _from_pairs(f: Function, name: str, parts: Sequence[Value], at: Value) -> list[Value]:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [f.call(a.kind, name, a, at, b) for a, b in pairs]


def highest(f: Function, isa: Isa, code: Value, bit: int) -> Value:
    """This bit of bytes as their highest; below it is anything."""
    if isa.arm:
        return code << (7 - bit)
    return f.bits(f.bits(code, vec(ir.lanes(code.kind) // 2, I16)) << (7 - bit), code.kind)


def crossed(f: Function, low: Value, high: Value) -> tuple[Value, Value]:
    """Numbers of twice the bits: their lower and upper halves in even lanes, and those in odd."""
    count = ir.lanes(low.kind)
    wide = vec(count // 2, {I8: I16, I16: I32}[ir.scalar(low.kind)])
    even, odd = (
        f.shuffle(low, high, [side + i for i in range(first, count, 2) for side in (0, count)])
        for first in (0, 1)
    )
    return f.bits(even, wide), f.bits(odd, wide)
