"""Few tokens: 8 to 32 of them and 16 to 64 rows a CTA, whose warps split K; CTAs share nothing.

Warp w of W multiplies K tiles w, w + W, ... from a ring of its own, so that no barrier stands in
the loop. The sums meet in shared memory and are added in the order of warps.

With few tokens, time is that of reading the weights: all rings together keep enough bytes on their
way. A launch that may overlap the previous kernel fetches weights at once, and tokens after that
kernel has finished.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import load_shared, store_shared
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import commit, copy, copy_if, copy_or_zero, prefetch, wait
from anybit.kernels.mma.tiles import NARROW_WARPS


class Narrow(Product):
    ring_threads = 32

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
        tile, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        base = Int32(shared.data.data_ptr().toint())
        ring = base + warp * (self.stages * self.stage_bytes)
        k_tiles = (k + (K_TILE - 1)) // K_TILE
        m_tiles = (m + (self.tokens - 1)) // self.tokens
        row_tile, first = tile // m_tiles, tile % m_tiles * self.tokens

        # Where this warp reads: slices of 16 rows of a blob, which has two times four.
        slot = row_tile * self.slices
        group, quarter = slot // 4 % 2, slot % 4
        blob = w.toint() + Int64(slot // 8 * k_tiles + warp) * self.decoder.blob_bytes
        offsets = (
            group * (512 * self.words) + quarter * 512 + lane * 16,
            group * (512 * self.words) + self.whole * 2048 + quarter * 256 + lane * 8,
            self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16,
        )
        step = const_expr(self.warps * self.decoder.blob_bytes)
        count = (k_tiles - warp + (self.warps - 1)) // self.warps
        source = (x.toint(), first, m, k)
        if const_expr(self.spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            for s in cutlass.range_constexpr(self.stages - 1):
                if s < count:
                    self.fetch_weights(ring + s * self.stage_bytes, blob + s * step, offsets, lane)
            cute.arch.griddepcontrol_wait()
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                to = ring + s * self.stage_bytes
                if const_expr(not self.spec.overlap):
                    self.fetch_weights(to, blob + s * step, offsets, lane)
                self.fetch_tokens(to, source, warp + s * self.warps, lane)
            commit()
        parts = const_expr(self.slices * self.blocks)
        part = cutlass.min(warp, Int32(parts - 1))
        channel = row_tile * self.rows + part // self.blocks * 16
        token = first + part % self.blocks * 8
        vectors = [v.toint() for v in (row_scale, row_zero, bias, token_scale, token_sum)]
        # What this warp's part of the epilogue wants, long before it does, if registers hold it.
        if const_expr(self.busy):
            prefetch(row_scale.toint() + Int64(channel) * 4)
            if const_expr(self.integer):
                prefetch(row_zero.toint() + Int64(channel) * 4)
        else:
            rows, tokens = self.factors(vectors, channel, token, lane, m, n)

        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        blob += (self.stages - 1) * step
        kt = warp + (self.stages - 1) * self.warps
        stage, empty = Int32(0), Int32(self.stages - 1)
        lookup = self.lookup(ring, lane)
        for i in cutlass.range(count, unroll=1):
            wait(self.stages - 2)
            cute.arch.sync_warp()  # all lanes have read the stage that is filled now
            if i + (self.stages - 1) < count:
                to = ring + empty * self.stage_bytes
                self.fetch_weights(to, blob, offsets, lane)
                self.fetch_tokens(to, source, kt, lane)
                blob += step
                kt += self.warps
            commit()
            at = stage * self.stage_bytes
            self.multiply(acc, ring + at, lookup + at, lane, self.grid_at)
            empty = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)

        if const_expr(self.busy):
            rows, tokens = self.factors(vectors, channel, token, lane, m, n)
        # All rings are idle: the sums meet there.
        wait(0)
        cute.arch.sync_threads()
        self.leave(acc, base + warp * (parts * 512) + lane * 16)
        cute.arch.sync_threads()
        if warp < parts:
            here = base + warp * 512 + lane * 16
            self.add_up(here, rows, tokens, y, token + lane // 4, channel + lane % 4 * 2, m, n)

    def leave(self, acc, to):
        """A warp's sums, where those of others come to lie behind them."""
        for i in range(self.slices):
            for b in range(self.blocks):
                store_shared(to + (i * self.blocks + b) * 512, [acc[c, b, i] for c in range(4)])

    def add_up(self, at, rows, tokens, y, token, channel, end, n):
        """Add what the warps have left of 16 rows and 8 tokens, in their order, and write it."""
        total = [self.acc(0)] * 4
        for r in range(self.warps):
            more = load_shared(at, 4, r * self.slices * self.blocks * 512, True, self.acc)
            total = [a + b for a, b in zip(total, more, strict=True)]
        for v in range(2):
            self.store_pair(
                total[2 * v : 2 * v + 2], rows[v], tokens, y.toint(), token, channel + v * 8, end, n
            )

    @property
    def busy(self) -> bool:
        """Whether so many warps share a multiprocessor that each has few registers."""
        return self.warps * self.tile.ctas > NARROW_WARPS

    def factors(self, vectors, channel, token, lane, m, n):
        """What sums are multiplied by: of this lane's two rows, and of its two tokens.

        vectors: the addresses of scales and zeros of rows, bias, scales and sums of tokens.
        """
        row_scale, row_zero, bias, token_scale, token_sum = vectors
        rows = [
            self.row_values(row_scale, row_zero, bias, channel + v * 8 + lane // 4, n)
            for v in range(2)
        ]
        tokens = [
            self.token_values(token_scale, token_sum, token + lane % 4 * 2 + c, m) for c in range(2)
        ]
        return rows, tokens

    @property
    def grid_at(self) -> int:
        """Where grid words lie in a stage."""
        return self.slices * 256 * self.decoder.bits

    @cute.jit
    def fetch_weights(self, to, blob, offsets, lane):
        """Start the copies of a K tile's words of this warp's slices."""
        codes, rest, grids = offsets
        self.copy_words(to, lane, blob + codes, blob + rest, copy)
        if const_expr(self.grid_bytes):
            size = const_expr(self.slices * self.grid_bytes)
            for i in cutlass.range_constexpr(-(-size // 512)):
                copy_if(
                    to + self.grid_at + lane * 16, i * 512, blob + grids, i * 512,
                    lane * 16 < size - i * 512,
                )  # fmt: skip

    @cute.jit
    def fetch_tokens(self, to, source, kt, lane):
        """Start the copies of a K tile's tokens; there is nothing behind the last."""
        x, first, m, k = source
        column, row = lane % self.columns, lane // self.columns
        step = const_expr(32 // self.columns)
        at = kt * self.token_bytes + column * 16
        place = (row, column, at < k * self.width)  # numbers past K are zeros
        at += Int64(x)
        once = const_expr(step if self.busy else self.tokens)
        self.fetch_rows(to, at, place, source, 0, once)
        if const_expr(self.busy):  # noqa: SIM102 - known when it is compiled
            if first + step < m:  # seldom
                self.fetch_rows(to, at, place, source, step, self.tokens)

    @cute.jit
    def fetch_rows(
        self, to, at, place, source, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]
    ):
        """Start the copies of every so many tokens, which is one of each lane."""
        _, first, m, k = source
        row, column, inside = place
        for i in cutlass.range_constexpr(begin, end, 32 // self.columns):
            token = row + i
            into = to + self.x_at + token * self.token_bytes + (column ^ (token & 7)) * 16
            copy_or_zero(
                into, 0, at + Int64(first + token) * (k * self.width), 0,
                inside, first + token < m,
            )  # fmt: skip
