"""Many experts in one launch of `gemm.py`'s loop: tokens lie sorted by expert.

How many tokens an expert has is known on the device only. So a launch has as many CTAs as find
room, and each of them counts the tiles itself: every expert's tokens make tiles of their own, and
an expert without tokens has none. What there is to do is shared evenly, in K tiles, as `gemm.py`
does it. So 50 experts of 128 with a token or two keep all multiprocessors reading, as does one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.ptx import load_shared, store_shared
from anybit.kernels.mma.gemm import Gemm, Located
from anybit.kernels.mma.ptx import load_late
from anybit.kernels.mma.tiles import LEAST_UNITS

EACH = SPANS // 32  # spans of experts that a lane counts


class Sorted:
    """Where tokens that lie sorted by expert have their tiles; a part of a `Product`.

    The table in shared memory has, for each span and one more: tiles before it, its start.

    A span is one expert, unless there are more than `SPANS`.
    """

    def start(self, given, expert):
        """Where an expert's tokens start."""
        return Int32(load_late(given.starts.toint() + Int64(expert) * 4, Int32))

    def tiles(self, start, end):
        """Of tokens."""
        return (end - start + (self.tokens - 1)) // self.tokens

    @cute.jit
    def begin(self, given, table, thread):
        """Write the table; returns how many tiles there are. Every warp counts by itself."""
        experts = given.experts
        lane, span = thread % 32, (experts + (SPANS - 1)) // SPANS
        first = [
            self.start(given, cutlass.min((lane * EACH + i) * span, experts))
            for i in range(EACH + 1)
        ]
        counts = [self.tiles(first[i], first[i + 1]) for i in range(EACH)]
        if span > 1:
            for i in cutlass.range_constexpr(EACH):
                counts[i] = Int32(0)
                start, expert = first[i], (lane * EACH + i) * span
                for _ in cutlass.range(span, unroll=1):
                    expert += 1
                    end = self.start(given, cutlass.min(expert, experts))
                    counts[i] += self.tiles(start, end)
                    start = end
        total, before = sum(counts, Int32(0)), Int32(0)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(total, 1 << step)
            before += other if lane & (1 << step) else 0
            total += other
        if thread < 32:
            for i in cutlass.range_constexpr(EACH):
                at = table + (lane * EACH + i) * 8
                store_shared(at, [Uint32(before), Uint32(first[i])])
                before += counts[i]
            if lane == 31:
                store_shared(table + SPANS * 8, [Uint32(before), Uint32(first[EACH])])
        cute.arch.sync_threads()
        return total

    @cute.jit
    def not_after(self, place, index, lanes: cutlass.Constexpr[int]):
        """How many of the first lanes see no more tiles before their spans than `index`."""
        before = Int32(load_shared(place, 1, 0, True)[0])
        seen = cute.arch.vote_ballot_sync(before <= index)
        return cute.arch.popc(seen & Int32((1 << lanes) - 1 if lanes < 32 else -1))

    @cute.jit
    def find(self, index, given, table):
        """(expert, first token, last + 1) of a tile: the last expert with no more before it.

        A warp's lanes look at the table together: at one span of each lane's, then at all of those.
        """
        lane, each = cute.arch.lane_idx(), (given.experts + (SPANS - 1)) // SPANS
        span = (self.not_after(table + lane * (EACH * 8), index, 32) - 1) * EACH
        span += self.not_after(table + (span + lane % EACH) * 8, index, EACH) - 1
        before, first = load_shared(table + span * 8, 2, 0, True)
        index -= Int32(before)
        expert, start = cutlass.min(span * each, given.experts - 1), Int32(first)
        end = Int32(load_shared(table + span * 8, 1, 12, True)[0])
        if each > 1:
            end = self.start(given, expert + 1)
            while (self.tiles(start, end) <= index) & (expert < given.experts - 1):
                index -= self.tiles(start, end)
                expert += 1
                start, end = end, self.start(given, expert + 1)
        return expert, start + index * self.tokens, end


class Experts(Sorted, Gemm):
    """`gemm.py`'s warps for tokens that lie sorted by expert."""

    @cute.jit
    def sharers(self, units, ctas):
        """As many CTAs as get enough to do."""
        return cutlass.min(ctas, cutlass.max(units // LEAST_UNITS, Int32(1)))

    @cute.jit
    def locate(self, tile, job):
        m_tiles = cutlass.max(job.m_tiles, Int32(1))
        expert, first, end = self.find(tile % m_tiles, job.given, job.table)
        return Located(tile // m_tiles, expert, first, end)
