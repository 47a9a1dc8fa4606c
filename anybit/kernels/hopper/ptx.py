"""Instructions that CuTe DSL has no name for, as inline PTX."""

from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

EVICT_FIRST = 0x12F0000000000000  # L2 policy of data that is read once
PAIR = {"float16": "f16x2", "bfloat16": "bf16x2"}


def _asm(result: Any, args: list, text: str, constraints: str, effects: bool, at: dict) -> Any:
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


def unsigned(value: int) -> Uint32:
    """A constant; Python's own would become a signed 64-bit number from 2**31 on."""
    return Uint32(value & 0xFFFFFFFF)


@dsl_user_op
def prmt(word: Uint32, selector: int, other: Any = 0, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bytes of `word` (0 to 3) and of `other` (4 to 7), by the selector's digits."""
    at = {"loc": loc, "ip": ip}
    if isinstance(other, int):
        text = f"prmt.b32 $0, $1, {other}, {selector};"
        return Uint32(_asm(T.i32(), [Uint32(word)], text, "=r,r", False, at))
    text = f"prmt.b32 $0, $1, $2, {selector};"
    return Uint32(_asm(T.i32(), [Uint32(word), Uint32(other)], text, "=r,r,r", False, at))


@dsl_user_op
def half2(name: str, dtype: str, args: tuple, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A packed operation such as "fma.rn" on two fp16 or bf16 numbers."""
    at = {"loc": loc, "ip": ip}
    slots = ", ".join(f"${i}" for i in range(len(args) + 1))
    text = f"{name}.{PAIR[dtype]} {slots};"
    constraints = ",".join(["=r", *["r"] * len(args)])
    return Uint32(_asm(T.i32(), [Uint32(a) for a in args], text, constraints, False, at))


@dsl_user_op
def pack2(low: Float32, high: Float32, dtype: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp32 numbers, rounded to fp16 or bf16, in one register."""
    at = {"loc": loc, "ip": ip}
    text = f"cvt.rn.{PAIR[dtype]}.f32 $0, $1, $2;"
    return Uint32(_asm(T.i32(), [Float32(high), Float32(low)], text, "=r,f,f", False, at))


@dsl_user_op
def stmatrix_transposed(
    address: Int32, registers: list, *, loc: Any = None, ip: Any = None
) -> None:
    """2 or 4 8x8 matrices of 16-bit numbers to shared memory, transposed."""
    at = {"loc": loc, "ip": ip}
    n = len(registers)
    values = ", ".join(f"${i + 1}" for i in range(n))
    text = f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [$0], {{{values}}};"
    args = [Int32(address), *[Uint32(r) for r in registers]]
    _asm(None, args, text, ",".join(["r"] * (n + 1)), True, at)


@dsl_user_op
def bulk_load(
    to: Int32, source: Int64, size: int, barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Global to shared memory, `size` contiguous bytes; one thread calls it."""
    at = {"loc": loc, "ip": ip}
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[$0], [$1], {size}, [$2], $3;"
    )
    args = [Int32(to), Int64(source), Int32(barrier), Int64(EVICT_FIRST)]
    _asm(None, args, text, "r,l,r,l", True, at)


@dsl_user_op
def store_to_cta(
    address: Int32, rank: Int32, values: list, *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes into the shared memory of the cluster's CTA `rank`, at its own `address`."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
        "st.shared::cluster.v4.b32 [there], {$2, $3, $4, $5}; }"
    )
    args = [Int32(address), Int32(rank), *values]
    kind = "f" if isinstance(values[0], Float32) else "r"
    _asm(None, args, text, ",".join(["r", "r", *[kind] * 4]), True, at)


@dsl_user_op
def arrive_if(barrier: Int32, when: Boolean, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival at an mbarrier of this CTA, as a predicated instruction instead of a branch."""
    at = {"loc": loc, "ip": ip}
    text = "{ .reg .pred now; setp.ne.s32 now, $1, 0; @now mbarrier.arrive.shared.b64 _, [$0]; }"
    _asm(None, [Int32(barrier), Int32(when)], text, "r,r,~{memory}", True, at)
