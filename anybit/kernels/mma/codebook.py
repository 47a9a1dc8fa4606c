"""Codebook weights times tokens: centroids, looked up, are an operand of `mma.sync` as they are.

An m16n8k16 product has 16 tokens on its left and 8 rows of the weight on its right. A lane holds of
one row two words of the right operand: two neighbouring words of a centroid, so a look-up of 8 or
16 bytes brings one or two operands in the registers where they belong. Nothing is unpacked,
converted or moved, and additive codebooks are further products with the same tokens.

A CTA takes row tiles in turn. Its warps split K; each keeps its columns of all tokens in registers,
and the weights pass through a ring of its own. A tile's sums meet in shared memory, and are added
in the order of warps. There are two such places, so a tile has one barrier.

CTAs that share K leave their sums in a workspace. The last of them to finish adds them in order.
"""

from collections import namedtuple
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from anybit.kernels.cute import factors
from anybit.kernels.cute.cells import CELL, CENTROIDS, ROWS, VECTORS
from anybit.kernels.cute.copies import commit, copy_if, wait
from anybit.kernels.cute.last import arrives_last
from anybit.kernels.cute.launch import CodebookArguments
from anybit.kernels.cute.program import CodebookProgram
from anybit.kernels.cute.ptx import (
    halves_to_float,
    load_global,
    load_l2,
    load_matrices,
    load_shared,
    mma,
    prmt,
    store_global,
    store_half,
    store_shared,
)
from anybit.kernels.mma.codebook_tiles import (
    ALIGNED,
    CodebookKernel,
    chunk_bytes,
    part_bytes,
    piece_bytes,
    plane_bytes,
    shared_bytes,
    table_bytes,
)
from anybit.kernels.mma.ptx import load_half, load_late, thread_again

EIGHTS = VECTORS // 8  # of a block's vectors: a register of `ldmatrix` has the codes of one


# Whose sums meet: those of slice number `some` of the tokens, of part number `part` of K.
Sums = namedtuple("Sums", "given row_tiles some first part")


