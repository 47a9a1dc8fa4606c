"""Which tile a CTA of the main loop multiplies, and when."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.hopper.shares import unit_of
from anybit.kernels.hopper.tile import Tile

NEAR = 1024  # tokens whose tiles are neighbours in the order of tiles


class Order:
    """The part of `gemm.Gemm` that says where a tile lies."""

    tile: Tile
    tokens: int  # of a tile
    sides: int  # CTAs of a cluster that have a row tile each, of the same tokens
    blocks: int  # of 128 rows in a tile
    near: int  # token tiles that are neighbours; 0: all
    grouped: bool  # tokens lie sorted by expert

    @cute.jit
    def turn(self, at, turns):
        """What a CTA multiplies: (tile, its first K tile, its last + 1, the next turn)."""
        _, _, share, k_first, k_last = turns
        tile, after = at, at + share[1]
        if const_expr(self.tile.shared):
            tile, k_first, after = unit_of(at, share)
            k_last = k_first + (after - at)
        return tile, k_first, k_last, after

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
        """A tile's (row tile, its first row of blobs, expert, first token, last token + 1).

        Token tiles are innermost, so CTAs at work at the same time share weights and tokens in the
        L2: `NEAR` tokens at most, or those of one expert, or the weights of a wave would not fit
        beside them.
        """
        (table, starts, experts), m, _, m_tiles, n_tiles, expert_tiles, side = problem
        expert, end = Int32(0), m
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
                given = cute.make_tensor(starts, cute.make_layout(experts + 1))
                expert = span * ((experts + (SPANS - 1)) // SPANS)
                end = given[expert + 1]
                width = (end - start + (self.tokens - 1)) // self.tokens
                while before + width <= index:
                    before += width
                    expert += 1
                    start, end = end, given[expert + 1]
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
            row_tile = row_tile * self.sides + side
        blobs = expert * (expert_tiles * (ROW_MULTIPLE // ROWS)) + row_tile * self.blocks
        return row_tile, blobs, expert, start, end
