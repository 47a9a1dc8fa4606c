"""More than 16 tokens: tiles of 128 rows, whose K range CTAs may share (stream-K).

A ring of K tiles is filled by `cp.async`: every thread copies the 16 bytes that itself will decode,
and all share the tokens. One barrier a K tile.

A CTA multiplies a contiguous range of (tile, K tile) units, so that any number of CTAs is balanced.
A tile that several CTAs share is finished by the last of them to arrive, which adds their sums in
the order of CTAs: results do not change from run to run. With as many CTAs as tiles it is a plain
GEMM, and the workspace is not touched.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.last import arrives_last
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.cute.ptx import load_l2, store_global
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import commit, copy, copy_if, copy_or_zero, wait
from anybit.kernels.mma.tiles import FLAG, Kernel


def padded(n):
    """Rows of a packed weight."""
    return (n + (ROW_MULTIPLE - 1)) // ROW_MULTIPLE * ROW_MULTIPLE


class Gemm(Product):
    def __init__(self, spec: Kernel):
        super().__init__(spec)
        self.ring_threads = self.threads
        self.grid_at = self.threads * self.slices * 8 * self.decoder.bits

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
        place = (thread, warp, thread % 32)
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        base = Int32(shared.data.data_ptr().toint())

        k_tiles = (k + (K_TILE - 1)) // K_TILE
        table = base + self.stage_bytes * self.stages + FLAG
        m_tiles = self.begin(starts, experts, m, table, thread)
        n_tiles = (n + (self.rows - 1)) // self.rows
        units = m_tiles * n_tiles * k_tiles
        ctas = self.busy(units, ctas)
        each, more = units // ctas, units % ctas
        unit = cta * each + cutlass.min(cta, more)
        count = each + (1 if cta < more else 0)
        if cta >= ctas:
            count = Int32(0)
        tile, start = unit // k_tiles, unit % k_tiles

        sizes = (m, n, k, k_tiles, m_tiles, experts, (starts, table))
        operands = (x.toint(), w.toint())
        results = (row_scale.toint(), row_zero.toint(), token_scale.toint(), token_sum.toint(),
                   bias.toint(), y.toint(), work.toint(), counters.toint())  # fmt: skip
        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        # What is fetched next: tile, K tile, blob of this warp, tokens from this thread's first on.
        next_tile, next_k = tile, start
        blob, token, last = self.source(operands, sizes, place, next_tile, next_k)
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                to = base + s * self.stage_bytes
                self.fetch(to, blob, token, last, next_k, operands, sizes, place)
                next_tile, next_k, blob, token, last = self.following(
                    next_tile, next_k, blob, token, last, operands, sizes, place
                )
            commit()

        lookup = self.lookup(base, thread % 32)
        grids = self.grid_at + warp * (self.slices * self.grid_bytes)
        at_k, stage, empty = start, Int32(0), Int32(self.stages - 1)
        for i in cutlass.range(count, unroll=1):
            wait(self.stages - 2)
            cute.arch.sync_threads()
            if i + (self.stages - 1) < count:
                to = base + empty * self.stage_bytes
                self.fetch(to, blob, token, last, next_k, operands, sizes, place)
                next_tile, next_k, blob, token, last = self.following(
                    next_tile, next_k, blob, token, last, operands, sizes, place
                )
            commit()
            at = stage * self.stage_bytes
            self.multiply(acc, base + at, lookup + at, thread, grids)
            empty = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
            at_k += 1
            if (at_k == k_tiles) | (i == count - 1):
                split = (cta, each, more, start, at_k)
                self.finish(acc, results, sizes, place, base, tile, split)
                acc.fill(0)
                start, at_k = Int32(0), Int32(0)
                tile += 1

    # Tiles: here of one weight, in `experts.py` of many.

    def begin(self, starts, experts, m, table, thread):
        """How many tiles the tokens make."""
        return (m + (self.tokens - 1)) // self.tokens

    def busy(self, units, ctas):
        """CTAs that share the units."""
        return ctas

    def locate(self, tile, sizes):
        """A tile's (row tile, expert, first token, last token + 1)."""
        m, _, _, _, m_tiles, _, _ = sizes
        return tile // m_tiles, 0, tile % m_tiles * self.tokens, m

    # Fetching.

    @cute.jit
    def source(self, operands, sizes, place, tile, kt):
        """(address of the warp's blob, first token of this thread, last + 1) of a unit."""
        thread, warp, _ = place
        _, n, _, k_tiles, _, _, _ = sizes
        row_tile, expert, first, last = self.locate(tile, sizes)
        row = row_tile * (self.rows // ROWS) + warp * self.slices // 8
        row += expert * (padded(n) // ROWS)
        blob = Int64(operands[1]) + Int64(row * k_tiles + kt) * self.decoder.blob_bytes
        return blob, first + thread // self.columns, last

    @cute.jit
    def following(self, tile, kt, blob, token, last, operands, sizes, place):
        """The unit after this one: (tile, K tile, blob, token, last)."""
        kt += 1
        blob += self.decoder.blob_bytes
        if kt == sizes[3]:
            kt = Int32(0)
            tile += 1
            blob, token, last = self.source(operands, sizes, place, tile, kt)
        return tile, kt, blob, token, last

    @cute.jit
    def fetch(self, to, blob, first, last, kt, operands, sizes, place):
        """Start the copies of a K tile: this thread's words, its share of grids and of tokens."""
        thread, warp, lane = place
        k = sizes[2]
        group, quarter = warp * self.slices // 4 % 2, warp * self.slices % 4
        codes = blob + group * (512 * self.words)
        rest = codes + self.whole * 2048 + (quarter * 256 + lane * 8)
        self.copy_words(to, thread, codes + (quarter * 512 + lane * 16), rest, copy)
        if const_expr(self.grid_bytes):  # contiguous for the warp's slices
            size = const_expr(self.slices * self.grid_bytes)
            grid = blob + (self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16)
            into = to + (self.grid_at + warp * size) + lane * 16
            for i in cutlass.range_constexpr(-(-size // 512)):
                copy_if(into, i * 512, grid, i * 512, lane * 16 < size - i * 512)
        column, row = thread % self.columns, thread // self.columns
        step = const_expr(self.threads // self.columns)  # tokens apart: a multiple of 8
        into = to + (self.x_at + row * self.token_bytes + (column ^ (row & 7)) * 16)
        at = kt * self.token_bytes + column * 16
        inside = at < k * self.width  # numbers past K are zeros
        at += Int64(operands[0])
        for i in cutlass.range_constexpr(-(-self.tokens // step)):
            token = first + i * step
            copy_or_zero(
                into, i * step * self.token_bytes, at + Int64(token) * (k * self.width), 0,
                inside, (token < last) & (row + i * step < self.tokens),
            )  # fmt: skip

    # Finishing.

    @cute.jit
    def owner(self, unit, each, more):
        """The CTA that multiplies a unit."""
        edge = more * (each + 1)
        out = unit // (each + 1)
        if unit >= edge:
            out = more + (unit - edge) // each
        return out

    @cute.jit
    def finish(self, acc, results, sizes, place, base, tile, split):
        """Share a tile's sums if need be; the last CTA that has some finishes it."""
        thread, _, _ = place
        k_tiles = sizes[3]
        cta, each, more, start, end = split
        mine = Int32(1)
        if (start > 0) | (end < k_tiles):
            size = const_expr(self.threads * self.blocks * self.slices * 16)
            low = self.owner(tile * k_tiles, each, more)
            high = self.owner((tile + 1) * k_tiles - 1, each, more)
            # A CTA begins one tile at most that others end: the counter is that of the first.
            work, counter = Int64(results[6]), Int64(results[7]) + low * 4
            # Two places a CTA: for the tile that it begins, and for one that began before it.
            slot = cta * 2 + (1 if start == 0 else 0)
            into = work + Int64(slot) * size + thread * 16
            for i in cutlass.range_constexpr(self.slices):
                for b in cutlass.range_constexpr(self.blocks):
                    store_global(
                        into + (i * self.blocks + b) * (self.threads * 16),
                        [acc[c, b, i] for c in range(4)],
                    )
            flag = base + self.stage_bytes * self.stages
            mine = Int32(0)
            if arrives_last(flag, counter, high - low + 1, thread):
                mine = Int32(1)
                acc.fill(0)
                for c in cutlass.range(low, high + 1, unroll=1):
                    slot = c * 2 + (1 if c == low else 0)
                    at = work + Int64(slot) * size + thread * 16
                    for i in cutlass.range_constexpr(self.slices):
                        for b in cutlass.range_constexpr(self.blocks):
                            part = load_l2(
                                at + (i * self.blocks + b) * (self.threads * 16), 4, self.acc
                            )
                            for j in cutlass.range_constexpr(4):
                                acc[j, b, i] = acc[j, b, i] + part[j]
        if mine > 0:
            self.store(acc, results, sizes, place, tile)

    @cute.jit
    def store(self, acc, results, sizes, place, tile):
        """Finish this warp's rows of every token."""
        _, warp, lane = place
        m, n, _, _, _, _, _ = sizes
        row_scale, row_zero, token_scale, token_sum, bias, y, _, _ = results
        row_tile, expert, first, last = self.locate(tile, sizes)
        channel = row_tile * self.rows + warp * (16 * self.slices)
        before = Int64(expert * padded(n)) * 4  # bytes of a number of each row
        row_scale, row_zero = row_scale + before, row_zero + before
        rows = [
            self.row_values(row_scale, row_zero, bias, channel + i * 8 + lane // 4, n)
            for i in range(2 * self.slices)
        ]
        for b in cutlass.range_constexpr(self.blocks):
            token = first + b * 8
            tokens = [
                self.token_values(token_scale, token_sum, token + lane % 4 * 2 + c, m)
                for c in range(2)
            ]
            for i in cutlass.range_constexpr(2 * self.slices):
                sums = [acc[2 * (i % 2) + c, b, i // 2] for c in range(2)]
                self.store_pair(
                    sums, rows[i], tokens, y, token + lane // 4,
                    channel + i * 8 + lane % 4 * 2, last, n,
                )  # fmt: skip
