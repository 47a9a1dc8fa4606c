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


def asm(result: Any, args: list, text: str, constraints: str, effects: bool, at: dict) -> Any:
    operands = [arg.ir_value(**at) for arg in args]
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=effects,  # without: free to move and to merge
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )


def several(n: int, kind: Any, args: list, text: str, constraints: str, effects: bool, at: dict):
    """Inline PTX with n results of one kind (`Uint32` or `Float32`)."""
    type_of, letter = (T.f32, "=f") if kind is Float32 else (T.i32, "=r")
    every = ",".join([letter] * n + ([constraints] if constraints else []))
    if n == 1:
        return [kind(asm(type_of(), args, text, every, effects, at))]
    struct = llvm.StructType.get_literal([type_of() for _ in range(n)])
    result = asm(struct, args, text, every, effects, at)
    return [kind(llvm.extractvalue(type_of(), result, [i], **at)) for i in range(n)]


def slots(first: int, n: int) -> str:
    slots = ", ".join(f"${i}" for i in range(first, first + n))
    return f"{{{slots}}}" if n > 1 else slots


def width(n: int) -> str:
    return f".v{n}" if n > 1 else ""


# Registers.


def unsigned(value: int) -> Uint32:
    """A constant; Python's own would become a signed 64-bit number from 2**31 on."""
    return Uint32(value & 0xFFFFFFFF)


