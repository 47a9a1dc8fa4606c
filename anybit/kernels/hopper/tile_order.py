"""Which tile a CTA of the main loop multiplies, and when."""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.hopper.stream_k import unit_of
from anybit.kernels.hopper.tile import Tile

NEAR = 1024  # tokens whose tiles are neighbours in the order of tiles


# What does not change from tile to tile; `table` is of experts' tokens and tiles, in shared memory,
# `expert_tiles` are `ROW_MULTIPLE` rows of a weight each.
Problem = namedtuple("Problem", "given table k_tiles m_tiles n_tiles expert_tiles")


# What a CTA does: its turns, which are tiles, or units of its list (`stream_k.py`); the K tiles of
# each where CTAs do not share tiles.
Turns = namedtuple("Turns", "first last share k_first k_last")


# K tiles `k_first` to `k_last` of a tile, and the turn that follows.
Turn = namedtuple("Turn", "tile k_first k_last after")


# Where a tile lies: its first row of blobs, its tokens from `start` on, before `end`.
Located = namedtuple("Located", "row_tile blobs expert start end")


class Order:
    """The part of `gemm.Gemm` that says where a tile lies."""

    tile: Tile
    tokens: int  # of a tile
    blocks: int  # of 128 rows in a tile
    near: int  # token tiles that are neighbours; 0: all
    grouped: bool  # tokens lie sorted by expert

    @cute.jit
    def turn(self, at, turns):
        """What a CTA multiplies."""
        tile, after, k_first, k_last = at, at + turns.share.ctas, turns.k_first, turns.k_last
        if const_expr(self.tile.stream_k):
            tile, k_first, after = unit_of(at, turns.share)
            k_last = k_first + (after - at)
        return Turn(tile, k_first, k_last, after)

    @cute.jit
    def count_tiles(self, starts, table, experts, thread):
        """Fill the table: where each span's tokens start, then where its token tiles end.

        A thread counts a span of experts, which lie one behind the other: one expert, unless there
        are more than `SPANS`. The sums are made in eight steps by all threads: one after the other,
        256 experts took longer than many a product.

        Returns how many token tiles there are.
        """
        given = cute.make_tensor(starts, cute.make_layout(experts + 1))
        each = (experts + (SPANS - 1)) // SPANS
        total = Int32(0)
        if thread <= SPANS:
            first = cutlass.min(thread * each, experts)
            start = given[first]
            table[thread] = start
            if thread < SPANS:
                for expert in cutlass.range(first, cutlass.min(first + each, experts), unroll=1):
                    end = given[expert + 1]
                    total += (end - start + (self.tokens - 1)) // self.tokens
                    start = end
        for i in cutlass.range_constexpr((SPANS - 1).bit_length()):
            if thread < SPANS:
                table[SPANS + 1 + thread] = total
            cute.arch.sync_threads()
            if (thread < SPANS) & (thread >= 1 << i):
                total += table[SPANS + 1 + thread - (1 << i)]
            cute.arch.sync_threads()
        if thread < SPANS:
            table[SPANS + 1 + thread] = total
        cute.arch.sync_threads()
        return table[2 * SPANS]

    @cute.jit
    def locate(self, tile, problem):
        """Where a tile lies.

        Token tiles are innermost, so CTAs at work at the same time share weights and tokens in the
        L2: `NEAR` tokens at most, or those of one expert, or the weights of a wave would not fit
        beside them.
        """
        given, table, _, m_tiles, n_tiles, expert_tiles = problem
        expert, end, experts = Int32(0), given.m, given.experts
        if const_expr(self.grouped):
            span, before, index = Int32(0), Int32(0), tile // n_tiles
            for i in cutlass.range_constexpr((SPANS - 1).bit_length() - 1, -1, -1):
                step = const_expr(1 << i)
                tiles = table[SPANS + span + step]  # up to that span's end
                if tiles <= index:
                    span += step
                    before = tiles
            width = table[SPANS + 1 + span] - before  # the expert's tiles of tokens
            expert, start, end = span, table[span], table[span + 1]
            if experts > SPANS:
                starts = cute.make_tensor(given.starts, cute.make_layout(experts + 1))
                expert = span * ((experts + (SPANS - 1)) // SPANS)
                end = starts[expert + 1]
                width = (end - start + (self.tokens - 1)) // self.tokens
                while before + width <= index:
                    before += width
                    expert += 1
                    start, end = end, starts[expert + 1]
                    width = (end - start + (self.tokens - 1)) // self.tokens
            tile -= before * n_tiles
            row_tile = tile // width
            start += tile % width * self.tokens
        else:
            before, width = Int32(0), m_tiles
            if const_expr(self.near):
                before = tile // (self.near * n_tiles) * self.near
                width = cutlass.min(m_tiles - before, Int32(self.near))
            tile -= before * n_tiles
            row_tile, start = tile // width, (before + tile % width) * self.tokens
        blobs = expert * (expert_tiles * (ROW_MULTIPLE // ROWS)) + row_tile * self.blocks
        return Located(row_tile, blobs, expert, start, end)
