"""A weight's decoded copy, for products of many tokens."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.launch import ProductArguments
from anybit.kernels.cute.ptx import load_shared, store_global, store_shared
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import load_once, load_words, scale_pair
from anybit.kernels.mma.tiles import COPIED_ROW


class Decode(Product):
    """y (N, K) = W, in fp16 or bf16; a warp writes 16 rows of a few K tiles, by whole lines.

    Or y is W in blobs of whole bytes, as `pack` makes them of codes of 8 bits (`Decoder.verbatim`).
    """

    @cute.kernel
    def kernel(self, given: ProductArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        spans = (k_tiles + (self.stages - 1)) // self.stages
        slot, first = cta // spans * self.warps + thread // 32, cta % spans * self.stages
        lane = thread % 32
        room = Int32(0)
        if const_expr(self.shared_bytes):
            shared = cutlass.memory.SmemAllocator().allocate(self.shared)
            base = self.place_table(Int32(shared.data.data_ptr().toint()))
            if const_expr(self.decoder.table_bytes):
                self.store_table(self.load_table(given, thread), thread)
                cute.arch.sync_threads()
            room = base + thread // 32 * (16 * COPIED_ROW)
        row = slot * 16 + lane // 4
        scales = [
            load_once(given.row_scale.toint() + Int64(row + v * 8) * 4, cutlass.Float32)
            for v in range(2)
        ]
        blob = Int64(slot // 8 * k_tiles + first)
        for i in cutlass.range(cutlass.min(Int32(self.stages), k_tiles - first), unroll=1):
            at = given.w.toint() + (blob + i) * self.decoder.blob_bytes
            words, grid = self.load(at, slot, lane)
            for half in cutlass.range_constexpr(2):
                registers = self.decode_half(words, grid, half)
                if const_expr(self.integer):
                    to = given.y.toint() + (blob + i) * (K_TILE * K_TILE) + lane * 16
                    to += slot // 4 % 2 * (K_TILE * K_TILE // 2) + slot % 4 * 512
                    for c in cutlass.range_constexpr(2):
                        four = [Uint32(r) ^ 0xFFFFFFFF for r in registers[4 * c : 4 * c + 4]]
                        store_global(to + (half * 2 + c) * 2048, four)
                else:
                    column = (first + i) * K_TILE + half * 64
                    self.write(registers, scales, room, slot * 16, column, lane, given)

    def load(self, blob, slot, lane):
        """This lane's code and grid words of a K tile."""
        group, quarter = slot // 4 % 2, slot % 4
        codes = blob + group * (512 * self.words)
        words, grid = [], []
        for c in range(self.whole):
            words += load_words(codes + quarter * 512 + lane * 16, 4, c * 2048)
        if self.words % 4:
            words += load_words(codes + quarter * 256 + lane * 8, 2, self.whole * 2048)
        size = self.grid_bytes // 32
        pairs = blob + self.code_bytes + (group * 4 + quarter) * self.grid_bytes
        for c in range(0, size, 4):
            grid += load_words(pairs + lane // 4 * (4 * size), min(size, 4), 4 * c)
        return words, grid

    @cute.jit
    def write(self, registers, scales, room, row, column, lane, given):
        """16 rows of 64 columns, times their scales; through shared memory, to write 16 bytes."""
        into = room + lane // 4 * COPIED_ROW + lane % 4 * 4
        for r in cutlass.range_constexpr(len(registers)):
            v, at = const_expr(r % 2), const_expr(r // 4 * 32 + r // 2 % 2 * 16)
            word = scale_pair(Uint32(registers[r]), scales[v], self.out)
            store_shared(into + (v * 8 * COPIED_ROW + at), [word])
        cute.arch.sync_warp()
        piece = lane % 8
        for r in cutlass.range_constexpr(4):
            mine = r * 4 + lane // 8
            four = load_shared(room + mine * COPIED_ROW + piece * 16, 4, 0, True)
            if (row + mine < given.n) & (column + piece * 8 < given.k):
                to = given.y.toint() + (Int64(row + mine) * given.k + (column + piece * 8)) * 2
                store_global(to, four)
        cute.arch.sync_warp()