@dsl_user_op
def prmt(word: Uint32, selector: Any, other: Any = 0, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bytes of `word` (0 to 3) and of `other` (4 to 7), by the selector's digits."""
    args, texts = [Uint32(word)], []
    for value in (other, selector):
        texts.append(str(value) if isinstance(value, int) else f"${len(args) + 1}")
        args += [] if isinstance(value, int) else [Uint32(value)]
    text = f"prmt.b32 $0, $1, {texts[0]}, {texts[1]};"
    constraints = ",".join(["=r"] + ["r"] * len(args))
    return Uint32(asm(T.i32(), args, text, constraints, False, {"loc": loc, "ip": ip}))


@dsl_user_op
def mask_flip(word: Uint32, mask: int, flip: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """(word & mask) ^ flip."""
    text = "lop3.b32 $0, $1, $2, $3, 0x6a;"
    args = [Uint32(word), unsigned(mask), unsigned(flip)]
    return Uint32(asm(T.i32(), args, text, "=r,r,r,r", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def dp4a(
    word: Uint32, weights: Any, plus: Any, signed: bool, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """The sum of unsigned bytes times others, which may be signed, plus a number."""
    text = f"dp4a.u32.{'s' if signed else 'u'}32 $0, $1, $2, $3;"
    others = [unsigned(x) if isinstance(x, int) else Uint32(x) for x in (weights, plus)]
    args = [Uint32(word), *others]
    return Uint32(asm(T.i32(), args, text, "=r,r,r,r", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def mma_bytes(a: list, b: list, plus: tuple[int, int], *, loc: Any = None, ip: Any = None) -> list:
    """m16n8k32: a b of unsigned and of signed bytes, plus a number to even and to odd columns."""
    text = (
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        f"{slots(0, 4)}, {slots(4, 4)}, {slots(8, 2)}, "
        f"{{{plus[0]}, {plus[1]}, {plus[0]}, {plus[1]}}};"
    )
    args = [Uint32(word) for word in [*a, *b]]
    return several(4, Uint32, args, text, ",".join(["r"] * 6), True, {"loc": loc, "ip": ip})


def lane() -> Uint32:
    """The thread's number in its warp; no assembly, so that it is read once, before loops."""
    return Uint32(cute.arch.lane_idx())


@dsl_user_op
def shuffle(word: Uint32, source: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """What lane `source` of the warp has."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    args = [Uint32(word), Uint32(source)]
    return Uint32(asm(T.i32(), args, text, "=r,r,r", True, {"loc": loc, "ip": ip}))


@dsl_user_op
def add_halves(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The sum of two fp16 numbers, twice: one HADD2, which reads either half for both."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; add.rn.f16 l, l, h; mov.b32 $0, {l, l}; }"
    return Uint32(asm(T.i32(), [Uint32(word)], text, "=r,r", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def half_to_brain(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp16 numbers as bf16."""
    text = (
        "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; "
        "cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 $0, b, a; }"
    )
    return Uint32(asm(T.i32(), [Uint32(word)], text, "=r,r", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def mma(d: list, a: list, b: list, dtype: str, *, loc: Any = None, ip: Any = None) -> list:
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
    args = [*(Uint32(r) for r in [*a, *b]), *(kind(r) for r in d)]
    constraints = ",".join(["r"] * (n + k) + ["f" if kind is Float32 else "r"] * 4)
    return several(4, kind, args, text, constraints, False, {"loc": loc, "ip": ip})


@dsl_user_op
def as_float(word: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The fp32 number of these bits."""
    at = {"loc": loc, "ip": ip}
    return Float32(asm(T.f32(), [Uint32(word)], "mov.b32 $0, $1;", "=f,r", False, at))


@dsl_user_op
def half2(name: str, dtype: str, args: tuple, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A packed operation such as "fma.rn" on two fp16 or bf16 numbers.

    Before sm_90, bf16 has fma alone: a * b - 0 and a * 1 + b are rounded once as well, and keep the
    signs of zeros.
    """
    at = {"loc": loc, "ip": ip}
    slots = [f"${i}" for i in range(len(args) + 1)]
    text = f"{name}.{PAIR[dtype]} {', '.join(slots)};"
    major = CuTeDSL._get_dsl().get_arch_enum().value[0]  # of what it is compiled for
    if major < 9 and dtype == "bfloat16" and name != "fma.rn":
        constant = {"mul.rn": "0x80008000", "add.rn": "0x3F803F80"}[name]  # -0, 1
        slots.insert({"mul.rn": 3, "add.rn": 2}[name], "c")
        fma = f"fma.rn.bf16x2 {', '.join(slots)};"
        text = f"{{ .reg .b32 c; mov.b32 c, {constant}; {fma} }}"
    constraints = ",".join(["=r", *["r"] * len(args)])
    return Uint32(asm(T.i32(), [Uint32(a) for a in args], text, constraints, False, at))


@dsl_user_op
def pack2(low: Float32, high: Float32, dtype: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp32 numbers, rounded to fp16 or bf16, in one register."""
    at = {"loc": loc, "ip": ip}
    text = f"cvt.rn.{PAIR[dtype]}.f32 $0, $1, $2;"
    return Uint32(asm(T.i32(), [Float32(high), Float32(low)], text, "=r,f,f", False, at))


@dsl_user_op
def halves_to_float(word: Uint32, *, loc: Any = None, ip: Any = None) -> list:
    """Two fp16 numbers in fp32, low first."""
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
    return several(2, Float32, [Uint32(word)], text, "r", False, {"loc": loc, "ip": ip})


# Shared memory.


@dsl_user_op
def load_shared(
    address: Int32,
    n: int,
    offset: int = 0,
    fresh: bool = False,
    kind: Any = Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> list:
    """n consecutive 32-bit words."""
    text = f"ld.shared{width(n)}.b32 {slots(0, n)}, [${n}+{offset}];"
    return several(n, kind, [Int32(address)], text, "r", fresh, {"loc": loc, "ip": ip})


@dsl_user_op
def look_up(
    table: Int32, hashed: Uint32, place: Uint32, mask: int, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """A word of a `lang.Table`, or a half where the mask has bit 1. place: of the lane, in a row.

    By LOP3, since of two instructions ptxas adds the lane's place and the table's address first.
    """
    kind = "u16" if mask & 2 else "b32"
    text = (
        f"{{ .reg .b32 at; lop3.b32 at, $1, {mask}, $2, 0xea; add.u32 at, at, $3; "
        f"ld.shared.{kind} $0, [at]; }}"
    )
    args = [Uint32(hashed), Uint32(place), Int32(table)]
    return Uint32(asm(T.i32(), args, text, "=r,r,r,r", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def store_shared(address: Int32, values: list, *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 consecutive 32-bit words."""
    n = len(values)
    kind = "f" if isinstance(values[0], Float32) else "r"
    text = f"st.shared{width(n)}.b32 [$0], {slots(1, n)};"
    constraints = ",".join(["r"] + [kind] * n)
    asm(None, [Int32(address), *values], text, constraints, True, {"loc": loc, "ip": ip})


@dsl_user_op
def load_matrices(
    address: Int32, offset: int = 0, transposed: bool = False, *, loc: Any = None, ip: Any = None
) -> list:
    """Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l."""
    kind = "trans.shared" if transposed else "shared"
    text = f"ldmatrix.sync.aligned.m8n8.x4.{kind}.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return several(4, Uint32, [Int32(address)], text, "r", True, {"loc": loc, "ip": ip})


# Global memory.


@dsl_user_op
def load_global(address: Int64, n: int, wanted: Any, *, loc: Any = None, ip: Any = None) -> list:
    """n consecutive 32-bit words; zeros unless `wanted`."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(n))
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, ${n + 1}, 0; {zeros} "
        f"@p ld.global{width(n)}.b32 {slots(0, n)}, [${n}]; }}"
    )
    args = [Int64(address), Int32(wanted)]
    at = {"loc": loc, "ip": ip}
    struct = llvm.StructType.get_literal([T.i32()] * n) if n > 1 else T.i32()
    constraints = ",".join(["=&r"] * n + ["l", "r"])
    result = asm(struct, args, text, constraints, True, at)
    if n == 1:
        return [Uint32(result)]
    return [Uint32(llvm.extractvalue(T.i32(), result, [i], **at)) for i in range(n)]


@dsl_user_op
def store_half(
    address: Int64, value: Float32, dtype: str, *, loc: Any = None, ip: Any = None
) -> None:
    """Round to fp16 or bf16, and store to global memory."""
    kind = PAIR[dtype].removesuffix("x2")
    text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; st.global.b16 [$0], h; }}"
    args = [Int64(address), Float32(value)]
    asm(None, args, text, "l,f", True, {"loc": loc, "ip": ip})


@dsl_user_op
def store_global(address: Int64, values: list, *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 consecutive words."""
    n = len(values)
    kind = "f" if isinstance(values[0], Float32) else "r"
    text = f"st.global{width(n)}.b32 [$0], {slots(1, n)};"
    constraints = ",".join(["l"] + [kind] * n)
    asm(None, [Int64(address), *values], text, constraints, True, {"loc": loc, "ip": ip})


@dsl_user_op
def load_l2(address: Int64, n: int, kind: Any, *, loc: Any = None, ip: Any = None) -> list:
    """n words that other CTAs of this launch wrote."""
    text = f"ld.global.cg{width(n)}.b32 {slots(0, n)}, [${n}];"
    return several(n, kind, [Int64(address)], text, "l", True, {"loc": loc, "ip": ip})


@dsl_user_op
def count_up(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Adds 1; returns what was there."""
    text = "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;"
    at = {"loc": loc, "ip": ip}
    return Int32(asm(T.i32(), [Int64(address)], text, "=r,l,~{memory}", True, at))


@dsl_user_op
def peek(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """What other CTAs have counted so far."""
    text = "ld.relaxed.gpu.global.b32 $0, [$1];"
    at = {"loc": loc, "ip": ip}
    return Int32(asm(T.i32(), [Int64(address)], text, "=r,l,~{memory}", True, at))


@dsl_user_op
def fence(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread wrote is seen before what it writes from now on, by every CTA."""
    asm(None, [], "fence.acq_rel.gpu;", "~{memory}", True, {"loc": loc, "ip": ip})
