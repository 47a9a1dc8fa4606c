"""A table that a decoder looks weights up in (`lang.Table`): how it comes to shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.ptx import load_global, store_shared

ENTRIES, COPIES = 256, 128  # words; bytes of all copies of one


def load(source: Any, thread: Any, threads: int) -> list:
    """Words of a table that a thread is to `store`.

    By the L1. `cp.async` of 16 bytes asks the L2 for each lane, and all multiprocessors ask for the
    same lines: 256 CTAs took 15 us longer.

    Args:
        source: (256,) words in global memory, which no kernel writes.
        thread: This thread's number, of `threads`, a multiple of 8.
        threads: Of the CTA, or of those that share the work.
    """
    first, step = thread // 8, threads // 8
    at = Int64(source) + first * 4
    out = []
    for i in range(0, ENTRIES, step):
        wanted = 1 if i + step <= ENTRIES else first + i < ENTRIES
        out.append(load_global(at + i * 4, 1, Int32(wanted))[0])
    return out


@cute.jit
def store(to: Any, words: Any, thread: Any, threads: cutlass.Constexpr[int]) -> None:
    """Write what `load` has loaded, each word 32 times; readers wait for a barrier.

    to: Where the table begins in shared memory.
    """
    first, step = thread // 8, const_expr(threads // 8)
    to += first * COPIES + thread % 8 * 16
    for i in cutlass.range_constexpr(len(words)):
        four = [words[i]] * 4
        if const_expr((i + 1) * step <= ENTRIES) or first + i * step < ENTRIES:
            store_shared(to + i * step * COPIES, four)
