"""Few tokens: 1 to 16 of them and 16 to 128 rows a CTA, whose warps split K; CTAs share nothing.

Warp w of W multiplies K tiles w, w + W, ... from a ring of its own, so that no barrier stands in
the loop. The sums meet in shared memory and are added in the order of warps.

With few tokens, time is that of reading the weights: all rings together keep enough bytes on their
way. A launch that may overlap the previous kernel fetches weights at once, and tokens after that
kernel has finished.
"""

from collections import namedtuple
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.copies import commit, copy, copy_if, copy_or_zero, wait
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import lane, load_shared, shuffle, store_shared
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import prefetch
from anybit.kernels.mma.tiles import NARROW_WARPS

# Where the first 16 bytes (8 of `rest`) that a lane copies lie in a blob.
Pieces = namedtuple("Pieces", "codes rest grids")

# The same of each slice, beyond the first one's blob: slices that may lie in two blobs.
Apart = namedtuple("Apart", "slices")


# Tokens of a K tile, as a lane copies them: the address of its piece of token 0, its first token,
# its piece, whether that lies before the end of K; tokens from `first` to `end`, of `k` numbers.
Lot = namedtuple("Lot", "at row column inside first end k")


class Narrow(Product):
    ring_threads = 32
    quantizes = False  # a token that comes in 16 bits

    @cute.kernel
    def kernel(self, given: Any):
        thread, tile, _, warp, lane, base = self.who()
        base = self.place_table(base)
        ring = base + warp * (self.stages * self.stage_bytes)
        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        m_tiles = (given.m + (self.tokens - 1)) // self.tokens
        row_tile, first = tile // m_tiles, tile % m_tiles * self.tokens

        blob, pieces = self.weights(given, row_tile, warp, lane)
        step = const_expr(self.warps * self.k_tile_bytes)
        count = (k_tiles - warp + (self.warps - 1)) // self.warps
        end = given.m
        if const_expr(self.tokens < 8):
            end = cutlass.min(end, first + self.tokens)
        words = self.load_table(given, thread)
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            for s in cutlass.range_constexpr(self.stages - 1):
                if s < count:
                    self.fetch_weights(ring + s * self.stage_bytes, blob + s * step, pieces, lane)
                if const_expr(self.quantizes):
                    commit()
            self.store_table(words, thread)
            cute.arch.griddepcontrol_wait()
        else:
            self.store_table(words, thread)
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < count:
                to = ring + s * self.stage_bytes
                if const_expr(not self.overlap):
                    self.fetch_weights(to, blob + s * step, pieces, lane)
                self.fetch_tokens(to, given, first, end, warp + s * self.warps, lane)
            if const_expr(not (self.quantizes and self.overlap)):
                commit()
        if const_expr(self.quantizes):
            self.quantize(given, warp, lane)
        parts = const_expr(self.slices * self.blocks)
        part = cutlass.min(warp, Int32(parts - 1))
        channel = row_tile * self.rows + part // self.blocks * 16
        scaled = channel if self.whole_blobs else cutlass.min(channel, (given.n - 1) // 16 * 16)
        token = first + part % self.blocks * 8
        # What this warp's part of the epilogue wants, long before it does, if registers hold it.
        if const_expr(self.crowded):
            prefetch(given.row_scale.toint() + Int64(scaled) * 4)
            if const_expr(self.integer):
                prefetch(given.row_zero.toint() + Int64(scaled) * 4)
        else:
            rows, tokens = self.factors(given, Int64(0), scaled, token, lane)

        acc = cute.make_rmem_tensor((4, self.blocks, self.slices), self.acc)
        acc.fill(0)
        blob += (self.stages - 1) * step
        kt = warp + (self.stages - 1) * self.warps
        stage, empty = Int32(0), Int32(self.stages - 1)
        lookup = self.lookup(ring, lane)
        if const_expr(self.decoder.table_bytes):
            cute.arch.sync_threads()
        for i in cutlass.range(count, unroll=1):
            wait(self.stages - 2)
            cute.arch.sync_warp()  # all lanes have read the stage that is filled now
            if i + (self.stages - 1) < count:
                to = ring + empty * self.stage_bytes
                self.fetch_weights(to, blob, pieces, lane)
                self.fetch_tokens(to, given, first, end, kt, lane)
                blob += step
                kt += self.warps
            commit()
            at = stage * self.stage_bytes
            row = lookup + at
            if const_expr(self.quantizes):
                row = lookup + (warp + i * self.warps) * self.token_bytes
            self.multiply(acc, ring + at, row, lane, self.grid_at)
            empty = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)

        if const_expr(self.crowded):
            rows, tokens = self.factors(given, Int64(0), scaled, token, lane)
        # All rings are idle: the sums meet there.
        wait(0)
        cute.arch.sync_threads()
        self.leave(acc, base + warp * (parts * 512) + lane * 16)
        cute.arch.sync_threads()
        if warp < parts:
            here = base + warp * 512 + lane * 16
            self.add_up(given, here, rows, tokens, token + lane // 4, channel + lane % 4 * 2, end)

    def leave(self, acc, to):
        """A warp's sums, where those of others come to lie behind them."""
        for i in range(self.slices):
            for b in range(self.blocks):
                store_shared(to + (i * self.blocks + b) * 512, [acc[c, b, i] for c in range(4)])

    def add_up(self, given, at, rows, tokens, token, channel, end):
        """Add what the warps have left of 16 rows and 8 tokens, in their order, and write it."""
        total = self.total(at)
        for v in range(2):
            two = total[2 * v : 2 * v + 2]
            self.store_pair(given, two, rows[v], tokens, token, channel + v * 8, end)

    def total(self, at):
        """The sum of what the warps have left, from the first one's on."""
        total = [self.acc(0)] * 4
        for r in range(self.warps):
            more = load_shared(at, 4, r * self.slices * self.blocks * 512, True, self.acc)
            total = [a + b for a, b in zip(total, more, strict=True)]
        if self.dotted:
            for apart in (1, 2):
                lanes = Uint32(lane() ^ apart)
                total = [t + Int32(shuffle(Uint32(t), lanes)) for t in total]
        return total

    @property
    def crowded(self) -> bool:
        """Whether a warp has few registers left: of many warps, or beside many rows."""
        return self.warps * self.tile.ctas > NARROW_WARPS or self.slices > 4

    def factors(self, given, before, channel, token, lane):
        """What sums are multiplied by: of this lane's two rows, and of its two tokens."""
        rows = [self.row_values(given, before, channel + v * 8 + lane // 4) for v in range(2)]
        return rows, self.two_tokens(given, token + lane % 4 * 2)

    @property
    def k_tile_bytes(self) -> int:
        """From a K tile's weights to the next one's."""
        return self.decoder.blob_bytes

    def weights(self, given, row_tile, warp, lane):
        """Where a warp's first blob lies, and in it slices of 16 rows: it has two times four."""
        slot = row_tile * self.slices
        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        blob = given.w.toint() + Int64(slot // 8 * k_tiles + warp) * self.k_tile_bytes
        if self.whole_blobs:
            return blob, self.pieces(slot // 4 % 2, slot % 4, lane)
        last = (given.n - 1) // 16  # slices behind it are read as that one, and not written
        each = []
        for i in range(self.slices):
            mine = cutlass.min(slot + i, last)
            blobs = (mine // 8 - slot // 8) * k_tiles
            pieces = self.pieces(mine // 4 % 2, mine % 4, lane)
            each.append(Pieces(*(blobs * self.k_tile_bytes + at for at in pieces)))
        return blob, Apart(tuple(each))

    @property
    def whole_blobs(self) -> bool:
        """Whether a tile is a part of what lies side by side in a blob: four slices, twice."""
        return 4 % self.slices == 0

    def pieces(self, half, quarter, lane):
        """Where this lane's pieces of a warp's slices lie in a blob, which has two times four."""
        codes = half * (512 * self.words)
        return Pieces(
            codes + quarter * 512 + lane * 16,
            codes + self.whole * 2048 + quarter * 256 + lane * 8,
            self.code_bytes + (half * 4 + quarter) * self.grid_bytes + lane * 16,
        )

    @property
    def grid_at(self) -> int:
        """Where grid words lie in a stage."""
        return self.slices * 256 * self.decoder.bits

    @cute.jit
    def fetch_weights(self, to, blob, pieces, lane):
        """Start the copies of a K tile's words of this warp's slices."""
        if const_expr(isinstance(pieces, Apart)):
            for i in cutlass.range_constexpr(self.slices):
                mine = pieces.slices[i]
                self.copy_slice(i, to, lane, blob + mine.codes, blob + mine.rest, 0, 0, copy)
                into = to + i * self.grid_bytes
                self.copy_grids(into, lane, blob + mine.grids, self.grid_bytes)
        else:
            self.copy_words(to, lane, blob + pieces.codes, blob + pieces.rest, copy)
            self.copy_grids(to, lane, blob + pieces.grids, self.slices * self.grid_bytes)

    def copy_grids(self, to, lane, grids, size):
        """Start the copies of so many bytes of grid words."""
        for i in range(0, size, 512):
            copy_if(to + self.grid_at + lane * 16, i, grids, i, lane * 16 < size - i)

    @cute.jit
    def fetch_tokens(self, to, given, first, end, kt, lane):
        """Start the copies of a K tile's tokens from `first` on; there is nothing behind `end`."""
        column, row = lane % self.columns, lane // self.columns
        step = const_expr(32 // self.columns)
        at = kt * self.token_bytes + column * 16
        inside = at < given.k * self.width  # numbers past K are zeros
        at += given.x.toint()
        lot = Lot(at, row, column, inside, first, end, given.k)
        once = const_expr(step if self.crowded else self.tokens)
        self.fetch_rows(to, lot, 0, once)
        if const_expr(self.crowded and step < self.tokens):  # noqa: SIM102 - when it is compiled
            if first + step < end:  # seldom
                self.fetch_rows(to, lot, step, self.tokens)

    @cute.jit
    def fetch_rows(self, to, lot, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Start the copies of every so many tokens, which is one of each lane."""
        for i in cutlass.range_constexpr(begin, end, 32 // self.columns):
            token = lot.row + i
            into = to + self.x_at + token * self.token_bytes + (lot.column ^ (token & 7)) * 16
            copy_or_zero(
                into,
                0,
                lot.at + Int64(lot.first + token) * (lot.k * self.width),
                0,
                lot.inside,
                lot.first + token < lot.end,
            )
