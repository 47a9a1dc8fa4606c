"""A rotated weight's decoded copy, without its rotations: for products of tokens as they come.

W = diag(rotate_out) H V H diag(rotate_in), in blocks of 128 rows and columns. Each H is H of 16
rows on the tensor core, and sums and differences of eight such parts, all in fp32. What is rotated
along K, times scales of rows, is rounded to the operand's dtype before it is rotated along N; W is
rounded again.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.launch import ProductArguments
from anybit.kernels.cute.ptx import (
    halves_to_float,
    load_shared,
    mma,
    pack2,
    store_global,
    store_shared,
)
from anybit.kernels.mma.decode import Decode
from anybit.kernels.mma.ptx import load_half, load_once, load_words
from anybit.kernels.mma.tiles import RESTORED_ROW

ONES = {"float16": 0x3C00, "bfloat16": 0x3F80}
SIDE = 16  # rows of H on the tensor core
PARTS = K_TILE // SIDE


class Restore(Decode):
    """y (N, K) = W. A warp rotates 16 rows along K, all of a CTA 128 rows along N.

    `token_scale` (K,) is rotate_in, and `work` (N,) rotate_out, both in fp16.
    """

    @cute.kernel
    def kernel(self, given: ProductArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        k_tiles = given.k // K_TILE
        spans = (k_tiles + (self.stages - 1)) // self.stages
        warp, lane = thread // 32, thread % 32
        block, first = cta // spans, cta % spans * self.stages
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        room = self.place_table(Int32(shared.data.data_ptr().toint()))
        if const_expr(self.decoder.table_bytes):
            self.store_table(self.load_table(given, thread), thread)
            cute.arch.sync_threads()
        h = self.signs(lane)
        slot = block * PARTS + warp
        # Of four rows whose sums this lane has; 1 / 8 here and 1 / 16 below make both H orthogonal.
        scales = [
            [
                load_once(
                    given.row_scale.toint() + Int64(slot * SIDE + v * 8 + lane % 4 * 2 + c) * 4,
                    Float32,
                )
                * Float32(1 / 8)
                for c in range(2)
            ]
            for v in range(2)
        ]
        first_row = block * K_TILE + warp * 2
        out = [
            [
                load_half(given.work.toint() + Int64(first_row + part * SIDE + r) * 2, "float16")
                * Float32(1 / 16)
                for part in range(PARTS)
            ]
            for r in range(2)
        ]
        blob = Int64(block * k_tiles + first)
        into = room + (warp * SIDE + lane // 4) * RESTORED_ROW + lane % 4 * 8
        back = room + warp * 2 * RESTORED_ROW + lane * 16
        count = cutlass.min(Int32(self.stages), k_tiles - first)
        words, grid = self.load(given.w.toint() + blob * self.decoder.blob_bytes, slot, lane)
        for i in cutlass.range(count, unroll=1):
            a = self.decode_half(words, grid, 0) + self.decode_half(words, grid, 1)
            behind = blob + cutlass.min(i + 1, count - 1)  # asked for before it is needed
            words, grid = self.load(given.w.toint() + behind * self.decoder.blob_bytes, slot, lane)
            column = (first + i) * K_TILE + lane * 4
            pairs = load_words(given.token_scale.toint() + Int64(column) * 2, 2, 0)
            self.rotate(h, a, scales, into)
            cute.arch.sync_threads()
            inside = [x for pair in pairs for x in halves_to_float(pair)]
            self.along_rows(back, first_row, column, inside, out, given)
            cute.arch.sync_threads()

    def signs(self, lane):
        """H of 16 rows times 4, as a left operand."""
        bits = (lane // 4) & (lane % 4 * 2)
        minus = (bits ^ (bits >> 1) ^ (bits >> 2)) & 1
        next_minus = minus ^ (lane // 4 & 1)
        ones = Uint32(ONES[self.out] * 0x10001)
        word = ones ^ Uint32(minus << 15) ^ Uint32(next_minus << 31)
        return [word, word, word, word ^ Uint32(0x80008000)]

    def rotate(self, h, a, scales, into):
        """This warp's 16 rows along K, then along N: H of 16 of what it takes."""
        sums = self.along_columns(h, a)
        for j in range(PARTS):
            for c in range(2):
                pair = [
                    pack2(*(sums[j][v][2 * c + e] * scales[v][e] for e in range(2)), self.out)
                    for v in range(2)
                ]
                turned = mma([Float32(0)] * 4, h, pair, self.out)
                for v in range(2):
                    place = v * 8 * RESTORED_ROW + (j * SIDE + c * 8) * 4
                    store_shared(into + place, turned[2 * v : 2 * v + 2])

    def along_columns(self, h, a):
        """H V^T of this warp's 16 rows: of each 16 columns, registers of 8 rows and of the others.

        A lane has columns g and g + 8 of rows 2t and 2t + 1, where its operand a has columns 2t
        and 2t + 1 of rows g and g + 8.
        """
        zeros = [Float32(0)] * 4
        parts = [
            [mma(zeros, h, [a[4 * j + v], a[4 * j + 2 + v]], self.out) for v in range(2)]
            for j in range(PARTS)
        ]
        flat = butterflies([[x for four in part for x in four] for part in parts])
        return [[part[:4], part[4:]] for part in flat]

    def along_rows(self, back, first_row, column, inside, out, given):
        """Two of each 16 rows, four columns: the rest of H, both vectors, and whole lines of W."""
        for r in range(2):
            parts = butterflies(
                [
                    load_shared(back, 4, (part * SIDE + r) * RESTORED_ROW, True, Float32)
                    for part in range(PARTS)
                ]
            )
            for part in range(PARTS):
                row = Int64(first_row + part * SIDE + r)
                each = zip(parts[part], inside, strict=True)
                four = [x * (out[r][part] * factor) for x, factor in each]
                pairs = [pack2(*four[2 * e : 2 * e + 2], self.out) for e in range(2)]
                store_global(given.y.toint() + (row * given.k + column) * 2, pairs)


def butterflies(parts):
    """Sylvester's matrix of as many rows as there are parts, times their numbers."""
    parts, bit = [list(part) for part in parts], 1
    while bit < len(parts):
        for i in range(len(parts)):
            if not i & bit:
                low, high = parts[i], parts[i | bit]
                parts[i] = [x + y for x, y in zip(low, high, strict=True)]
                parts[i | bit] = [x - y for x, y in zip(low, high, strict=True)]
        bit *= 2
    return parts
