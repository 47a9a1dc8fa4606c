"""Codebook weights times up to 8 tokens, in CuTe DSL: a table feeds the matrix unit.

The table in shared memory holds a copy of every centroid for each lane of a load (32 copies of a
word, or 8 of 16 bytes), so look-ups never meet in a bank, whatever the codes are; a code is one
byte of its entry's address. What is loaded are registers of an m16n8k16 product's A operand, and
nothing is unpacked or converted. Additive codebooks are further products with the same tokens.

The warps of a CTA, and the CTAs of a cluster where K is long, split K; each keeps its columns of
all tokens in registers for the whole kernel. A tile's sums meet in shared memory and are added in a
fixed order while the next tile is multiplied; those of CTAs a tile later, in the CTA that owns the
tile. Two buffers in turn, so nobody waits. Everything is summed in fp32.
"""

from collections import namedtuple
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from anybit.kernels.cute import factors
from anybit.kernels.cute.cells import CELL, ROWS
from anybit.kernels.cute.launch import CodebookArguments
from anybit.kernels.cute.ptx import (
    halves_to_float,
    load_global,
    load_matrices,
    load_shared,
    mma,
    store_half,
    store_shared,
)
from anybit.kernels.hopper.barriers import (
    arrive,
    arrive_and_expect,
    init_barrier,
    insert_code,
    send,
    wait_barrier,
)
from anybit.kernels.hopper.codebook_ring import Next, Ring
from anybit.kernels.hopper.codebook_tiles import MET, TABLE, WINDOW, CodebookKernel

SENT = MET + 16  # barriers of sums that other CTAs send, behind those of warps


# Who a warp is: of cluster number `team` of `teams`, and of CTA number `rank` in it.
Place = namedtuple("Place", "given team teams rank warp lane")


