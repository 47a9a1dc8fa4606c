"""Many experts in one launch of `gemm.py`'s loop: tokens lie sorted by expert.

How many tokens an expert has is known on the device only. So a launch has as many CTAs as find
room, and each of them counts the tiles itself: every expert's tokens make tiles of their own, and
an expert without tokens has none. What there is to do is shared evenly, in K tiles, as `gemm.py`
does it. So 50 experts of 128 with a token or two keep all multiprocessors reading, as does one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from anybit.kernels.cute.operands import MOST_EXPERTS
from anybit.kernels.cute.ptx import load_shared, store_shared
from anybit.kernels.mma.gemm import Gemm
from anybit.kernels.mma.ptx import load_late
from anybit.kernels.mma.tiles import LEAST_UNITS

EACH = MOST_EXPERTS // 32  # experts that a lane counts


class Experts(Gemm):
    """The table in shared memory has, for each expert and one more: tiles before it, its start."""

    @cute.jit
    def begin(self, starts, experts, m, table, thread):
        """Write the table; returns how many tiles there are. Every warp counts by itself."""
        lane = thread % 32
        at = [
            Int32(load_late(starts.toint() + cutlass.min(lane * EACH + i, experts) * 4, Int32))
            for i in range(EACH + 1)
        ]
        counts = [(at[i + 1] - at[i] + (self.tokens - 1)) // self.tokens for i in range(EACH)]
        total, before = sum(counts, Int32(0)), Int32(0)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(total, 1 << step)
            before += other if lane & (1 << step) else 0
            total += other
        if thread < 32:
            for i in cutlass.range_constexpr(EACH):
                if lane * EACH + i <= experts:
                    store_shared(table + (lane * EACH + i) * 8, [Uint32(before), Uint32(at[i])])
                before += counts[i]
            if (lane == 31) & (experts == MOST_EXPERTS):
                store_shared(table + MOST_EXPERTS * 8, [Uint32(before), Uint32(at[EACH])])
        cute.arch.sync_threads()
        return total

    @cute.jit
    def busy(self, units, ctas):
        """As many CTAs as get enough to do."""
        return cutlass.min(ctas, cutlass.max(units // LEAST_UNITS, Int32(1)))

    @cute.jit
    def locate(self, tile, sizes):
        """The last expert with no more tiles before it than the tile's number."""
        _, _, _, _, m_tiles, experts, table = sizes
        m_tiles = cutlass.max(m_tiles, Int32(1))
        index, expert = tile % m_tiles, Int32(0)
        step = Int32(MOST_EXPERTS // 2)
        while step > 0:
            middle = cutlass.min(expert + step, experts)  # behind the last, no number is as large
            if Int32(load_shared(table + middle * 8, 1, 0, True)[0]) <= index:
                expert = middle
            step //= 2
        before, start = load_shared(table + expert * 8, 2, 0, True)
        last = Int32(load_shared(table + expert * 8, 1, 12, True)[0])
        first = Int32(start) + (index - Int32(before)) * self.tokens
        return tile // m_tiles, expert, first, last
