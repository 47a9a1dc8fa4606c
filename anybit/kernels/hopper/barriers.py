"""Barriers and memory by address: what the codebook kernels are of."""

from cutlass import Float32, Int32, Int64, Uint32

from anybit.kernels.cute.ptx import asm
from anybit.kernels.hopper.ptx import EVICT_FIRST


def load_bytes(address: Int32, offset: int = 0) -> Uint32:
    """Two bytes, the others zero; fresh."""
    text = f"ld.shared.u16 $0, [$1+{offset}];"
    return asm(Uint32, text, Int32(address))


def send(address: Int32, rank: Int32, value: Float32, barrier: Int32) -> None:
    """An fp32 number into the shared memory of the cluster's CTA `rank`, at its own `address`.

    4 bytes are counted at that CTA's `barrier` once they are there; there is no fence to wait for.
    """
    text = (
        "{ .reg .b32 there, counted; mapa.shared::cluster.u32 there, $0, $1; "
        "mapa.shared::cluster.u32 counted, $3, $1; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $2, [counted]; }"
    )
    asm(None, text, Int32(address), Int32(rank), Float32(value), Int32(barrier))


def insert_code(word: Uint32, base: Uint32, byte: int) -> Int32:
    """`base` with byte 1 taken from `word`: the address of that code's entry of 256 bytes."""
    text = f"prmt.b32 $0, $1, $2, {0x7604 | byte << 4};"
    return asm(Int32, text, Uint32(word), Uint32(base), effects=False)


def add_code(word: Uint32, base: Uint32, byte: int) -> Int32:
    """`base` and 128 times a byte of `word`: the address of that code's entry of 128 bytes."""
    text = f"dp4a.u32.u32 $0, $1, {0x80 << 8 * byte}, $2;"
    return asm(Int32, text, Uint32(word), Uint32(base), effects=False)


def swap_lanes(value: Float32, mask: int) -> Float32:
    """The value of the lane whose number differs in the bits of `mask`."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    return asm(Float32, text, Float32(value))


# Barriers by address.


def init_barrier(address: Int32, count: Int32) -> None:
    asm(None, "mbarrier.init.shared.b64 [$0], $1;", Int32(address), Int32(count))


def copy_async(to: Int32, source: Int64, at: int = 0, of: int = 0) -> None:
    """16 bytes, global (`of` bytes on) to shared memory (`at` bytes on); every thread its own."""
    text = f"cp.async.cg.shared.global [$0+{at}], [$1+{of}], 16;"
    asm(None, text, Int32(to), Int64(source))


def arrive_after_copies(barrier: Int32) -> None:
    """This thread arrives at the barrier once all of its `copy_async` are done."""
    text = "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];"
    asm(None, text, Int32(barrier))


def bulk_load_bytes(to: Int32, source: Int64, size: Int32, barrier: Int32, read: Uint32) -> None:
    """Arm the barrier for `size` bytes and start their copy; one thread calls it.

    read: a word that depends on all that this copy overwrites. The copy engine does not queue
    behind a warp's loads: it would overwrite words that still wait to be read. Bit 1 of a square is
    0, which the assembler does not know, so it waits for the word; a fence costs 2 to 5 % more.
    """
    text = (
        "{ .reg .b32 there; mul.lo.u32 there, $5, $5; and.b32 there, there, 2; "
        "add.u32 there, there, $0; mbarrier.arrive.expect_tx.shared.b64 _, [$2], $3; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[there], [$1], $3, [$2], $4; }"
    )
    asm(
        None,
        text,
        Int32(to),
        Int64(source),
        Int32(barrier),
        Int32(size),
        Int64(EVICT_FIRST),
        Uint32(read),
    )


def arrive(address: Int32) -> None:
    """Arrive at a barrier of this CTA."""
    text = "mbarrier.arrive.shared.b64 _, [$0];"
    asm(None, text, Int32(address))


def arrive_and_expect(address: Int32, size: Int32) -> None:
    """Arrive, and let the barrier's phase wait for `size` bytes."""
    text = "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;"
    asm(None, text, Int32(address), Int32(size))


def wait_barrier(address: Int32, parity: Int32, cluster: bool = False) -> None:
    """Wait for a barrier's phase; cluster: also for what other CTAs stored before they arrived."""
    scope = ".acquire.cluster" if cluster else ""
    text = (
        "{ .reg .pred p; AGAIN: "
        f"mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1; "
        "@p bra DONE; bra AGAIN; DONE: }"
    )
    asm(None, text, Int32(address), Int32(parity))
