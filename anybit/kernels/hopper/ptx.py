"""Inline PTX of sm_90: bulk copies, clusters, and stores of matrices."""

from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from anybit.kernels.cute.ptx import asm

EVICT_FIRST = 0x12F0000000000000  # L2 policy of data that is read once


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
    asm(None, args, text, ",".join(["r"] * (n + 1)), True, at)


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
    asm(None, args, text, "r,l,r,l", True, at)


@dsl_user_op
def bulk_prefetch(source: Int64, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Global memory to the L2, `size` contiguous bytes; a thread for each piece."""
    at = {"loc": loc, "ip": ip}
    text = f"cp.async.bulk.prefetch.L2.global [$0], {size};"
    asm(None, [Int64(source)], text, "l", True, at)


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
    asm(None, args, text, ",".join(["r", "r", *[kind] * 4]), True, at)


@dsl_user_op
def arrive_if(barrier: Int32, when: Boolean, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival at an mbarrier of this CTA, as a predicated instruction instead of a branch."""
    at = {"loc": loc, "ip": ip}
    text = "{ .reg .pred now; setp.ne.s32 now, $1, 0; @now mbarrier.arrive.shared.b64 _, [$0]; }"
    asm(None, [Int32(barrier), Int32(when)], text, "r,r,~{memory}", True, at)


@dsl_user_op
def arrive_there_if(
    barrier: Int32, rank: Int32, when: Boolean, *, loc: Any = None, ip: Any = None
) -> None:
    """`arrive_if` at the mbarrier of the cluster's CTA `rank` at this address."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{ .reg .pred now; .reg .b32 there; setp.ne.s32 now, $2, 0; "
        "mapa.shared::cluster.u32 there, $0, $1; "
        "@now mbarrier.arrive.shared::cluster.b64 _, [there]; }"
    )
    args = [Int32(barrier), Int32(rank), Int32(when)]
    asm(None, args, text, "r,r,r,~{memory}", True, at)
