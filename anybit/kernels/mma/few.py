"""Few tokens of many experts: `narrow.py`'s warps, in CTAs that stay for one tile after another.

The experts that tokens meet have more tiles than CTAs find room. So each CTA takes one tile after
another, as far apart as there are CTAs, and its warps fetch weights of the next while the sums of
this one meet: there is one barrier a tile, and the memory does not wait for it.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.copies import commit, wait
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.launch import ProductArguments
from anybit.kernels.cute.pack import ROWS
from anybit.kernels.mma.experts import Sorted
from anybit.kernels.mma.gemm import padded
from anybit.kernels.mma.narrow import Narrow

# Where a tile lies: its first blob, of that a half, of that a quarter; its tokens, before `end`.
Source = namedtuple("Source", "blob half quarter first end")


class Few(Sorted, Narrow):
    @cute.kernel
    def kernel(self, given: ProductArguments):
        thread, cta, ctas, warp, lane, base = self.who()
        base = self.place_table(base)
        ring = base + warp * (self.stages * self.stage_bytes)
        parts = const_expr(self.slices * self.blocks)
        meet = base + self.warps * self.stages * self.stage_bytes
        table = meet + 2 * self.warps * parts * 512
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        self.store_table(self.load_table(given, thread), thread)
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        m_tiles = self.begin(given, table, thread)
        n_tiles = (given.n + (self.rows - 1)) // self.rows
        tiles = (m_tiles * n_tiles - cta + (ctas - 1)) // ctas
        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        each = (k_tiles - warp + (self.warps - 1)) // self.warps  # K tiles of this warp
        count = tiles * each

        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        # What is fetched next: a tile, where it lies, a K tile.
        tile, kt = cta, Int32(warp)
        source = self.source(given, table, tile, n_tiles, k_tiles)
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                self.fetch_unit(ring + s * self.stage_bytes, source, kt, given, lane)
                kt += self.warps
                if (kt >= k_tiles) & (s + 1 < count):
                    tile, kt = tile + ctas, Int32(warp)
                    source = self.source(given, table, tile, n_tiles, k_tiles)
            commit()
        left = count - (self.stages - 1)  # to be fetched
        stage, empty = Int32(0), Int32(self.stages - 1)
        lookup = self.lookup(ring, lane)
        unbiased = given._replace(bias=None)
        for i in cutlass.range(tiles, unroll=1):
            at_tile = cta + i * ctas
            # The warps take turns with what is to be done at a tile's end.
            part = (warp + (self.warps - parts) * i) % self.warps
            mine = cutlass.min(part, Int32(parts - 1))
            row_tile, expert = at_tile % n_tiles, Int32(0)
            expert, token, end = self.find(at_tile // n_tiles, given, table)
            channel = row_tile * self.rows + mine // self.blocks * 16
            token += mine % self.blocks * 8
            before = Int64(expert * padded(given.n)) * 4  # bytes of a number of each row
            rows, tokens = self.factors(unbiased, before, channel, token, lane)
            for _ in cutlass.range(each, unroll=1):
                wait(self.stages - 2)
                cute.arch.sync_warp()  # all lanes have read the stage that is filled now
                if left > 0:
                    self.fetch_unit(ring + empty * self.stage_bytes, source, kt, given, lane)
                    kt += self.warps
                    left -= 1
                    if (kt >= k_tiles) & (left > 0):
                        tile, kt = tile + ctas, Int32(warp)
                        source = self.source(given, table, tile, n_tiles, k_tiles)
                commit()
                at = stage * self.stage_bytes
                self.multiply(acc, ring + at, lookup + at, lane, self.grid_at)
                empty = stage
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
            # Sums of two tiles have two places, so that one barrier a tile is enough.
            here = meet + i % 2 * (self.warps * parts * 512) + lane * 16
            self.leave(acc, here + warp * (parts * 512))
            acc.fill(0)
            cute.arch.sync_threads()
            if part < parts:
                at, column = here + part * 512, channel + lane % 4 * 2
                self.add_up(unbiased, at, rows, tokens, token + lane // 4, column, end)

    @cute.jit
    def source(self, given, table, tile, n_tiles, k_tiles):
        """Where a tile's weights and tokens lie."""
        slot = tile % n_tiles * self.slices  # of 16 rows: a blob has two times four
        expert, first, end = self.find(tile // n_tiles, given, table)
        row = expert * (padded(given.n) // ROWS) + slot // 8
        blob = given.w.toint() + Int64(row * k_tiles) * self.decoder.blob_bytes
        return Source(blob, slot // 4 % 2, slot % 4, first, end)

    @cute.jit
    def fetch_unit(self, to, source, kt, given, lane):
        """Start the copies of a K tile."""
        pieces = self.pieces(source.half, source.quarter, lane)
        blob = source.blob + Int64(kt) * self.decoder.blob_bytes
        self.fetch_weights(to, blob, pieces, lane)
        self.fetch_tokens(to, given, source.first, source.end, kt, lane)
