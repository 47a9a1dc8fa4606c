"""Inline PTX that every family of kernels uses: instructions that CuTe DSL has no name for.

Addresses of shared memory are 32-bit ones of the CTA's own window. Loads of data that another
thread or a copy has just written are `fresh`: they stay behind the barrier that they wait for.
Loads of a table that no longer changes are free to move. The last functions are for memory that
CTAs share.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Float8E4M3FN,
    Float16,
    Float32,
    Int8,
    Int32,
    Int64,
    Uint8,
    Uint32,
)
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import CuTeDSL, T, dsl_user_op

PAIR = {"float16": "f16x2", "bfloat16": "bf16x2"}
PRODUCTS = {  # of `mma.sync`: columns of a register of its right operand, types, type of sums
    "int8": (16, "s32.u8.s8.s32", Int32),
    "float8_e4m3fn": (16, "f32.e4m3.e4m3.f32", Float32),  # from sm_89 on
    "float16": (8, "f32.f16.f16.f32", Float32),
    "bfloat16": (8, "f32.bf16.bf16.f32", Float32),
}
TYPES = {
    "uint8": Uint8,
    "int8": Int8,
    "float16": Float16,
    "bfloat16": BFloat16,
    "float8_e4m3fn": Float8E4M3FN,
}


def letter(kind: Any) -> str:
    """A register's kind in the constraints of inline PTX."""
    return "f" if kind is Float32 else "l" if kind is Int64 else "r"


@dsl_user_op
def asm(
    kind: Any,
    text: str,
    *args: Any,
    count: int = 0,
    effects: bool = True,
    memory: bool = False,
    early: bool = False,
    loc: Any = None,
) -> Any:
    """Inline PTX: its result, None, or a list of results.

    Args:
        kind: Of a result, of 32 bits; None where there is none.
        text: The assembly, whose operands are the results, and then the arguments.
        args: Numbers of the DSL.
        count: How many results a list has; 0 for one result by itself.
        effects: Without them it is free to move and to merge.
        memory: It stays where it is among accesses to memory.
        early: It writes results before it has read all arguments.
        loc: What the DSL knows of the call's place.
    """
    one, n = T.f32() if kind is Float32 else T.i32(), count or 1
    results = [("=&" if early else "=") + letter(kind)] * (n if kind else 0)
    made = llvm.inline_asm(
        one if len(results) == 1 else llvm.StructType.get_literal([one] * n) if results else None,
        [arg.ir_value(loc=loc) for arg in args],
        text,
        ",".join([*results, *(letter(type(arg)) for arg in args), *["~{memory}"] * memory]),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
    )
    if n > 1:
        return [kind(llvm.extractvalue(one, made, [i], loc=loc)) for i in range(n)]
    return [kind(made)] if count else kind and kind(made)


def slots(first: int, n: int) -> str:
    slots = ", ".join(f"${i}" for i in range(first, first + n))
    return f"{{{slots}}}" if n > 1 else slots


def width(n: int) -> str:
    return f".v{n}" if n > 1 else ""


# Registers.


def unsigned(value: int) -> Uint32:
    """A constant; Python's own would become a signed 64-bit number from 2**31 on."""
    return Uint32(value & 0xFFFFFFFF)


def prmt(word: Uint32, selector: Any, other: Any = 0) -> Uint32:
    """Bytes of `word` (0 to 3) and of `other` (4 to 7), by the selector's digits."""
    args, texts = [Uint32(word)], []
    for value in (other, selector):
        texts.append(str(value) if isinstance(value, int) else f"${len(args) + 1}")
        args += [] if isinstance(value, int) else [Uint32(value)]
    text = f"prmt.b32 $0, $1, {texts[0]}, {texts[1]};"
    return asm(Uint32, text, *args, effects=False)