class Codebook(Ring):
    copied = {4: 1, 8: 4, 16: 4}  # words of a copy in the table, by v

    def __init__(self, kernel: CodebookKernel):
        super().__init__(kernel)
        self.words = self.cells.v // 2  # registers of a centroid
        self.fine = factors.fine(self.cells)
        self.part = ROWS * kernel.tokens * 4  # bytes of one warp's sums
        self.sums_at = kernel.sums_at - WINDOW

    @cute.kernel
    def kernel(self, given: CodebookArguments):
        thread, cta, ctas, warp, lane, base = self.who()
        g, t = lane // 4, lane % 4
        table = base + (self.spec.table_at - WINDOW)
        ring = base + (self.spec.ring_at - WINDOW)
        ring += warp * (self.stages * self.spec.chunk_bytes)
        barriers = base + warp * (self.stages * 8)

        # This worker's chunks of K, and its cluster's row tiles: every `teams`-th.
        n, k, cluster, early = given.n, given.k, given.cluster, given.early
        rank, team, teams = cta % cluster, cta // cluster, ctas // cluster
        worker, workers = rank * self.warps + warp, cluster * self.warps
        blocks = (k + (self.cells.columns - 1)) // self.cells.columns
        chunks = (k + (self.spec.columns - 1)) // self.spec.columns
        first = chunks * worker // workers
        chunks = chunks * (worker + 1) // workers - first
        last = cutlass.min(blocks, (first + chunks) * self.spec.blocks)
        tiles = ((n + (ROWS - 1)) // ROWS - team + (teams - 1)) // teams

        # What does not depend on the previous kernel.
        if thread < 4:
            init_barrier(base + MET + thread * 8, self.warps if thread < 2 else 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()
        source = self.source(given.w, team, teams, blocks, first, chunks)
        ahead = Next(source.address, Int32(0), tiles * chunks)
        self.open_ring(barriers, lane)
        if early > 0:  # more of it would only delay x
            ahead = self.refill(source, ring, barriers, Int32(0), lane, ahead)
        self.fill(given.book, table, warp, lane)
        cute.arch.griddepcontrol_wait()
        vectors = self.load_x(given.x, first, last, given.m, k, g, t)
        for slot in cutlass.range_constexpr(self.stages):
            if early <= slot:
                ahead = self.refill(source, ring, barriers, Int32(slot), lane, ahead)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()

        copied = const_expr(4 * self.copied[self.cells.v])
        lookup = Uint32(base - WINDOW) | Uint32(lane % (128 // copied) * copied)
        place = Place(given, team, teams, rank, warp, lane)
        stage, phase = Int32(0), Int32(0)
        acc = cute.make_rmem_tensor((self.tokens // 2,), Float32)
        for it in cutlass.range(tiles, unroll=1):
            acc.fill(0.0)
            # For the epilogue of the last tile: the latency hides under this one.
            before = self.fetch_row(given, team + (it - 1) * teams, lane % 16)
            for j in cutlass.range_constexpr(self.spec.chunks):
                if j < chunks:
                    wait_barrier(barriers + stage * 8, phase)
                    slot = ring + stage * self.spec.chunk_bytes
                    # The next chunk's words already here, in registers, made it slower.
                    words = self.read(slot, lane, g, t)
                    cute.arch.sync_warp()
                    read = self.read_all(words)
                    ahead = self.refill(source, ring, barriers, stage, lane, ahead, read)
                    missing = (first + j) * self.spec.blocks - last
                    self.multiply(words, acc, vectors, lookup, missing, j)
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
            self.settle(base, it - 2, place)
            self.collect(base, it - 1, place, before)
            self.share(base, acc, it, place)
        self.settle(base, tiles - 2, place)
        before = self.fetch_row(given, team + (tiles - 1) * teams, lane % 16)
        self.collect(base, tiles - 1, place, before)
        self.settle(base, tiles - 1, place)

    # A tile passes through three steps, one in each turn of the main loop. Every warp waits for all
    # others in each of them, so a warp that fills a buffer anew knows that it has been read.

    @cute.jit
    def share(self, base, acc, it, place):
        """Put this warp's sums of a tile where its CTA's meet."""
        part = base + self.sums_at + (it % 2 * self.warps + place.warp) * self.part
        self.leave(acc, part, place.given.m, place.lane // 4, place.lane % 4)
        cute.arch.sync_warp()
        if place.lane == 0:
            arrive(base + (MET + it % 2 * 8))

    @cute.jit
    def leave(self, acc, part, m, g, t):
        """Write a warp's sums."""
        for i in cutlass.range_constexpr(self.tokens // 8):
            if i * 8 + 2 * t < m:
                for h in cutlass.range_constexpr(2):
                    values = [acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]]
                    store_shared(part + self.spot(g + 8 * h, i * 8 + 2 * t), values)

    @cute.jit
    def collect(self, base, it, place, numbers):
        """Add up the CTA's sums of a tile; write 16 outputs of every token, or send their parts."""
        given, team, teams, rank, warp, lane = place
        cluster, m = given.cluster, given.m
        if it >= 0:
            wait_barrier(base + (MET + it % 2 * 8), it // 2 % 2)
            mine, row, token = self.outputs(it, warp, lane)
            if mine and token < m:
                part = base + self.sums_at + it % 2 * (self.warps * self.part)
                part += self.spot(row, token)
                total = Float32(0.0)
                for i in cutlass.range_constexpr(self.warps):
                    total += load_shared(part, 1, i * self.part, True, Float32)[0]
                if cluster == 1:
                    self.store(total, team + it * teams, row, token, numbers, given)
                else:
                    turn = it // cluster % 2
                    at = ((turn * cluster + rank) * self.tokens + token) * ROWS + row
                    to = base + self.sums_at + 2 * self.warps * self.part + at * 4
                    send(to, it % cluster, total, base + (SENT + turn * 8))
            if cluster > 1:  # noqa: SIM102 - a remainder costs more than the look-ups of a row
                if it % cluster == rank and warp == 0 and lane == 0:
                    turn = it // cluster % 2
                    arrive_and_expect(base + (SENT + turn * 8), cluster * m * (4 * ROWS))

    @cute.jit
    def settle(self, base, it, place):
        """Add up the cluster's sums of a tile, if this CTA owns it, and write the outputs."""
        given, team, teams, rank, warp, lane = place
        cluster = given.cluster
        if cluster > 1 and it >= 0:  # noqa: SIM102 - as above
            if it % cluster == rank:
                numbers = self.fetch_row(given, team + it * teams, lane % 16)
                turn = it // cluster
                wait_barrier(base + (SENT + turn % 2 * 8), turn // 2 % 2, True)
                mine, row, token = self.outputs(it, warp, lane)
                if mine and token < given.m:
                    at = (turn % 2 * cluster * self.tokens + token) * ROWS + row
                    part = base + self.sums_at + 2 * self.warps * self.part + at * 4
                    total = Float32(0.0)
                    for i in cutlass.range(cluster, unroll=4):
                        total += load_shared(part + i * self.part, 1, 0, True, Float32)[0]
                    self.store(total, team + it * teams, row, token, numbers, given)

    def outputs(self, it: Any, warp: Any, lane: Any) -> tuple:
        """(whether it is this warp's turn, row, token): one output a thread."""
        pairs = self.tokens // 2  # more warps than pairs take turns
        pair, crew = warp % pairs, warp // pairs
        mine = crew == it % (self.warps // pairs)
        return mine, lane % 16, pair * 2 + lane // 16

    @cute.jit
    def store(self, total, tile, row, token, numbers, given):
        """Row scale, bias, rounding."""
        scale, offset = numbers
        if tile * ROWS + row < given.n:
            to = given.y.toint() + (Int64(token) * given.n + tile * ROWS + row) * 2
            store_half(to, total * scale + offset, self.dtype)

    def spot(self, row: Any, token: Any) -> Any:
        """Where a sum lies in a part: free of bank conflicts.

        For a warp that writes 8 rows x 4 pairs of tokens, and for one that reads 16 rows of a pair.
        """
        return (row * self.tokens + ((token // 2) ^ (row // 4)) * 2 + token % 2) * 4

    def fill(self, book: Any, table: Any, warp: Any, lane: Any) -> None:
        """Copies of every centroid: entries of 256 bytes, two for a warp at a time."""
        v, n = self.cells.v, self.copied[self.cells.v]
        half, copy = lane // 8 % 2, lane % 16
        for i in range(self.spec.tables):
            if n == self.words:  # two codebooks side by side
                source = (2 * i + half) * (256 * 2 * v)
                wanted = Int32(2 * i + half < self.cells.m)
            else:  # two halves of a centroid
                source, wanted = i * 256 * 2 * v + half * v, Int32(1)
            entries = [(warp + j * self.warps) * 2 + lane // 16 for j in range(128 // self.warps)]
            for some in (entries[:8], entries[8:]):
                values = [
                    load_global(Int64(book.toint()) + source + entry * (2 * v), n, wanted)
                    for entry in some
                ]
                for entry, value in zip(some, values, strict=True):
                    store_shared(table + (i * TABLE + entry * 256 + copy * 16), value * (4 // n))

    def load_x(self, x: Any, first: Any, last: Any, m: Any, k: Any, g: Any, t: Any) -> list:
        """Words of x: [block][8 vectors of 32][8 tokens], 2 v columns each; zeros past the end."""
        v = self.cells.v
        out = []
        for block in range(self.spec.chunks * self.spec.blocks):
            at = first * self.spec.blocks + block
            rows = []
            for i in range(4):
                tokens = []
                for j in range(self.tokens // 8):
                    token = j * 8 + g
                    wanted = Int32(at < last) & Int32(token < m)
                    column = at * self.cells.columns + (i * 8 + 2 * t) * v
                    address = Int64(x.toint()) + (Int64(token) * k + column) * 2
                    tokens.append(
                        [
                            word
                            for piece in range(v // 4)
                            for word in load_global(
                                address + piece * 16, 4, wanted & Int32(column + piece * 8 < k)
                            )
                        ]
                    )
                rows.append(tokens)
            out.append(rows)
        return out

    def read(self, slot: Any, lane: Any, g: Any, t: Any) -> list:
        """A chunk's words of this lane: [block] of (codes of every codebook, scales)."""
        out = []
        for u in range(self.spec.blocks):
            at = slot + u * self.cells.block_bytes
            codes = [load_matrices(at + c * CELL + lane * 16, 0, True) for c in range(self.cells.m)]
            scales = at + self.cells.m * CELL
            if self.fine:
                words = factors.of_fragment(scales, lane, self.cells.groups)
            else:
                words = self.scales_of_rows(scales, g, t)
            out.append((codes, words))
        return out

    def scales_of_rows(self, scales: Any, g: Any, t: Any) -> list:
        """A word for rows g and g + 8, for every group."""
        groups = range(self.cells.groups)
        return [load_shared(scales + g * 4, 1, 32 * i, True)[0] for i in groups]

    def multiply(
        self, words: list, acc: Any, vectors: list, lookup: Any, missing: Any, j: int
    ) -> None:
        """acc += scale * centroids x, for every block of chunk j."""
        groups = 1 if self.fine else self.cells.groups
        each = 4 // groups  # eights of vectors that share a scale
        for u, (codes, scales) in enumerate(words):
            here = Uint32(0) - Uint32(Int32(missing + u < 0))  # behind the end of K lie no scales
            scales = [word & here for word in scales]
            for group in range(groups):
                sums = [[Float32(0.0)] * 4 for _ in range(self.tokens // 8)]
                for i in range(group * each, (group + 1) * each):
                    tokens = vectors[j * self.spec.blocks + u][i]
                    scaled = factors.of_eight(scales, i, self.dtype) if self.fine else []
                    for c in range(self.cells.m):
                        self.add(codes[c][i], c, tokens, sums, lookup, scaled)
                factor = [] if self.fine else self.scales_of_sums(scales, group)
                for n, some in enumerate(sums):
                    for r in range(4):
                        more = some[r] * factor[n][r] if factor else some[r]
                        acc[4 * n + r] = acc[4 * n + r] + more

    def scales_of_sums(self, scales: list, group: int) -> list:
        """What `multiply`'s sums of a group are multiplied by: two of row g, two of g + 8."""
        upper, lower = halves_to_float(scales[group])
        return [[upper, upper, lower, lower]] * (self.tokens // 8)

    def add(self, word: Any, c: int, tokens: list, sums: list, lookup: Any, scaled: list) -> None:
        """sums += the products of the four codes in a word: two vectors of rows g and g + 8.

        scaled: by vector, the factors of the two rows; none where sums are multiplied.
        """
        n = self.words
        for s in range(2):
            upper, lower = (self.look_up(insert_code(word, lookup, 2 * s + h), c) for h in range(2))
            if scaled:
                upper = factors.times(upper, scaled[s][0], self.dtype)
                lower = factors.times(lower, scaled[s][1], self.dtype)
            for p in range(0, n, 2):
                a = [upper[p], lower[p], upper[p + 1], lower[p + 1]]
                for i, token in enumerate(tokens):
                    b = token[s * n + p : s * n + p + 2]
                    sums[i] = mma(sums[i], a, b, self.dtype)

    def look_up(self, address: Any, c: int) -> list:
        """The words of a centroid of codebook c, at its entry's address."""
        at = self.spec.table_at
        if self.cells.v == 8:
            return load_shared(address, 4, at + c // 2 * TABLE + c % 2 * 128)
        n = 1 if self.cells.v == 4 else 4  # one word each needs no moves into a product's registers
        return [
            word
            for half in range(2)
            for word in load_shared(address, n, at + c * TABLE + half * 128)
        ]
