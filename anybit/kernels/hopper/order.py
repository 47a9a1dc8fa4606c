"""Which tile a CTA of the main loop multiplies, and when."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anybit.kernels.cute.operands import MOST_EXPERTS
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.hopper.shares import unit_of
from anybit.kernels.hopper.tiles import Tile

NEAR = 1024  # tokens whose tiles are neighbours in the order of tiles


class Order:
    """The part of `gemm.Gemm` that says where a tile lies."""

    tile: Tile
    tokens: int  # of a tile
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
        """Fill the table: where each expert's tokens start, then where its token tiles end.

        Returns how many token tiles there are. The sums are made in eight steps by all threads: one
        after the other, 256 experts took longer than many a product.
        """
        total = Int32(0)
        if thread <= experts:
            given = cute.make_tensor(starts, cute.make_layout(experts + 1))
            table[thread] = given[thread]
            if thread < experts:
                total = (given[thread + 1] - given[thread] + (self.tokens - 1)) // self.tokens
        for i in cutlass.range_constexpr((MOST_EXPERTS - 1).bit_length()):
            if thread < MOST_EXPERTS:
                table[MOST_EXPERTS + 1 + thread] = total
            cute.arch.sync_threads()
            if (thread < MOST_EXPERTS) & (thread >= 1 << i):
                total += table[MOST_EXPERTS + 1 + thread - (1 << i)]
            cute.arch.sync_threads()
        if thread < MOST_EXPERTS:
            table[MOST_EXPERTS + 1 + thread] = total
        cute.arch.sync_threads()
        return table[2 * MOST_EXPERTS]

    @cute.jit
    def locate(self, tile, problem):
        """A tile's (row tile, its first row of blobs, expert, first token, last token + 1).

        Token tiles are innermost, so CTAs at work at the same time share weights and tokens in the
        L2: `NEAR` tokens at most, or the weights of a wave would not fit beside them.
        """
        table, m, _, m_tiles, n_tiles, expert_tiles = problem
        if const_expr(self.near and not self.grouped):
            before = tile // (self.near * n_tiles) * self.near
            tile -= before * n_tiles
            width = cutlass.min(m_tiles - before, Int32(self.near))
            row_tile, index = tile // width, before + tile % width
        else:
            row_tile, index = tile // m_tiles, tile % m_tiles
        expert, start, end = Int32(0), index * self.tokens, m
        if const_expr(self.grouped):
            before = Int32(0)
            for i in cutlass.range_constexpr((MOST_EXPERTS - 1).bit_length() - 1, -1, -1):
                step = const_expr(1 << i)
                tiles = table[MOST_EXPERTS + expert + step]  # up to that expert's end
                if tiles <= index:
                    expert += step
                    before = tiles
            index -= before
            start, end = table[expert] + index * self.tokens, table[expert + 1]
        blobs = expert * (expert_tiles * (ROW_MULTIPLE // ROWS)) + row_tile * self.blocks
        return row_tile, blobs, expert, start, end