class Codebook(CodebookProgram):
    aligned = ALIGNED

    def __init__(self, spec: CodebookKernel):
        super().__init__(spec)
        t = self.tile = spec.tile
        self.threads, self.ctas, self.overlap = t.threads, t.ctas, spec.overlap
        self.tokens, self.warps, self.stages, self.blocks = t.tokens, t.warps, t.stages, t.blocks
        self.piece = piece_bytes(self.cells)
        self.pieces = 2 * self.cells.v // self.piece  # of a centroid
        self.entry = t.copies * self.piece
        self.plane_bytes = plane_bytes(t, self.cells)
        self.chunk_bytes, self.part = chunk_bytes(t, self.cells), part_bytes(t)
        self.ring_at = table_bytes(t, self.cells)
        self.sums_at = self.ring_at + self.warps * self.stages * self.chunk_bytes
        self.shared_bytes = shared_bytes(t, self.cells)

    @cute.kernel
    def kernel(self, given: CodebookArguments):
        thread, cta, ctas, warp, _, base = self.who()
        lane = thread & 31
        ring = base + self.ring_at + warp * (self.stages * self.chunk_bytes)

        # This CTA's tokens, its part of K, and its row tiles: every `teams`-th.
        m, n, k, splits = given.m, given.n, given.k, given.splits
        share = ctas // ((m + (self.tokens - 1)) // self.tokens)
        some, part = cta // share, cta % share % splits
        team, teams = cta % share // splits, share // splits
        first = some * self.tokens
        row_tiles = (n + (ROWS - 1)) // ROWS
        tiles = (row_tiles - team + (teams - 1)) // teams
        blocks = (k + (self.cells.columns - 1)) // self.cells.columns
        worker, workers = part * self.warps + warp, splits * self.warps
        begin = blocks * worker // workers
        count = blocks * (worker + 1) // workers - begin

        # What does not depend on the previous kernel: weights, and the table.
        stride = Int64(blocks) * self.cells.block_bytes
        address = given.w.toint() + team * stride + (begin * self.cells.block_bytes + lane * 16)
        step = teams * stride
        pieces = count * (self.cells.block_bytes // 16)
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        for s in cutlass.range_constexpr(self.stages - 1):
            if s < tiles:
                self.fetch(ring + s * self.chunk_bytes, address + s * step, pieces, lane)
            commit()
        self.fill(base, given.book.toint(), thread)
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        tokens = self.load_tokens(given.x.toint(), first, begin, count, m, k, lane)
        cute.arch.sync_threads()

        place = base + (lane & (self.tile.copies - 1)) * self.piece
        acc = cute.make_rmem_tensor((8,), Float32)
        address += (self.stages - 1) * step
        stage, empty = Int32(0), Int32(self.stages - 1)
        sums = Sums(given, row_tiles, some, first, part)
        for it in cutlass.range(tiles, unroll=1):
            wait(self.stages - 2)
            cute.arch.sync_warp()  # all lanes have read the stage that is filled now
            if it + (self.stages - 1) < tiles:
                self.fetch(ring + empty * self.chunk_bytes, address, pieces, lane)
            address += step
            commit()
            # For the end of this turn: the latency hides under the look-ups.
            row = self.row_values(given, (team + it * teams) * ROWS + (lane & (ROWS - 1)))
            acc.fill(0.0)
            for u in cutlass.range_constexpr(self.blocks):
                if u < count:
                    at = ring + stage * self.chunk_bytes + u * self.cells.block_bytes
                    self.multiply(at, tokens[u], acc, place, lane)
            empty = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
            at = base + self.sums_at + (it & 1) * (self.warps * self.part)
            self.meet(at, acc, sums, warp, lane)
            cute.arch.sync_threads()
            self.finish(at, it, team + it * teams, row, sums)
        if splits > 1:
            counter = given.counters.toint() + Int64(some * teams + team) * 4
            self.join(base + self.sums_at, counter, team, teams, tiles, sums, thread)

    # Fetching.

    @cute.jit
    def fetch(self, to, address, pieces, lane):
        """Start the copies of a row tile's blocks of this warp."""
        for i in cutlass.range_constexpr(-(-self.chunk_bytes // 512)):
            copy_if(to + lane * 16, i * 512, address, i * 512, lane + i * 32 < pieces)

    @cute.jit
    def fill(self, table, book, thread):
        """Copies of every centroid, 16 bytes a thread: one copy, or two of 8 bytes."""
        each = const_expr(self.entry // 16)  # threads for an entry
        n = const_expr(self.piece // 4)
        for p in cutlass.range_constexpr(self.cells.m * self.pieces):
            of_book = Int64(book) + p // self.pieces * (CENTROIDS * 2 * self.cells.v)
            for i in cutlass.range_constexpr(-(-CENTROIDS * each // self.threads)):
                at = thread + i * self.threads
                source = of_book + (
                    (at >> (each.bit_length() - 1)) * (2 * self.cells.v) + p % self.pieces * 16
                )
                if at < CENTROIDS * each:
                    words = load_global(source, n, Int32(1))
                    store_shared(table + (p * self.plane_bytes + at * 16), words * (4 // n))

    def load_tokens(self, x, first, begin, count, m, k, lane) -> list:
        """Left operands: [block][eight vectors][vector of this lane's two][4 columns].

        Column 2 t of an operand and the one behind it are the first two of vector t's four, columns
        2 t + 8 and 2 t + 9 the others. Zeros for tokens that there are not.
        """
        v, zero = self.cells.v, Uint32(0)
        found = []
        for u in range(self.blocks):
            eights = []
            for i in range(EIGHTS):
                column = (begin + u) * self.cells.columns + (i * 8 + (lane & 3) * 2) * v
                halves = []
                for h in range(self.tokens // 8):
                    token = first + h * 8 + (lane >> 2)
                    wanted = Int32(u < count) & Int32(token < m)
                    at = Int64(x) + (Int64(token) * k + column) * 2
                    words = [
                        load_global(at + p * 16, 4, wanted & Int32(column + p * 8 < k))
                        for p in range(v // 4)
                    ]
                    halves.append([word for four in words for word in four])
                low, high = (*halves, [zero] * v)[:2]
                operands = [[low[j], high[j], low[j + 1], high[j + 1]] for j in range(0, v, 2)]
                eights.append([operands[: v // 4], operands[v // 4 :]])
            found.append(eights)
        return found

    # Multiplying.

    def multiply(self, at: Any, tokens: list, acc: Any, place: Any, lane: Any) -> None:
        """acc += a block's sums: (token, row), (token, row + 1), both for token + 8; rows + 8."""
        c, m = self.cells, self.cells.m
        codes = [load_matrices(at + i * CELL + lane * 16, 0, True) for i in range(m)]
        scales, fine = at + m * CELL, factors.fine(c)
        words = factors.of_fragment(scales, lane, c.groups) if fine else []
        groups = 1 if fine else c.groups
        each = EIGHTS // groups  # eights of vectors that share a scale
        for group in range(groups):
            # By side, and by vector of a lane's two: twice as many chains of products.
            sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
            for i in range(group * each, (group + 1) * each):
                scaled = factors.of_eight(words, i, self.dtype) if fine else []
                for book in range(m):
                    self.add(codes[book][i], book, tokens[i], sums, place, scaled)
            # A word has the scales of rows r and r + 8.
            if not fine:
                words = load_shared(scales + (lane & 3) * 8, 2, 2 * ROWS * group, True)
            pairs = [] if fine else [halves_to_float(word) for word in words]
            for side in range(2):
                for j in range(self.tokens // 4):
                    more = sums[side][0][j] + sums[side][1][j]
                    if pairs:
                        more = more * pairs[j % 2][side]
                    acc[4 * side + j] = acc[4 * side + j] + more

    def add(self, word: Any, book: int, tokens: list, sums: list, place: Any, scaled: list) -> None:
        """sums += the products of the four codes in a word: two vectors of rows g and g + 8.

        scaled: by vector, the factors of the two rows; none where sums are multiplied.
        """
        for s in range(2):
            for side in range(2):
                code = Int32(prmt(word, 0x4440 | (2 * s + side)))
                centroid = self.look_up(place + code * self.entry, book)
                if scaled:
                    centroid = factors.times(centroid, scaled[s][side], self.dtype)
                for p, token in enumerate(tokens[s]):
                    b = centroid[2 * p : 2 * p + 2]
                    sums[side][s] = mma(sums[side][s], token, b, self.dtype)

    def look_up(self, address: Any, book: int) -> list:
        """The words of a centroid."""
        first = book * self.pieces
        return [
            word
            for p in range(first, first + self.pieces)
            for word in load_shared(address, self.piece // 4, p * self.plane_bytes)
        ]

    # Finishing.

    @cute.jit
    def meet(self, at, acc, sums, warp, lane):
        """Put this warp's sums where all meet: token by token, as lanes hold them."""
        at = at + warp * self.part + lane * 16
        for h in cutlass.range_constexpr(self.tokens // 8):
            if sums.first + h * 8 + (lane >> 2) < sums.given.m:
                values = [acc[2 * h], acc[2 * h + 1], acc[4 + 2 * h], acc[5 + 2 * h]]
                store_shared(at + h * 512, values)

    @cute.jit
    def finish(self, at, it, tile, row_values, sums):
        """Add up one output a lane; a warp has two tokens, and spare warps take turns."""
        thread, given = thread_again(), sums.given
        output = thread & (self.tokens * ROWS - 1)
        turns = const_expr(self.threads // (self.tokens * ROWS))  # one output a thread
        row, token = output & (ROWS - 1), output >> 4
        mine = thread - output == (it & (turns - 1)) * (self.tokens * ROWS)
        if mine & (sums.first + token < given.m):
            at = at + token * 64 + ((row & 6) * 8 + (row >> 3) * 8 + (row & 1) * 4)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.warps):
                total += load_shared(at, 1, i * self.part, True, Float32)[0]
            if given.splits > 1:
                line = (sums.some * given.splits + sums.part) * sums.row_tiles + tile
                to = Int64(line) * self.part + (token * ROWS + row) * 4
                store_global(given.work.toint() + to, [total])
            else:
                self.store(total, tile * ROWS + row, sums.first + token, row_values, given)

    @cute.jit
    def row_values(self, given, row):
        """Scale and bias of a row; rows of weights are padded, biases are not."""
        scale = load_late(given.row_scale.toint() + Int64(row) * 4, Float32)
        offset = Float32(0.0)
        if given.bias.toint() != 0:
            at = Int64(cutlass.min(row, given.n - 1)) * 2
            offset = load_half(given.bias.toint() + at, self.dtype)
        return scale, offset

    @cute.jit
    def store(self, total, row, token, row_values, given):
        """Row scale, bias, rounding."""
        scale, offset = row_values
        if row < given.n:
            to = given.y.toint() + (Int64(token) * given.n + row) * 2
            store_half(to, total * scale + offset, self.dtype)

    @cute.jit
    def join(self, flag, counter, team, teams, tiles, sums, thread):
        """If this CTA is the last of those that share K: add up all their sums, in order."""
        given, first, row_tiles = sums.given, sums.first, sums.row_tiles
        splits = given.splits
        if arrives_last(flag, counter, splits, thread):
            each = cutlass.min(given.m - first, Int32(self.tokens)) * ROWS
            for i in cutlass.range(thread, tiles * each, self.threads, unroll=1):
                tile, place = team + i // each * teams, i % each
                line = sums.some * splits * row_tiles + tile
                at = given.work.toint() + (Int64(line) * self.part + place * 4)
                total = Float32(0.0)
                for s in cutlass.range(splits, unroll=4):
                    total += load_l2(at + Int64(s * row_tiles) * self.part, 1, Float32)[0]
                row = tile * ROWS + (place & (ROWS - 1))
                values = self.row_values(given, row)
                self.store(total, row, first + (place >> 4), values, given)
