"""The tensor core's products of a tile, and the tokens of it that are multiplied."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from anybit.kernels.cute.pack import ROWS


class Pieces:
    """The part of `gemm.Gemm` that names WGMMAs, their tokens and their sums.

    A tile of experts has several pieces of tokens. Its first one is always multiplied, others where
    there are so many: the last tile of an expert is rarely full.
    """

    source: Any  # of the decoded weights
    multipliers: int  # warpgroups that multiply
    tokens: int  # of a tile
    pieces: tuple[int, ...]  # of them
    piece: int  # tokens of a WGMMA at most
    columns: int  # of a stage
    stages: int
    per_half: int  # WGMMAs of 64 columns
    steps: int  # of a stage
    k_mma: int  # columns of one
    a: Any  # type of the weights
    b: Any  # of the tokens
    quantized: bool
    products: Any  # type of the sums

    def mma_op(self, tokens: int) -> Any:
        shape = (64, min(tokens, self.piece), self.k_mma)
        where = (self.source, OperandMajorMode.K, OperandMajorMode.K)
        if self.products is Int32:
            return warpgroup.MmaI8Op(self.a, self.b, Int32, shape, *where)
        if self.quantized:
            return warpgroup.MmaF8Op(self.a, self.b, Float32, shape, *where)
        return warpgroup.MmaF16BF16Op(self.a, Float32, shape, *where)

    def tiled_mma(self, tokens: int) -> Any:
        atom = cute.make_mma_atom(self.mma_op(tokens))
        return cute.make_tiled_mma(atom, (self.multipliers, 1, 1))

    def further(self, s_x: Any, thread: Any) -> list:
        """Of every piece but the first: its first token, its products, what they read."""
        found, first = [], self.pieces[0]
        for tokens in self.pieces[1:]:
            mma = self.tiled_mma(tokens)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            found.append((first, tokens, mma, self.tokens_of(s_x, mma, thread, first, tokens)))
            first += tokens
        return found

    def tokens_of(self, s_x: Any, mma: Any, thread: Any, first: int, tokens: int) -> Any:
        """What products of some tokens read of every stage."""
        shape = (tokens, self.columns, self.stages)
        x = cute.local_tile(cute.domain_offset((first, 0, 0), s_x), shape, (0, 0, 0))
        return mma.make_fragment_B(mma.get_slice(thread).partition_B(x))

    @cute.jit
    def multiply_further(
        self, more, operand, acc, stage, count, place, half: cutlass.Constexpr[int],
        block: cutlass.Constexpr[int],
    ):  # fmt: skip
        """64 columns of the pieces that `count` tokens reach, A lies at `place`.

        A branch around all WGMMAs of a piece; ptxas does not wait for them.
        """
        for i in cutlass.range_constexpr(len(more)):
            first, tokens, mma, x = more[i]
            if count > first:
                sums = self.sums_of(acc, mma, block, first, tokens)
                for j in cutlass.range_constexpr(self.per_half):
                    step = (half * self.per_half + j) % self.steps
                    a = operand[None, None, place + j]
                    cute.gemm(mma, sums, a, x[None, None, step, stage], sums)

    def sums_of(self, acc: Any, mma: Any, block: int, first: int, tokens: int) -> Any:
        """The accumulators of one block of 128 rows, and of some tokens."""
        layout = cute.make_layout(mma.partition_shape_C((ROWS, tokens)))
        return cute.make_tensor(acc.iterator + (block * self.tokens + first) // 2, layout)
