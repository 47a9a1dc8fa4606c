"""A weight's decoded copy, for the library's product of many tokens."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import load_shared, store_global, store_shared
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import load_once, load_words, scale_pair
from anybit.kernels.mma.tiles import DECODED_ROW


class Decode(Product):
    """y (N, K) = W, in fp16 or bf16; a warp writes 16 rows of a K tile.

    A lane holds two columns of a row here and there. Written at once, they would be 16 bytes at
    most side by side, half a sector; so rows are put together in shared memory.
    """

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
        k_tiles = (k + (K_TILE - 1)) // K_TILE
        slot, kt = cta // k_tiles * self.warps + thread // 32, cta % k_tiles
        lane = thread % 32
        group, quarter = slot // 4 % 2, slot % 4
        blob = w.toint() + Int64(slot // 8 * k_tiles + kt) * self.decoder.blob_bytes
        codes = blob + group * (512 * self.words)
        words, grid = [], []
        for c in cutlass.range_constexpr(self.whole):
            words += load_words(codes + quarter * 512 + lane * 16, 4, c * 2048)
        if const_expr(self.words % 4):
            words += load_words(codes + quarter * 256 + lane * 8, 2, self.whole * 2048)
        size = const_expr(self.grid_bytes // 32)
        pairs = blob + self.code_bytes + (group * 4 + quarter) * self.grid_bytes
        for c in cutlass.range_constexpr(0, size, 4):
            grid += load_words(pairs + lane // 4 * (4 * size), min(size, 4), 4 * c)
        row = slot * 16 + lane // 4
        scales = [load_once(row_scale.toint() + Int64(row + v * 8) * 4, cutlass.Float32)
                  for v in range(2)]  # fmt: skip
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        base = Int32(shared.data.data_ptr().toint()) + thread // 32 * (16 * DECODED_ROW)
        to = base + lane // 4 * DECODED_ROW + lane % 4 * 4
        for half in cutlass.range_constexpr(2):
            registers = self.decode_half(words, grid, half)
            for r in cutlass.range_constexpr(len(registers)):
                v, column = const_expr(r % 2), const_expr(half * 64 + r // 4 * 16 + r // 2 % 2 * 8)
                word = scale_pair(Uint32(registers[r]), scales[v], self.out)
                store_shared(to + (v * 8 * DECODED_ROW + column * 2), [word])
        cute.arch.sync_warp()
        # Two rows at a time: a lane has 8 columns, which K is a multiple of.
        row, column = slot * 16 + lane // 16, kt * K_TILE + lane % 16 * 8
        found = base + lane // 16 * DECODED_ROW + lane % 16 * 16
        out = y.toint() + (Int64(row) * k + column) * 2
        for i in cutlass.range_constexpr(8):
            if (row + 2 * i < n) & (column < k):
                piece = load_shared(found, 4, 2 * i * DECODED_ROW, True)
                store_global(out + Int64(2 * i) * k * 2, piece)
