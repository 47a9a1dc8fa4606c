"""Up to 16 tokens: 16 to 64 rows a tile, whose warps split K; CTAs that stay, with equal shares.

A CTA has a list of units (tile, K tile); warp w of W multiplies units w, w + W, ... from a ring of
its own, so that no barrier stands in the loop. The ring runs on where a tile ends: the next tile's
weights are on their way while the sums of this one meet in shared memory, where they are added in
the order of warps.

A CTA has one tile, or, if CTAs stay, each has the same number of whole tiles. What does not divide
comes first: those tiles' units are divided evenly, so a tile may belong to several CTAs. The last
of them to arrive adds their sums in the order of CTAs: results do not change from run to run. Its
waiting for memory hides under the whole tiles.

With few tokens, time is that of reading the weights: all rings together keep enough bytes on their
way. A launch that may overlap the previous kernel fetches weights at once, and tokens after that
kernel has finished.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import load_shared, store_shared
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import (
    commit,
    copy,
    copy_if,
    count_up,
    fence,
    load_l2,
    store_global,
    wait,
)
from anybit.kernels.mma.tiles import Kernel


class Narrow(Product):
    ring_threads = 32

    def __init__(self, spec: Kernel):
        super().__init__(spec)
        self.parts = self.slices * self.blocks  # of a tile's sums: 16 rows of 8 tokens
        self.rounds = -(-self.parts // self.warps)  # of warps, to finish all parts
        self.step = self.warps * self.decoder.blob_bytes

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
        m: Int32,
        n: Int32,
        k: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        base = Int32(shared.data.data_ptr().toint())
        ring = base + warp * (self.stages * self.stage_bytes)

        k_tiles = k // K_TILE
        m_tiles = (m + (self.tokens - 1)) // self.tokens
        tiles = (n + (self.rows - 1)) // self.rows * m_tiles
        common = tiles % ctas  # tiles whose units are divided
        each, more = common * k_tiles // ctas, common * k_tiles % ctas
        piece = each + (1 if cta < more else 0)
        count = piece + tiles // ctas * k_tiles
        share = (cta, ctas, common, cta * each + cutlass.min(cta, more), piece, k_tiles)
        operands = (x.toint(), w.toint(), m, k, m_tiles, k_tiles)
        results = (row_scale.toint(), row_zero.toint(), token_scale.toint(), token_sum.toint(),
                   bias.toint(), y.toint(), work.toint(), counters.toint())  # fmt: skip

        fixed = (operands, share, lane)
        ahead = self.begin(warp, fixed)
        if const_expr(self.spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            for s in cutlass.range_constexpr(self.stages - 1):
                if ahead[0] < count:
                    self.fetch_weights(ring + s * self.stage_bytes, ahead, lane)
                    ahead = self.following(ahead, fixed)
            cute.arch.griddepcontrol_wait()
            ahead = self.begin(warp, fixed)
        for s in cutlass.range_constexpr(self.stages - 1):
            if ahead[0] < count:
                to = ring + s * self.stage_bytes
                if const_expr(not self.spec.overlap):
                    self.fetch_weights(to, ahead, lane)
                self.fetch_tokens(to, ahead, operands, lane)
                ahead = self.following(ahead, fixed)
            commit()

        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        stage, empty = Int32(0), Int32(self.stages - 1)
        lookup = self.lookup(ring, lane)
        at, mine = Int32(0), warp  # this tile's first unit, and this warp's next one
        while at < count:
            tile, start, end = self.locate(at, share)
            # What this warp's parts of the epilogue want, long before it does.
            places = [self.place(warp + i * self.warps, tile, m_tiles) for i in range(self.rounds)]
            values = [self.values(results, *place, lane, m, n) for place in places]
            acc.fill(0)
            while mine < end:
                wait(self.stages - 2)
                cute.arch.sync_warp()  # all lanes have read the stage that is filled now
                if ahead[0] < count:
                    to = ring + empty * self.stage_bytes
                    self.fetch_weights(to, ahead, lane)
                    self.fetch_tokens(to, ahead, operands, lane)
                    ahead = self.following(ahead, fixed)
                commit()
                place = stage * self.stage_bytes
                self.multiply(acc, ring + place, lookup + place, lane, self.grid_at)
                empty = stage
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                mine += self.warps
            self.meet(acc, base, warp, lane)
            for i in cutlass.range_constexpr(self.rounds):
                part = warp + i * self.warps
                if part < self.parts:
                    total = self.total(base, part, lane)
                    whole = Int32(1)
                    if const_expr(self.tile.stay):
                        span = (tile, start, start + (end - at), each, more)
                        whole = self.join(total, results, share, span, part, lane)
                    if whole > 0:
                        self.store(total, values[i], *places[i], results, lane, m, n)
            at = end

    @property
    def grid_at(self) -> int:
        """Where grid words lie in a stage."""
        return self.slices * 256 * self.decoder.bits

    # A CTA's list of units: a piece of the tiles that are divided, then whole tiles.

    @cute.jit
    def locate(self, unit, share):
        """(tile, K tile, the list's first unit behind this tile) of a unit of the list."""
        cta, ctas, common, first, piece, k_tiles = share
        tile, kt, end = Int32(0), Int32(0), piece
        if unit < piece:
            tile, kt = (first + unit) // k_tiles, (first + unit) % k_tiles
            end = cutlass.min(piece, unit + (k_tiles - kt))
        else:
            whole = unit - piece
            tile, kt = common + cta + whole // k_tiles * ctas, whole % k_tiles
            end = unit + (k_tiles - kt)
        return tile, kt, end

    @cute.jit
    def begin(self, unit, fixed):
        """What a warp fetches for a unit, where it enters a tile.

        Returns:
            The unit, its K tile, the list's first unit behind its tile, the tile's first token, the
            blob, and where this lane reads in it. A tile's rows are slices of 16 of a blob, which
            has two times four.
        """
        (_, w, _, _, m_tiles, k_tiles), share, lane = fixed
        tile, kt, end = self.locate(unit, share)
        slot = tile // m_tiles * self.slices
        group, quarter = slot // 4 % 2, slot % 4
        blob = Int64(w) + Int64(slot // 8 * k_tiles + kt) * self.decoder.blob_bytes
        codes = group * (512 * self.words) + quarter * 512 + lane * 16
        rest = group * (512 * self.words) + self.whole * 2048 + quarter * 256 + lane * 8
        grids = self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16
        return unit, kt, end, tile % m_tiles * self.tokens, blob, codes, rest, grids

    @cute.jit
    def following(self, ahead, fixed):
        """What a warp fetches next."""
        unit, kt, end, first, blob, codes, rest, grids = ahead
        unit += self.warps
        kt += self.warps
        blob += self.step
        if unit >= end:
            unit, kt, end, first, blob, codes, rest, grids = self.begin(unit, fixed)
        return unit, kt, end, first, blob, codes, rest, grids

    # Fetching.

    @cute.jit
    def fetch_weights(self, to, ahead, lane):
        """Start the copies of a K tile's words of this warp's slices."""
        _, _, _, _, blob, codes, rest, grids = ahead
        self.copy_words(to, lane, blob + codes, blob + rest, copy)
        if const_expr(self.grid_bytes):
            size = const_expr(self.slices * self.grid_bytes)
            for i in cutlass.range_constexpr(-(-size // 512)):
                copy_if(
                    to + self.grid_at + lane * 16, i * 512, blob + grids, i * 512,
                    lane * 16 < size - i * 512,
                )  # fmt: skip

    @cute.jit
    def fetch_tokens(self, to, ahead, operands, lane):
        """Start the copies of a K tile's tokens; there is nothing behind the last."""
        x, _, m, k, _, _ = operands
        _, kt, _, first, _, _, _, _ = ahead
        column, row = lane % self.columns, lane // self.columns
        step = const_expr(32 // self.columns)
        at = Int64(x) + (kt * self.token_bytes + column * 16)
        for i in cutlass.range_constexpr(-(-self.tokens // step)):
            token = row + i * step
            into = to + self.x_at + token * self.token_bytes + (column ^ (token & 7)) * 16
            copy_if(into, 0, at + Int64(first + token) * (k * self.width), 0, first + token < m)

    # Finishing.

    def place(self, part, tile, m_tiles):
        """(first channel, first token) of a tile's part; of the last one if there are fewer."""
        part = cutlass.min(part, Int32(self.parts - 1))
        channel = tile // m_tiles * self.rows + part // self.blocks * 16
        return channel, tile % m_tiles * self.tokens + part % self.blocks * 8

    @cute.jit
    def values(self, results, channel, token, lane, m, n):
        """Scales and the like of this lane's two rows and two tokens."""
        row_scale, row_zero, token_scale, token_sum, bias, _, _, _ = results
        rows = [
            self.row_values(row_scale, row_zero, bias, channel + v * 8 + lane // 4, n)
            for v in range(2)
        ]
        tokens = [
            self.token_values(token_scale, token_sum, token + lane % 4 * 2 + c, m) for c in range(2)
        ]
        return rows, tokens

    @cute.jit
    def meet(self, acc, base, warp, lane):
        """All warps' sums of a tile to shared memory."""
        if const_expr(not self.tile.stay):
            wait(0)  # all rings are idle: the sums meet there
        cute.arch.sync_threads()  # and the sums of the tile before have been read
        mine = base + (self.sums_at + warp * (self.parts * 512)) + lane * 16
        for i in cutlass.range_constexpr(self.slices):
            for b in cutlass.range_constexpr(self.blocks):
                store_shared(mine + (i * self.blocks + b) * 512, [acc[c, b, i] for c in range(4)])
        cute.arch.sync_threads()

    @property
    def sums_at(self) -> int:
        """Where the sums meet: behind all rings if those are in use."""
        return self.warps * self.stages * self.stage_bytes if self.tile.stay else 0

    @cute.jit
    def total(self, base, part, lane):
        """A part of a tile's sums, added in the order of warps."""
        total = cute.make_rmem_tensor((4,), self.acc)
        total.fill(0)
        at = base + (self.sums_at + part * 512) + lane * 16
        for r in cutlass.range_constexpr(self.warps):
            more = load_shared(at, 4, r * self.parts * 512, True, self.acc)
            for c in cutlass.range_constexpr(4):
                total[c] = total[c] + more[c]
        return total

    @cute.jit
    def join(self, total, results, share, span, part, lane):
        """Whether this CTA finishes a part: alone, or as the last, with the sums of all."""
        cta, _, _, _, _, k_tiles = share
        tile, start, end, each, more = span
        whole = Int32(1)
        if (start > 0) | (end < k_tiles):
            work = Int64(results[6]) + part * 512 + lane * 16
            counter = Int64(results[7]) + (tile * self.parts + part) * 4
            size = const_expr(self.parts * 512)
            # Two places a CTA: for the tile that it begins, and for one that began before it.
            slot = cta * 2 + (1 if start == 0 else 0)
            store_global(work + Int64(slot) * size, [total[c] for c in range(4)])
            fence()
            cute.arch.sync_warp()
            before = Int32(0)
            if lane == 0:
                before = count_up(counter)
            before = cute.arch.make_warp_uniform(before)
            low = self.owner(tile * k_tiles, each, more)
            high = self.owner((tile + 1) * k_tiles - 1, each, more)
            whole = Int32(0)
            if before == high - low:
                whole = Int32(1)
                fence()
                if lane == 0:
                    store_global(counter, [Uint32(0)])
                total.fill(0)
                for c in cutlass.range(low, high + 1, unroll=1):
                    slot = c * 2 + (1 if c == low else 0)
                    there = load_l2(work + Int64(slot) * size, 4, self.acc)
                    for j in cutlass.range_constexpr(4):
                        total[j] = total[j] + there[j]
        return whole

    @cute.jit
    def store(self, total, values, channel, token, results, lane, m, n):
        """Finish 16 rows of 8 tokens."""
        rows, tokens = values
        for v in cutlass.range_constexpr(2):
            self.store_pair(
                [total[2 * v], total[2 * v + 1]], rows[v], tokens, results[5],
                token + lane // 4, channel + v * 8 + lane % 4 * 2, m, n,
            )  # fmt: skip

    @cute.jit
    def owner(self, unit, each, more):
        """The CTA that multiplies a unit of the divided tiles."""
        edge = more * (each + 1)
        out = unit // (each + 1)
        if unit >= edge:
            out = more + (unit - edge) // each
        return out
