"""CodeGEMM's Psumbook for one or two tokens, in CuTe DSL (section 3 of the paper).

A vector's inner products with all centroids are computed once, on the matrix unit, and every weight
vector is then a look-up by its code. Here the position along K (the vector, 32 of them in a cell)
is the lane, and the lane is the bank of shared memory: entries are 256 bytes apart, so look-ups of
a warp never meet, whatever the codes are, and a code is one byte of its address. The look-ups of
four lanes are summed by an m16n8k16 product with a constant 0/1 operand, in fp32, which also picks
the half of a word: two tokens share a word, or two cells where there is one token.

The CTAs of a cluster split K, since a table holds 512 columns or a few times as many; their sums
meet in the shared memory of the CTA that owns the row tile, and are added in the order of ranks.
Where K is longer than a cluster holds, several share it and leave their sums in a workspace; the
last of them to finish adds them in order.

Numbers: inner products are summed in fp32 and rounded once to x's dtype. They cannot overflow,
because `cells.pack` divides the codebook so that they are no larger than x.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import select_

from anybit.kernels.cute import factors
from anybit.kernels.cute.cells import CELL, ROWS, VECTORS
from anybit.kernels.cute.last import arrives_last
from anybit.kernels.cute.launch import CodebookArguments
from anybit.kernels.cute.ptx import (
    half2,
    halves_to_float,
    load_global,
    load_l2,
    load_shared,
    mma,
    pack2,
    store_global,
    store_half,
    store_shared,
)
from anybit.kernels.hopper.barriers import (
    arrive_and_expect,
    init_barrier,
    insert_code,
    send,
    swap_lanes,
    wait_barrier,
)
from anybit.kernels.hopper.codebook_ring import Next, Ring
from anybit.kernels.hopper.codebook_tiles import MET, TABLE, WINDOW, CodebookKernel

ONE = {"float16": 0x3C00, "bfloat16": 0x3F80}


class Psumbook(Ring):
    def __init__(self, kernel: CodebookKernel):
        super().__init__(kernel)
        self.spans = 16 // kernel.warps  # times 16 entries that a warp computes of every table
        # Four lanes' look-ups are summed by a product, so finer scales multiply what is looked up.
        self.fine = self.cells.groups > 8
        self.registers = 2 if self.cells.v == 16 else 1  # of B for 8 vectors

    @cute.kernel
    def kernel(self, given: CodebookArguments):
        thread, cta, ctas, warp, lane, base = self.who()
        g, t = lane // 4, lane % 4
        table = base + (self.spec.table_at - WINDOW)
        ring = base + (self.spec.ring_at - WINDOW)
        ring += warp * (self.stages * self.spec.chunk_bytes)
        barriers = base + warp * (self.stages * 8)
        sums = base + (self.spec.sums_at - WINDOW)

        # This CTA's chunks, its cluster's row tiles, this warp's tiles among them.
        n, k, cluster, splits, early = given.n, given.k, given.cluster, given.splits, given.early
        rank, part, team = cta % cluster, cta // cluster % splits, cta // cluster // splits
        worker, workers, teams = part * cluster + rank, cluster * splits, ctas // cluster // splits
        blocks = (k + (self.cells.columns - 1)) // self.cells.columns
        chunks = (k + (self.spec.columns - 1)) // self.spec.columns
        first = chunks * worker // workers
        chunks = chunks * (worker + 1) // workers - first
        tiles = (n + (ROWS - 1)) // ROWS
        tile = tiles * team // teams
        tiles = tiles * (team + 1) // teams - tile
        mine = (tiles - warp + (self.warps - 1)) // self.warps

        own = (tiles - rank + cluster - 1) // cluster  # tiles whose sums meet here

        # What does not depend on the previous kernel.
        if thread == 0:
            init_barrier(base + MET, Int32(1))
            arrive_and_expect(base + MET, own * cluster * (4 * ROWS * self.tokens))
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()
        source = self.source(given.w, tile + warp, self.warps, blocks, first, chunks)
        ahead = Next(source.address, Int32(0), mine * chunks)
        self.open_ring(barriers, lane)
        centroids = self.load_centroids(given.book, warp, g, t)
        if early > 0:  # more of it would only delay x
            ahead = self.refill(source, ring, barriers, Int32(0), lane, ahead)
        cute.arch.griddepcontrol_wait()

        last = cutlass.min(blocks, (first + chunks) * self.spec.blocks)
        vectors = self.load_x(given.x, first, last, given.m, k, t, g)
        for slot in cutlass.range_constexpr(self.stages):
            if early <= slot:
                ahead = self.refill(source, ring, barriers, Int32(slot), lane, ahead)
        # The epilogue's numbers for this thread's first output: their latency hides here.
        outputs = const_expr(ROWS * self.tokens)
        of_first = tile + rank + thread // outputs * cluster
        factor, offset = self.fetch_row(given, of_first, thread % ROWS)
        self.build(centroids, vectors, table, warp, g, t)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()  # the others run: their memory may be written to

        lookup = Uint32(base - WINDOW) | Uint32(lane * 4)
        picks = self.picks(g)
        stage, phase = Int32(0), Int32(0)
        owner, place = warp % cluster, warp // cluster  # of the tile's sums
        owner_step, place_step = self.warps % cluster, self.warps // cluster
        acc = cute.make_rmem_tensor((4 * self.tokens,), Float32)
        for _ in cutlass.range(mine, unroll=1):
            acc.fill(0.0)
            for j in cutlass.range_constexpr(self.spec.chunks):
                if j < chunks:
                    wait_barrier(barriers + stage * 8, phase)
                    slot = ring + stage * self.spec.chunk_bytes
                    words = self.read(slot, lane, g, t)
                    cute.arch.sync_warp()
                    read = self.read_all(words)
                    ahead = self.refill(source, ring, barriers, stage, lane, ahead, read)
                    missing = (first + j) * self.spec.blocks - last
                    self.sum_up(words, acc, lookup, picks, missing, j)
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
            # Lanes of equal t hold sums of the same rows over other columns: halve thrice.
            values = [acc[i] for i in range(4 * self.tokens)]
            values = self.halve(self.halve(values, lane, 16), lane, 8)
            to = sums + (place * cluster + rank) * (64 * self.tokens)
            if const_expr(self.tokens == 2):
                total = self.halve(values, lane, 4)[0]
                row = lane // 16 * 4 + t + lane // 8 % 2 * 8 + lane // 4 % 2 * 16
                send(to + row * 4, owner, total, base + MET)
            else:
                total = values[0] + swap_lanes(values[0], 4)
                row = 2 * t + lane // 8 % 2 + lane // 16 * 8
                if lane // 4 % 2 == 0:
                    send(to + row * 4, owner, total, base + MET)
            place += place_step
            owner += owner_step
            if owner >= cluster:
                owner -= cluster
                place += 1
        wait_barrier(base + MET, Int32(0), True)

        own *= outputs
        at = Int32(thread)
        while at < own:
            index, place = at // outputs, at % outputs
            tile_of = tile + rank + index * cluster
            if at >= self.spec.threads:
                factor, offset = self.fetch_row(given, tile_of, place % ROWS)
            total = Float32(0.0)
            for other in cutlass.range(cluster, unroll=4):
                one = sums + ((index * cluster + other) * outputs + place) * 4
                total += load_shared(one, 1, 0, True, Float32)[0]
            if splits > 1:
                line = Int64(tile_of * splits + part) * outputs + place
                store_global(given.work.toint() + line * 4, [total])
            else:
                self.store(total * factor + offset, tile_of, place, given)
            at += self.spec.threads
        if splits > 1:
            counter = given.counters.toint() + Int64(team * cluster + rank) * 4
            self.join(sums, counter, given, tile + rank, own, thread)

    @cute.jit
    def join(self, flag, counter, given, first, own, thread):
        """If this CTA is the last of those that share its tiles: add up their sums, in order."""
        cluster, splits = given.cluster, given.splits
        outputs = const_expr(ROWS * self.tokens)
        if arrives_last(flag, counter, splits, thread):
            for at in cutlass.range(thread, own, self.spec.threads, unroll=1):
                tile, place = first + at // outputs * cluster, at % outputs
                line = given.work.toint() + (Int64(tile * splits) * outputs + place) * 4
                total = Float32(0.0)
                for part in cutlass.range(splits, unroll=4):
                    total += load_l2(line + part * (outputs * 4), 1, Float32)[0]
                factor, offset = self.fetch_row(given, tile, place % ROWS)
                self.store(total * factor + offset, tile, place, given)

    @cute.jit
    def store(self, total, tile, place, given):
        """One output."""
        row, token = tile * ROWS + place % ROWS, place // ROWS
        if row < given.n and token < given.m:
            to = given.y.toint() + (Int64(token) * given.n + row) * 2
            store_half(to, total, self.dtype)

    def halve(self, values: list, lane: Any, mask: int) -> list:
        """Each lane keeps one half of the values and adds its partner's; they get the other."""
        n, upper = len(values) // 2, lane // mask % 2 == 1
        return [
            Float32(select_(upper, b, a)) + swap_lanes(Float32(select_(upper, a, b)), mask)
            for a, b in zip(values[:n], values[n:], strict=True)
        ]

    def load_centroids(self, book: Any, warp: Any, g: Any, t: Any) -> list:
        """A registers of this warp's entries: [codebook][span]; x is zero beyond column v."""
        v = self.cells.v
        column = t % 2 * 2 if v == 4 else 2 * t
        out = []
        for c in range(self.cells.m):
            spans = []
            for s in range(self.spans):
                entry = c * 256 + (warp * self.spans + s) * 16 + g
                at = Int64(book.toint()) + (entry * v + column) * 2
                spans.append(
                    [
                        load_global(at + (row * v + eight) * 2, 1, Int32(1))[0]
                        for eight in range(0, max(v, 8), 8)
                        for row in (0, 8)
                    ]
                )
            out.append(spans)
        return out

    def load_x(self, x: Any, first: Any, last: Any, m: Any, k: Any, t: Any, g: Any) -> list:
        """B words of every plane: [half][8 vectors of 32][register]; zeros behind the end of K."""
        found: dict = {}
        out = []
        for plane in range(self.spec.planes):
            halves = []
            for half in self.sources(plane):
                place = half and (half[0], half[2])
                if half and place not in found:
                    found[place] = self.load_block(x, first, last, m, k, t, g, *place)
                halves.append(half and found[place])
            out.append(halves)
        return out

    def load_block(
        self, x: Any, first: Any, last: Any, m: Any, k: Any, t: Any, g: Any, block: Any, token: Any
    ) -> list:
        """32 vectors of a token: [8 vectors][register], columns 2 t, 2 t + 1 (+ 8) of vector g."""
        v, at = self.cells.v, first * self.spec.blocks + block
        wanted = Int32(at < last) & Int32(t < v // 2)
        if token:
            wanted = wanted & Int32(token < m)
        column = at * self.cells.columns + g * v + 2 * t
        address = Int64(x.toint()) + (Int64(token * k) + column) * 2
        return [
            [
                load_global(address + further * 2, 1, wanted & Int32(column + further < k))[0]
                for further in range(i * 8 * v, i * 8 * v + 8 * self.registers, 8)
            ]
            for i in range(4)
        ]

    def sources(self, plane: int) -> list:
        """(block, codebook, token) of the halves of a plane's words; None where there is none."""
        cells = self.spec.chunks * self.spec.blocks * self.cells.m
        if self.tokens == 2:
            return [(*divmod(plane, self.cells.m), token) for token in (0, 1)]
        two = (2 * plane, 2 * plane + 1)
        return [(*divmod(cell, self.cells.m), 0) if cell < cells else None for cell in two]

    def build(self, centroids: list, vectors: list, table: Any, warp: Any, g: Any, t: Any) -> None:
        """Inner products of this warp's entries with all vectors, into the table."""
        zero = [Float32(0.0)] * 4
        odd, two = Uint32(0) - Uint32(g & 1), Uint32(0) - Uint32(g >> 1 & 1)
        for plane in range(self.spec.planes):
            at = table + (plane // 2 * TABLE + plane % 2 * 128)
            for s in range(self.spans):
                low, high = (
                    [mma(zero, centroids[found[1]][s], b, self.dtype) for b in words]
                    if found
                    else [zero] * 4
                    for found, words in zip(self.sources(plane), vectors[plane], strict=True)
                )
                for r in range(2):
                    words = [
                        [pack2(low[i][c], high[i][c], self.dtype) for c in (2 * r, 2 * r + 1)]
                        for i in range(4)
                    ]
                    entry = at + ((warp * self.spans + s) * 16 + r * 8 + g) * 256 + t * 8
                    # Lanes of other g hold other entries of the same banks: each starts elsewhere.
                    words = self.rotate(self.rotate(words, 1, odd), 2, two)
                    for i in range(4):
                        store_shared(entry + ((g + i) % 4) * 32, words[i])

    def rotate(self, words: list, by: int, mask: Any) -> list:
        """Word i becomes word i + by where the mask is set."""
        return [
            [a ^ ((a ^ b) & mask) for a, b in zip(words[i], words[(i + by) % 4], strict=True)]
            for i in range(4)
        ]

    def picks(self, g: Any) -> list:
        """B registers: which half of which register goes to which column of the sums."""
        one = ONE[self.dtype]
        if self.tokens == 1:  # [half][column]
            return [
                [Uint32(Int32(g == c)) * Uint32(one << 16 * h) for c in range(8)] for h in (0, 1)
            ]
        return [  # [MMA of two][register]: both halves, each to a column of its own
            [
                Uint32(Int32(g == c)) * Uint32(one) + Uint32(Int32(g == c + 1)) * Uint32(one << 16)
                for c in (4 * i, 4 * i + 2)
            ]
            for i in (0, 1)
        ]

    def read(self, slot: Any, lane: Any, g: Any, t: Any) -> list:
        """A chunk's words of this lane: [block] of (codes of every codebook, scales)."""
        out = []
        for u in range(self.spec.blocks):
            at = slot + u * self.cells.block_bytes
            codes = [load_shared(at + lane * 16, 4, c * CELL, True) for c in range(self.cells.m)]
            scales, groups = at + self.cells.m * CELL, self.cells.groups
            if self.fine:  # of all rows, for this lane's vector
                scales += lane * groups // VECTORS * (2 * ROWS)
                words = [w for half in (0, 16) for w in load_shared(scales, 4, half, True)]
            elif self.tokens == 1:
                words = load_shared(scales + g * groups // 8 * 32 + t * 8, 2, 0, True)
            else:
                scales += g * groups // 8 * 32 + t * 4
                words = [load_shared(scales, 1, 16 * f, True)[0] for f in (0, 1)]
            out.append((codes, words))
        return out

    def sum_up(self, words: list, acc: Any, lookup: Any, picks: list, missing: Any, j: int) -> None:
        """acc += scale * the sum of 32 look-ups, for every block of chunk j."""
        for u, (codes, scales) in enumerate(words):
            # Behind the end of K lie no scales.
            here = Uint32(0) - Uint32(Int32(missing + u < 0))
            scales = [word & here for word in scales]
            rows = [factors.pair(word, self.dtype) for word in scales] if self.fine else []
            sums = [[Float32(0.0)] * 4 for _ in range(self.tokens)]
            for c in range(self.cells.m):
                cell = (j * self.spec.blocks + u) * self.cells.m + c
                plane = cell if self.tokens == 2 else cell // 2
                offset = self.spec.table_at + plane // 2 * TABLE + plane % 2 * 128
                part = [[Float32(0.0)] * 4 for _ in range(self.tokens)]
                for i in range(4):
                    a = [
                        load_shared(insert_code(codes[c][i], lookup, b), 1, offset)[0]
                        for b in range(4)
                    ]
                    if self.fine:
                        pairs = [row for pair in rows[2 * i : 2 * i + 2] for row in pair]
                        a = [
                            half2("mul.rn", self.dtype, both) for both in zip(a, pairs, strict=True)
                        ]
                    if self.tokens == 1:
                        f, b = 0, picks[cell % 2][2 * i : 2 * i + 2]
                    else:
                        f, b = i // 2, picks[i % 2]
                    part[f] = mma(part[f], a, b, self.dtype)
                sums = [
                    [p + q if c else q for p, q in zip(x, y, strict=True)]
                    for x, y in zip(sums, part, strict=True)
                ]
            numbers = [] if self.fine else [halves_to_float(scale) for scale in scales]
            for f in range(self.tokens):
                for i in range(4):
                    more = sums[f][i]
                    if self.tokens == 1 and numbers:  # columns of sums are groups' and rows'
                        more = more * numbers[i % 2][i // 2]
                    elif numbers:
                        more = more * numbers[f][i // 2]
                    acc[4 * f + i] = acc[4 * f + i] + more
