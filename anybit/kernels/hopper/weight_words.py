"""What a consumer of the main loop reads of a K tile's weights, and decodes."""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32, const_expr

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.lang import Table, Word


class Words:
    """The part of `gemm.Gemm` between a K tile's bytes and A registers."""

    decoder: Decoder
    tables: tuple[Table, ...]  # one, or none
    words: int  # code words of a thread and K tile
    whole: int  # chunks of 4 of them; 2 words may remain
    grid_words: int  # of a row's two neighbours
    blob: int  # bytes of 128 rows
    blocks: int  # of 128 rows in a tile
    slots: int  # K tiles in flight

    @cute.jit
    def read_words(self, shared, group, t, slot):
        """A thread's code and grid words of a K tile, 16 bytes at a time."""
        blob, blocks = const_expr(self.blob // 4), const_expr(self.blocks)
        base = cute.recast_ptr(shared.w.data_ptr(), dtype=Uint32)
        strides = (128 * self.words, blob, blocks * blob)  # warpgroup, blob, slot
        shape = (2, blocks, self.slots)
        words = cute.make_rmem_tensor((4, self.whole + 1, blocks), Uint32)
        grid = cute.make_rmem_tensor((max(self.grid_words, 1), blocks), Uint32)
        by4 = cute.make_tensor(
            base, cute.make_layout((4, 128, self.whole + 1, *shape), stride=(1, 4, 512, *strides))
        )
        by2 = cute.make_tensor(
            base + self.whole * 512,
            cute.make_layout((2, 128, *shape), stride=(1, 2, *strides)),
        )
        pairs = cute.make_tensor(
            base + 2 * 128 * self.words,
            cute.make_layout(
                (max(self.grid_words, 1), 32, *shape),
                stride=(1, max(self.grid_words, 1), 32 * self.grid_words, blob, blocks * blob),
            ),
        )
        pair = t // 32 * 8 + t % 32 // 4
        for i in cutlass.range_constexpr(blocks):
            for c in cutlass.range_constexpr(self.whole):
                cute.autovec_copy(by4[None, t, c, group, i, slot], words[None, c, i])
            if const_expr(self.words % 4):
                rest = cute.make_rmem_tensor((2,), Uint32)
                cute.autovec_copy(by2[None, t, group, i, slot], rest)
                words[0, self.whole, i], words[1, self.whole, i] = rest[0], rest[1]
            if const_expr(self.grid_words):
                cute.autovec_copy(pairs[None, pair, group, i, slot], grid[None, i])
        return words, grid

    @cute.jit
    def decode_half(
        self,
        words,
        grid,
        registers,
        half: cutlass.Constexpr[int],
        i: cutlass.Constexpr[int],
        place: cutlass.Constexpr[int],
    ):
        """64 columns of block i: code words -> A registers of their WGMMAs, from `place` on."""
        d = self.decoder
        codes = [Word(words[w % 4, w // 4, i]) for w in range(half * d.bits, (half + 1) * d.bits)]
        entries = range(half * d.entries // 2, -(-(half + 1) * d.entries // 2))
        each = d.grid_words
        constants = [
            d.constants([Word(grid[e * each + j, i]) for j in range(each)]) for e in entries
        ]
        for r, word in enumerate(d.registers(codes, constants, *self.tables)):
            registers[(0, r % 2, r // 2 % 2), 0, place + r // 4] = word.bits
