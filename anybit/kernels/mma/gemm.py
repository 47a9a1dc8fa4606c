"""More than 16 tokens: tiles of 128 rows, whose K range CTAs may share (stream-K).

A ring of K tiles is filled by `cp.async`: every thread copies the 16 bytes that itself will decode,
and all share the tokens. One barrier a K tile.

A CTA multiplies a contiguous range of (tile, K tile) units, so that any number of CTAs is balanced.
A tile that several CTAs share is finished by the last of them to arrive, which adds their sums in
the order of CTAs: results do not change from run to run. With as many CTAs as tiles it is a plain
GEMM, and the workspace is not touched.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from anybit.kernels.cute.copies import commit, copy, copy_if, copy_or_zero, wait
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.last import arrives_last
from anybit.kernels.cute.launch import ProductArguments
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.cute.ptx import load_l2, store_global
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.tiles import FLAG, Kernel

# What does not change while a CTA multiplies: `table` is what `experts.py` counts; a CTA has `each`
# units, and one more if it is one of the first `more`.
Job = namedtuple("Job", "given k_tiles m_tiles table thread warp lane cta each more")


# Where a tile lies: its rows, and its tokens from `first` on, before `end`.
Located = namedtuple("Located", "row_tile expert first end")


# A K tile of a tile, as a thread fetches it: its warp's blob, its first token, before `end`.
Unit = namedtuple("Unit", "tile kt blob token end")


def padded(n):
    """Rows of a packed weight."""
    return (n + (ROW_MULTIPLE - 1)) // ROW_MULTIPLE * ROW_MULTIPLE


class Gemm(Product):
    def __init__(self, spec: Kernel):
        super().__init__(spec)
        self.ring_threads = self.threads
        self.grid_at = self.threads * self.slices * 8 * self.decoder.bits

    @cute.kernel
    def kernel(self, given: ProductArguments):
        thread, cta, ctas, warp, lane, base = self.who()
        base = self.place_table(base)
        self.store_table(self.load_table(given, thread), thread)

        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        table = base + self.stage_bytes * self.stages + FLAG
        m_tiles = self.begin(given, table, thread)
        n_tiles = (given.n + (self.rows - 1)) // self.rows
        units = m_tiles * n_tiles * k_tiles
        ctas = self.sharers(units, ctas)
        each, more = units // ctas, units % ctas
        unit = cta * each + cutlass.min(cta, more)
        count = each + (1 if cta < more else 0)
        if cta >= ctas:
            count = Int32(0)
        tile, start = unit // k_tiles, unit % k_tiles

        job = Job(given, k_tiles, m_tiles, table, thread, warp, lane, cta, each, more)
        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        ahead = self.unit_at(tile, start, job)  # what is fetched next
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                self.fetch(base + s * self.stage_bytes, ahead, job)
                ahead = self.following(ahead, job)
            commit()

        lookup = self.lookup(base, thread % 32)
        grids = self.grid_at + warp * (self.slices * self.grid_bytes)
        at_k, stage, empty = start, Int32(0), Int32(self.stages - 1)
        for i in cutlass.range(count, unroll=1):
            wait(self.stages - 2)
            cute.arch.sync_threads()
            if i + (self.stages - 1) < count:
                self.fetch(base + empty * self.stage_bytes, ahead, job)
                ahead = self.following(ahead, job)
            commit()
            at = stage * self.stage_bytes
            self.multiply(acc, base + at, lookup + at, thread, grids)
            empty = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
            at_k += 1
            if (at_k == k_tiles) | (i == count - 1):
                self.finish(acc, job, base, tile, start, at_k)
                acc.fill(0)
                start, at_k = Int32(0), Int32(0)
                tile += 1

    # Tiles: here of one weight, in `experts.py` of many.

    def begin(self, given, table, thread):
        """How many tiles the tokens make."""
        return (given.m + (self.tokens - 1)) // self.tokens

    def sharers(self, units, ctas):
        """CTAs that share the units."""
        return ctas

    def locate(self, tile, job):
        """Where a tile lies."""
        return Located(tile // job.m_tiles, 0, tile % job.m_tiles * self.tokens, job.given.m)

    # Fetching.

    @cute.jit
    def unit_at(self, tile, kt, job):
        """A K tile of a tile, to be fetched."""
        found = self.locate(tile, job)
        row = found.row_tile * (self.rows // ROWS) + job.warp * self.slices // 8
        row += found.expert * (padded(job.given.n) // ROWS)
        blob = job.given.w.toint() + Int64(row * job.k_tiles + kt) * self.decoder.blob_bytes
        return Unit(tile, kt, blob, found.first + job.thread // self.columns, found.end)

    @cute.jit
    def following(self, unit, job):
        """The unit after this one."""
        kt, blob = unit.kt + 1, unit.blob + self.decoder.blob_bytes
        unit = unit._replace(kt=kt, blob=blob)
        if kt == job.k_tiles:
            unit = self.unit_at(unit.tile + 1, Int32(0), job)
        return unit

    @cute.jit
    def fetch(self, to, unit, job):
        """Start the copies of a K tile: this thread's words, its share of grids and of tokens."""
        thread, warp, lane, k = job.thread, job.warp, job.lane, job.given.k
        group, quarter = warp * self.slices // 4 % 2, warp * self.slices % 4
        codes = unit.blob + group * (512 * self.words)
        rest = codes + self.whole * 2048 + (quarter * 256 + lane * 8)
        self.copy_words(to, thread, codes + (quarter * 512 + lane * 16), rest, copy)
        if const_expr(self.grid_bytes):  # contiguous for the warp's slices
            size = const_expr(self.slices * self.grid_bytes)
            place = self.code_bytes + (group * 4 + quarter) * self.grid_bytes + lane * 16
            grid = unit.blob + place
            into = to + (self.grid_at + warp * size) + lane * 16
            for i in cutlass.range_constexpr(-(-size // 512)):
                copy_if(into, i * 512, grid, i * 512, lane * 16 < size - i * 512)
        column, row = thread % self.columns, thread // self.columns
        step = const_expr(self.threads // self.columns)  # tokens apart: a multiple of 8
        into = to + (self.x_at + row * self.token_bytes + (column ^ (row & 7)) * 16)
        at = unit.kt * self.token_bytes + column * 16
        inside = at < k * self.width  # numbers past K are zeros
        at += job.given.x.toint()
        for i in cutlass.range_constexpr(-(-self.tokens // step)):
            token = unit.token + i * step
            copy_or_zero(
                into,
                i * step * self.token_bytes,
                at + Int64(token) * (k * self.width),
                0,
                inside,
                (token < unit.end) & (row + i * step < self.tokens),
            )

    # Finishing.

    @cute.jit
    def owner(self, unit, job):
        """The CTA that multiplies a unit."""
        edge = job.more * (job.each + 1)
        out = unit // (job.each + 1)
        if unit >= edge:
            out = job.more + (unit - edge) // job.each
        return out

    @cute.jit
    def finish(self, acc, job, base, tile, start, end):
        """Share a tile's sums if need be; the last CTA that has some finishes it.

        The sums are of K tiles `start` to `end`.
        """
        mine = Int32(1)
        if (start > 0) | (end < job.k_tiles):
            size = const_expr(self.threads * self.blocks * self.slices * 16)
            low = self.owner(tile * job.k_tiles, job)
            high = self.owner((tile + 1) * job.k_tiles - 1, job)
            # A CTA begins one tile at most that others end: the counter is that of the first.
            work, counter = job.given.work.toint(), job.given.counters.toint() + Int64(low * 4)
            # Two places a CTA: for the tile that it begins, and for one that began before it.
            slot = job.cta * 2 + (1 if start == 0 else 0)
            into = work + Int64(slot) * size + job.thread * 16
            for i in cutlass.range_constexpr(self.slices):
                for b in cutlass.range_constexpr(self.blocks):
                    store_global(
                        into + (i * self.blocks + b) * (self.threads * 16),
                        [acc[c, b, i] for c in range(4)],
                    )
            flag = base + self.stage_bytes * self.stages
            mine = Int32(0)
            if arrives_last(flag, counter, high - low + 1, job.thread):
                mine = Int32(1)
                acc.fill(0)
                for c in cutlass.range(low, high + 1, unroll=1):
                    slot = c * 2 + (1 if c == low else 0)
                    at = work + Int64(slot) * size + job.thread * 16
                    for i in cutlass.range_constexpr(self.slices):
                        for b in cutlass.range_constexpr(self.blocks):
                            part = load_l2(
                                at + (i * self.blocks + b) * (self.threads * 16), 4, self.acc
                            )
                            for j in cutlass.range_constexpr(4):
                                acc[j, b, i] = acc[j, b, i] + part[j]
        if mine > 0:
            self.store(acc, job, tile)

    @cute.jit
    def store(self, acc, job, tile):
        """Finish this warp's rows of every token."""
        given, lane, found = job.given, job.lane, self.locate(tile, job)
        channel = found.row_tile * self.rows + job.warp * (16 * self.slices)
        before = Int64(found.expert * padded(given.n)) * 4  # bytes of a number of each row
        rows = [
            self.row_values(given, before, channel + i * 8 + lane // 4)
            for i in range(2 * self.slices)
        ]
        for b in cutlass.range_constexpr(self.blocks):
            token = found.first + b * 8
            tokens = self.two_tokens(given, token + lane % 4 * 2)
            for i in cutlass.range_constexpr(2 * self.slices):
                sums = [acc[2 * (i % 2) + c, b, i // 2] for c in range(2)]
                at, column = token + lane // 4, channel + i * 8 + lane % 4 * 2
                self.store_pair(given, sums, rows[i], tokens, at, column, found.end)
