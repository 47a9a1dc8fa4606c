"""Few tokens of many experts: `narrow.py`'s warps, in CTAs that stay for one tile after another.

The experts that tokens meet have more tiles than CTAs find room. So each CTA takes one tile after
another, as far apart as there are CTAs, and its warps fetch weights of the next while the sums of
this one meet: there is one barrier a tile, and the memory does not wait for it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.pack import ROWS
from anybit.kernels.mma.experts import Sorted
from anybit.kernels.mma.gemm import padded
from anybit.kernels.mma.narrow import Narrow
from anybit.kernels.mma.ptx import commit, wait


class Few(Sorted, Narrow):
    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        row_scale: cute.Pointer,
        row_zero: cute.Pointer,
        token_scale: cute.Pointer,
        token_sum: cute.Pointer,
        bias: cute.Pointer,
        y: cute.Pointer,
        work: cute.Pointer,
        counters: cute.Pointer,
        starts: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        experts: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        base = Int32(shared.data.data_ptr().toint())
        ring = base + warp * (self.stages * self.stage_bytes)
        parts = const_expr(self.slices * self.blocks)
        meet = base + self.warps * self.stages * self.stage_bytes
        table = meet + 2 * self.warps * parts * 512
        if const_expr(self.spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        m_tiles = self.begin(starts, experts, m, table, thread)
        n_tiles = (n + (self.rows - 1)) // self.rows
        tiles = (m_tiles * n_tiles - cta + (ctas - 1)) // ctas
        k_tiles = (k + (K_TILE - 1)) // K_TILE
        each = (k_tiles - warp + (self.warps - 1)) // self.warps  # K tiles of this warp
        count = tiles * each

        sizes = (n, k_tiles, n_tiles, experts, starts, table, lane)
        operands = (x.toint(), w.toint())
        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        # What is fetched next: tile, K tile, blob, places in it, tokens.
        tile, kt = cta, Int32(warp)
        blob, group, quarter, first, last = self.source(operands, sizes, tile)
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                to = ring + s * self.stage_bytes
                self.fetch_unit(to, blob, group, quarter, kt, first, last, operands, k, lane)
                kt += self.warps
                if (kt >= k_tiles) & (s + 1 < count):
                    tile, kt = tile + ctas, Int32(warp)
                    blob, group, quarter, first, last = self.source(operands, sizes, tile)
            commit()
        left = count - (self.stages - 1)  # to be fetched
        stage, empty = Int32(0), Int32(self.stages - 1)
        lookup = self.lookup(ring, lane)
        for i in cutlass.range(tiles, unroll=1):
            at_tile = cta + i * ctas
            # The warps take turns with what is to be done at a tile's end.
            part = (warp + (self.warps - parts) * i) % self.warps
            mine = cutlass.min(part, Int32(parts - 1))
            row_tile, expert = at_tile % n_tiles, Int32(0)
            expert, token, end = self.find(at_tile // n_tiles, experts, starts, table)
            channel = row_tile * self.rows + mine // self.blocks * 16
            token += mine % self.blocks * 8
            before = Int64(expert * padded(n)) * 4  # bytes of a number of each row
            vectors = (
                row_scale.toint() + before, row_zero.toint() + before, Int64(0),
                token_scale.toint(), token_sum.toint(),
            )  # fmt: skip
            rows, tokens = self.factors(vectors, channel, token, lane, m, n)
            for _ in cutlass.range(each, unroll=1):
                wait(self.stages - 2)
                cute.arch.sync_warp()  # all lanes have read the stage that is filled now
                if left > 0:
                    to = ring + empty * self.stage_bytes
                    self.fetch_unit(to, blob, group, quarter, kt, first, last, operands, k, lane)
                    kt += self.warps
                    left -= 1
                    if (kt >= k_tiles) & (left > 0):
                        tile, kt = tile + ctas, Int32(warp)
                        blob, group, quarter, first, last = self.source(operands, sizes, tile)
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
                self.add_up(at, rows, tokens, y, token + lane // 4, column, end, n)

    @cute.jit
    def source(self, operands, sizes, tile):
        """Where a tile's weights and tokens lie: (first blob, its half, quarter, tokens, end)."""
        n, k_tiles, n_tiles, experts, starts, table, _ = sizes
        slot = tile % n_tiles * self.slices  # of 16 rows: a blob has two times four
        expert, first, last = self.find(tile // n_tiles, experts, starts, table)
        row = expert * (padded(n) // ROWS) + slot // 8
        blob = Int64(operands[1]) + Int64(row * k_tiles) * self.decoder.blob_bytes
        return blob, slot // 4 % 2, slot % 4, first, last

    @cute.jit
    def fetch_unit(self, to, blob, group, quarter, kt, first, last, operands, k, lane):
        """Start the copies of a K tile."""
        codes = group * (512 * self.words)
        offsets = (
            codes + quarter * 512 + lane * 16,
            codes + self.whole * 2048 + quarter * 256 + lane * 8,
            self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16,
        )
        self.fetch_weights(to, blob + Int64(kt) * self.decoder.blob_bytes, offsets, lane)
        self.fetch_tokens(to, (Int64(operands[0]), first, last, k), kt, lane)
