"""Inline PTX of sm_80: `cp.async`, copies from global to shared memory.

No copy has an L2 policy: ptxas of CUDA 13.0 takes wrong registers for it, which ends in an illegal
instruction.
"""

from typing import Any

from cutlass import Int32, Int64

from anybit.kernels.cute.ptx import asm


def copy(to: Int32, into: int, source: Int64, at: int, size: int = 16) -> None:
    """16 or 8 bytes from source + at to shared memory at to + into; every thread its own."""
    how = "cg" if size == 16 else "ca"  # past the L1, which takes no 8 bytes
    text = f"cp.async.{how}.shared.global [$0+{into}], [$1+{at}], {size};"
    asm(None, text, Int32(to), Int64(source), memory=True)


def copy_if(to: Int32, into: int, source: Int64, at: int, when: Any) -> None:
    """`copy` of 16 bytes, predicated."""
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p cp.async.cg.shared.global [$0+{into}], [$1+{at}], 16; }}"
    )
    asm(None, text, Int32(to), Int64(source), Int32(when), memory=True)


def copy_or_zero(to: Int32, into: int, source: Int64, at: int, there: Any, when: Any) -> None:
    """`copy_if` of 16 bytes that are zeros where nothing is `there`; `source` is not read then."""
    text = (
        "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $3, 0; shl.b32 n, $2, 4; "
        f"@p cp.async.cg.shared.global [$0+{into}], [$1+{at}], 16, n; }}"
    )
    asm(None, text, Int32(to), Int64(source), Int32(there), Int32(when), memory=True)


def commit() -> None:
    """This thread's copies since the last `commit` become a group."""
    asm(None, "cp.async.commit_group;", memory=True)


def wait(running: int) -> None:
    """Until at most `running` groups of this thread are on their way."""
    text = f"cp.async.wait_group {running};"
    asm(None, text, memory=True)