def mask_flip(word: Uint32, mask: int, flip: int) -> Uint32:
    """(word & mask) ^ flip."""
    text = "lop3.b32 $0, $1, $2, $3, 0x6a;"
    return asm(Uint32, text, Uint32(word), unsigned(mask), unsigned(flip), effects=False)


def dp4a(word: Uint32, weights: Any, plus: Any, signed: bool) -> Uint32:
    """The sum of unsigned bytes times others, which may be signed, plus a number."""
    text = f"dp4a.u32.{'s' if signed else 'u'}32 $0, $1, $2, $3;"
    others = [unsigned(x) if isinstance(x, int) else Uint32(x) for x in (weights, plus)]
    return asm(Uint32, text, Uint32(word), *others, effects=False)


def mma_bytes(a: list, b: list, plus: tuple[int, int]) -> list:
    """m16n8k32: a b of unsigned and of signed bytes, plus a number to even and to odd columns."""
    text = (
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        f"{slots(0, 4)}, {slots(4, 4)}, {slots(8, 2)}, "
        f"{{{plus[0]}, {plus[1]}, {plus[0]}, {plus[1]}}};"
    )
    return asm(Uint32, text, *map(Uint32, [*a, *b]), count=4)


def lane() -> Uint32:
    """The thread's number in its warp; no assembly, so that it is read once, before loops."""
    return Uint32(cute.arch.lane_idx())


def shuffle(word: Uint32, source: Uint32) -> Uint32:
    """What lane `source` of the warp has."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return asm(Uint32, text, Uint32(word), Uint32(source))


def add_halves(word: Uint32) -> Uint32:
    """The sum of two fp16 numbers, twice: one HADD2, which reads either half for both."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; add.rn.f16 l, l, h; mov.b32 $0, {l, l}; }"
    return asm(Uint32, text, Uint32(word), effects=False)


def half_to_brain(word: Uint32) -> Uint32:
    """Two fp16 numbers as bf16."""
    text = (
        "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; "
        "cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 $0, b, a; }"
    )
    return asm(Uint32, text, Uint32(word), effects=False)


def mma(d: list, a: list, b: list, dtype: str) -> list:
    """d + a b of 16 rows and 8 columns, with one or two registers of b, which has this dtype.

    int8 meets unsigned bytes.
    """
    width, kinds, kind = PRODUCTS[dtype]
    n, k = len(a), len(b)
    right = slots(4 + n, k) if k > 1 else f"{{${4 + n}}}"
    text = (
        f"mma.sync.aligned.m16n8k{width * k}.row.col.{kinds} "
        f"{slots(0, 4)}, {slots(4, n)}, {right}, {slots(4 + n + k, 4)};"
    )
    args = map(Uint32, [*a, *b])
    return asm(kind, text, *args, *map(kind, d), count=4, effects=False)


def as_float(word: Uint32) -> Float32:
    """The fp32 number of these bits."""
    return asm(Float32, "mov.b32 $0, $1;", Uint32(word), effects=False)


def half2(name: str, dtype: str, args: tuple) -> Uint32:
    """A packed operation such as "fma.rn" on two fp16 or bf16 numbers.

    Before sm_90, bf16 has fma alone: a * b - 0 and a * 1 + b are rounded once as well, and keep the
    signs of zeros.
    """
    slots = [f"${i}" for i in range(len(args) + 1)]
    text = f"{name}.{PAIR[dtype]} {', '.join(slots)};"
    major = CuTeDSL._get_dsl().get_arch_enum().value[0]  # of what it is compiled for
    if major < 9 and dtype == "bfloat16" and name != "fma.rn":
        constant = {"mul.rn": "0x80008000", "add.rn": "0x3F803F80"}[name]  # -0, 1
        slots.insert({"mul.rn": 3, "add.rn": 2}[name], "c")
        fma = f"fma.rn.bf16x2 {', '.join(slots)};"
        text = f"{{ .reg .b32 c; mov.b32 c, {constant}; {fma} }}"
    return asm(Uint32, text, *map(Uint32, args), effects=False)


