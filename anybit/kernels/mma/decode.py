"""A weight's decoded copy, for products of many tokens."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import store_global
from anybit.kernels.mma.product import Product
from anybit.kernels.mma.ptx import load_once, load_words, scale_pair


class Decode(Product):
    """y (N, K) = W, in fp16 or bf16; a warp writes 16 rows of a K tile.

    Or y is W in blobs of whole bytes, as `pack` makes them of codes of 8 bits (`Decoder.verbatim`).
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
        if const_expr(self.integer):
            into = y.toint() + Int64(slot // 8 * k_tiles + kt) * (K_TILE * K_TILE)
            into += group * (K_TILE * K_TILE // 2) + quarter * 512 + lane * 16
            for half in cutlass.range_constexpr(2):
                registers = [Uint32(r) ^ 0xFFFFFFFF for r in self.decode_half(words, grid, half)]
                for c in cutlass.range_constexpr(2):
                    store_global(into + (half * 2 + c) * 2048, registers[4 * c : 4 * c + 4])
        else:
            self.write_numbers(words, grid, row_scale, y, slot * 16, kt, lane, n, k)

    @cute.jit
    def write_numbers(self, words, grid, row_scale, y, row, kt, lane, n, k):
        """16 rows of a K tile, times their scales."""
        row += lane // 4
        scales = [load_once(row_scale.toint() + Int64(row + v * 8) * 4, cutlass.Float32)
                  for v in range(2)]  # fmt: skip
        to = y.toint() + (Int64(row) * k + (kt * K_TILE + lane % 4 * 2)) * 2
        for half in cutlass.range_constexpr(2):
            registers = self.decode_half(words, grid, half)
            for r in cutlass.range_constexpr(len(registers)):
                v, column = const_expr(r % 2), const_expr(half * 64 + r // 4 * 16 + r // 2 % 2 * 8)
                if (row + v * 8 < n) & (kt * K_TILE + column + lane % 4 * 2 < k):
                    word = scale_pair(Uint32(registers[r]), scales[v], self.out)
                    store_global(to + Int64(v * 8) * k * 2 + column * 2, [word])
