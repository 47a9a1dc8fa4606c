"""Inline PTX of sm_90: bulk copies, clusters, and stores of matrices."""

from cutlass import Boolean, Int32, Int64, Uint32

from anybit.kernels.cute.ptx import asm

EVICT_FIRST = 0x12F0000000000000  # L2 policy of data that is read once


def stmatrix_transposed(address: Int32, registers: list) -> None:
    """2 or 4 8x8 matrices of 16-bit numbers to shared memory, transposed."""
    n = len(registers)
    values = ", ".join(f"${i + 1}" for i in range(n))
    text = f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [$0], {{{values}}};"
    asm(None, text, Int32(address), *[Uint32(r) for r in registers])


def bulk_load(to: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """Global to shared memory, `size` contiguous bytes; one thread calls it."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[$0], [$1], {size}, [$2], $3;"
    )
    asm(None, text, Int32(to), Int64(source), Int32(barrier), Int64(EVICT_FIRST))


def bulk_prefetch(source: Int64, size: int) -> None:
    """Global memory to the L2, `size` contiguous bytes; a thread for each piece."""
    text = f"cp.async.bulk.prefetch.L2.global [$0], {size};"
    asm(None, text, Int64(source))


def store_to_cta(address: Int32, rank: Int32, values: list) -> None:
    """16 bytes into the shared memory of the cluster's CTA `rank`, at its own `address`."""
    text = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
        "st.shared::cluster.v4.b32 [there], {$2, $3, $4, $5}; }"
    )
    asm(None, text, Int32(address), Int32(rank), *values)


def arrive_if(barrier: Int32, when: Boolean) -> None:
    """One arrival at an mbarrier of this CTA, as a predicated instruction instead of a branch."""
    text = "{ .reg .pred now; setp.ne.s32 now, $1, 0; @now mbarrier.arrive.shared.b64 _, [$0]; }"
    asm(None, text, Int32(barrier), Int32(when), memory=True)