def pack2(low: Float32, high: Float32, dtype: str) -> Uint32:
    """Two fp32 numbers, rounded to fp16 or bf16, in one register."""
    text = f"cvt.rn.{PAIR[dtype]}.f32 $0, $1, $2;"
    return asm(Uint32, text, Float32(high), Float32(low), effects=False)


def halves_to_float(word: Uint32) -> list:
    """Two fp16 numbers in fp32, low first."""
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
    return asm(Float32, text, Uint32(word), count=2, effects=False)


# Shared memory.


def load_shared(
    address: Int32, n: int, offset: int = 0, fresh: bool = False, kind: Any = Uint32
) -> list:
    """n consecutive 32-bit words."""
    text = f"ld.shared{width(n)}.b32 {slots(0, n)}, [${n}+{offset}];"
    return asm(kind, text, Int32(address), count=n, effects=fresh)


def look_up(table: Int32, hashed: Uint32, place: Uint32, mask: int) -> Uint32:
    """A word of a `lang.Table`, or a half where the mask has bit 1. place: of the lane, in a row.

    By LOP3, since of two instructions ptxas adds the lane's place and the table's address first.
    """
    kind = "u16" if mask & 2 else "b32"
    text = (
        f"{{ .reg .b32 at; lop3.b32 at, $1, {mask}, $2, 0xea; add.u32 at, at, $3; "
        f"ld.shared.{kind} $0, [at]; }}"
    )
    return asm(Uint32, text, Uint32(hashed), Uint32(place), Int32(table), effects=False)


def store_shared(address: Int32, values: list) -> None:
    """1, 2 or 4 consecutive 32-bit words."""
    n = len(values)
    text = f"st.shared{width(n)}.b32 [$0], {slots(1, n)};"
    asm(None, text, Int32(address), *values)


def load_matrices(address: Int32, offset: int = 0, transposed: bool = False) -> list:
    """Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l."""
    kind = "trans.shared" if transposed else "shared"
    text = f"ldmatrix.sync.aligned.m8n8.x4.{kind}.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return asm(Uint32, text, Int32(address), count=4)


# Global memory.


def load_global(address: Int64, n: int, wanted: Any) -> list:
    """n consecutive 32-bit words; zeros unless `wanted`."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(n))
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, ${n + 1}, 0; {zeros} "
        f"@p ld.global{width(n)}.b32 {slots(0, n)}, [${n}]; }}"
    )
    return asm(Uint32, text, Int64(address), Int32(wanted), count=n, early=True)


def store_half(address: Int64, value: Float32, dtype: str) -> None:
    """Round to fp16 or bf16, and store to global memory."""
    kind = PAIR[dtype].removesuffix("x2")
    text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; st.global.b16 [$0], h; }}"
    asm(None, text, Int64(address), Float32(value))


def store_global(address: Int64, values: list) -> None:
    """1, 2 or 4 consecutive words."""
    n = len(values)
    text = f"st.global{width(n)}.b32 [$0], {slots(1, n)};"
    asm(None, text, Int64(address), *values)


def load_l2(address: Int64, n: int, kind: Any) -> list:
    """n words that other CTAs of this launch wrote."""
    text = f"ld.global.cg{width(n)}.b32 {slots(0, n)}, [${n}];"
    return asm(kind, text, Int64(address), count=n)


def count_up(address: Int64) -> Int32:
    """Adds 1; returns what was there."""
    text = "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;"
    return asm(Int32, text, Int64(address), memory=True)


def peek(address: Int64) -> Int32:
    """What other CTAs have counted so far."""
    text = "ld.relaxed.gpu.global.b32 $0, [$1];"
    return asm(Int32, text, Int64(address), memory=True)


def fence() -> None:
    """What this thread wrote is seen before what it writes from now on, by every CTA."""
    asm(None, "fence.acq_rel.gpu;", memory=True)
