"""Up to 16 tokens of more rows than are resident at once: a CTA takes tile after tile.

As `narrow.py`, but a multiprocessor has one CTA, whose warps share the K tiles of all of its tiles
evenly: warp w of W takes K tiles w, w + W, ... of one long row of them. So no warp ends before the
others, and copies of the next tile are on their way while one ends. Where a tile ends, each warp
leaves its sums in one of two places; some warps, others for each tile, add them up in the order
of warps while the rest multiply on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import load_shared, store_shared
from anybit.kernels.mma.narrow import Narrow
from anybit.kernels.mma.ptx import commit, wait
from anybit.kernels.mma.tiles import Kernel, sums_bytes


class Turns(Narrow):
    busy = True  # no register waits for a tile's end

    def __init__(self, spec: Kernel):
        super().__init__(spec)
        self.parts = self.slices * self.blocks
        self.sums_at = self.warps * self.stages * self.stage_bytes
        self.place_bytes = self.warps * self.parts * 512
        self.barriers_at = self.sums_at + sums_bytes(spec.tile)

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
        full = cute.recast_ptr(shared.data.data_ptr() + self.barriers_at, dtype=Int64)
        empty = full + 2
        if thread == 0:
            for b in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(full + b, self.warps)
                cute.arch.mbarrier_init(empty + b, self.parts)
        cute.arch.sync_threads()

        ring = base + warp * (self.stages * self.stage_bytes)
        k_tiles = (k + (K_TILE - 1)) // K_TILE
        m_tiles = (m + (self.tokens - 1)) // self.tokens
        n_tiles = (n + (self.rows - 1)) // self.rows
        # This CTA's tiles: every so many of rows, from `tile` on, all of the same tokens.
        tile, step, first = cta // m_tiles, ctas // m_tiles, cta % m_tiles * self.tokens
        mine = (n_tiles - tile + (step - 1)) // step
        left = (mine * k_tiles - warp + (self.warps - 1)) // self.warps
        whole, source = (w.toint(), k_tiles, step, lane), (x.toint(), first, m, k)
        at = self.settle(tile, warp, whole)
        kt = warp
        if const_expr(self.spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        early = []
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < left:
                self.fetch_weights(ring + s * self.stage_bytes, at[2], (at[3], at[4], at[5]), lane)
            early.append(at[1])
            at = self.advance(at, whole)
        if const_expr(self.spec.overlap):
            cute.arch.griddepcontrol_wait()
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < left:
                self.fetch_tokens(ring + s * self.stage_bytes, source, early[s], lane)
            commit()
        left -= self.stages - 1

        vectors = (row_scale, row_zero, bias, token_scale, token_sum)
        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        stage, vacant, adder = Int32(0), Int32(self.stages - 1), Int32(0)
        lookup = self.lookup(ring, lane)
        for i in cutlass.range(mine, unroll=1):
            acc.fill(0)
            while kt < k_tiles:
                wait(self.stages - 2)
                cute.arch.sync_warp()  # all lanes have read the stage that is filled now
                if left > 0:
                    to = ring + vacant * self.stage_bytes
                    self.fetch_weights(to, at[2], (at[3], at[4], at[5]), lane)
                    self.fetch_tokens(to, source, at[1], lane)
                    at = self.advance(at, whole)
                    left -= 1
                commit()
                place = stage * self.stage_bytes
                self.multiply(acc, ring + place, lookup + place, lane, self.grid_at)
                vacant = stage
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                kt += self.warps
            kt -= k_tiles

            # Leave this warp's sums; the warps `adder`, `adder` + 1, ... add a part up each.
            turn, side = i >> 1, i & 1
            sums = base + self.sums_at + side * self.place_bytes
            if turn > 0:
                cute.arch.mbarrier_wait(empty + side, turn - 1 & 1)
            to = sums + warp * (self.parts * 512) + lane * 16
            for j in cutlass.range_constexpr(self.slices):
                for b in cutlass.range_constexpr(self.blocks):
                    four = [acc[c, b, j] for c in range(4)]
                    store_shared(to + (j * self.blocks + b) * 512, four)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(full + side)
            part = warp - adder
            if part < 0:
                part += self.warps
            if part < self.parts:
                channel = tile * self.rows + part // self.blocks * 16
                token = first + part % self.blocks * 8
                rows, tokens = self.factors(vectors, channel, token, lane, m, n)
                cute.arch.mbarrier_wait(full + side, turn & 1)
                total = [self.acc(0)] * 4
                for r in cutlass.range_constexpr(self.warps):
                    found = sums + part * 512 + lane * 16
                    more = load_shared(found, 4, r * self.parts * 512, True, self.acc)
                    total = [a + b for a, b in zip(total, more, strict=True)]
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + side)
                for v in cutlass.range_constexpr(2):
                    self.store_pair(
                        total[2 * v : 2 * v + 2], rows[v], tokens, y.toint(), token + lane // 4,
                        channel + v * 8 + lane % 4 * 2, m, n,
                    )  # fmt: skip
            tile += step
            adder += self.parts
            if adder >= self.warps:
                adder -= self.warps
        wait(0)

    @cute.jit
    def settle(self, tile, kt, whole):
        """Where a tile's K tile lies: (tile, kt, its words, its chunks' offsets).

        A K tile behind the last is one of a later tile of this CTA.
        """
        w, k_tiles, step, lane = whole
        while kt >= k_tiles:
            kt -= k_tiles
            tile += step
        slot = tile * self.slices
        group, quarter = slot >> 2 & 1, slot & 3
        blob = Int64(w) + Int64((slot >> 3) * k_tiles + kt) * self.decoder.blob_bytes
        codes = group * (512 * self.words) + quarter * 512 + lane * 16
        rest = group * (512 * self.words) + self.whole * 2048 + quarter * 256 + lane * 8
        grids = self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16
        return tile, kt, blob, codes, rest, grids

    @cute.jit
    def advance(self, at, whole):
        """The next place of this warp."""
        tile, kt, blob, codes, rest, grids = at
        kt += self.warps
        blob += self.warps * self.decoder.blob_bytes
        if kt >= whole[1]:
            tile, kt, blob, codes, rest, grids = self.settle(tile, kt, whole)
        return tile, kt, blob, codes, rest, grids
