"""Other pipelines than `gemm.Gemm`'s, as subclasses that `ablation.py` compiles in its place.

Turns waits for its own products before it decodes on. Explicit is LiquidGEMM's explicit
coarse-grained pipeline (section 5.1, figure 6): one warpgroup decodes whole K tiles into shared
memory, another multiplies from there; two buffers of decoded weights go back and forth between them
by named barriers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.lang import Word
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.hopper.gemm import Gemm
from anybit.kernels.hopper.tile import Kernel

BUFFERS = 2  # of decoded weights
DECODED, FREE = 3, 5  # named barriers, one for each buffer


class Turns(Gemm):
    running = 0


class Explicit(Gemm):
    source = warpgroup.OperandSource.SMEM
    multipliers = 1

    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        if kernel.tile.rows != ROWS or kernel.tile.split > 1 or kernel.tile.tokens > 128:
            raise ValueError("the explicit pipeline takes 128 rows, 128 tokens at most, no split")
        self.buffer = ROWS * K_TILE * self.a.width // 8
        # The decoded weights lie first in shared memory, so on a swizzle atom's 1024 bytes.
        self.table_bytes = BUFFERS * self.buffer

    @cute.jit
    def consume(
        self, mma, s_x, shared, row_scale, row_zero, token_scale, token_sum, bias, outputs,
        workspace, problem, turns, rank, thread,
    ):  # fmt: skip
        first, tiles, (_, ctas), _, k_last = turns
        group = cute.arch.make_warp_uniform(thread // 128)
        t = thread % 128
        start = shared.table.data_ptr().align(1024)
        tensors = (row_scale, row_zero, token_scale, token_sum, bias, outputs)
        steps = ((tiles - first + ctas - 1) // ctas) * k_last
        if group == 0:
            self.decode(shared, start, t, steps)
        else:
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.a)
            layout = cute.tile_to_shape(atom, (ROWS, K_TILE, BUFFERS), order=(0, 1, 2))
            pointer = cute.recast_ptr(start, layout.inner, self.a)
            s_a = cute.make_tensor(pointer, layout.outer)
            part = mma.get_slice(t)
            fragments = (
                mma, mma.make_fragment_A(part.partition_A(s_a)),
                mma.make_fragment_B(part.partition_B(s_x)),
                cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tokens)), self.acc),
            )  # fmt: skip
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for i in cutlass.range_constexpr(BUFFERS):
                cute.arch.barrier_arrive(barrier_id=FREE + i, number_of_threads=256)
            tile, step = first, Int32(0)
            while tile < tiles:
                step = self.multiply_tile(
                    fragments, shared, tensors, problem, tile, k_last, step, t
                )
                tile += ctas

    def fetch_channels(
        self, row_scale: Any, row_zero: Any, bias: Any, row: Any, channel: Any, n: Any
    ) -> tuple:
        """Of both blocks of 64 rows, which one warpgroup multiplies."""
        halves = [
            super(Explicit, self).fetch_channels(
                row_scale, row_zero, bias, row + at, channel + at, n
            )
            for at in (0, 64)
        ]
        out = []
        for low, high in zip(*halves, strict=True):
            both = cute.make_rmem_tensor((2, 2), low.element_type)
            for v in range(2):
                both[v, 0], both[v, 1] = low[v, 0], high[v, 0]
            out.append(both)
        return tuple(out)

    @cute.jit
    def free(self, empty, step):
        """The products of a K tile have ended."""
        self.release(empty + step % self.stages, step >= 0)
        cute.arch.barrier_arrive(barrier_id=FREE + step % BUFFERS, number_of_threads=256)

    @cute.jit
    def decode(self, shared, start, t, steps):
        """Every K tile of every tile: codes of both warpgroups' rows to swizzled shared memory."""
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        slot, g = const_expr(self.decoder.slot), t % 32 // 4
        step = Int32(0)
        while step < steps:
            stage, buffer = step % self.stages, step % BUFFERS
            cute.arch.mbarrier_wait(full + stage, step // self.stages % 2)
            cute.arch.barrier(barrier_id=FREE + buffer, number_of_threads=256)
            for group in cutlass.range_constexpr(2):
                words, grid = self.read_words(shared, group, t, stage)
                row = group * 64 + t // 32 * 16 + g
                for half in cutlass.range_constexpr(2):
                    for r, word in enumerate(self.decoded_half(words, grid, half)):
                        # 16 bytes of a row of 128: `pack.fragment`; swizzled by the row.
                        chunk = const_expr(half * 64 * slot // 128 + r // 4 * 2 + r // 2 % 2)
                        at = (row + r % 2 * 8) * 128 + ((chunk % 8) ^ g) * 16 + t % 4 * 4
                        at += buffer * self.buffer + const_expr(chunk // 8 * ROWS * 128)
                        place = cute.recast_ptr((start + at).align(4), dtype=Uint32)
                        cute.make_tensor(place, cute.make_layout(1))[0] = word.bits
            self.release(empty + stage, step >= 0)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier_arrive(barrier_id=DECODED + buffer, number_of_threads=256)
            step += 1

    def decoded_half(self, words: Any, grid: Any, half: int) -> list[Word]:
        """As `decode_half`, of the only block."""
        d = self.decoder
        codes = [Word(words[w % 4, w // 4, 0]) for w in range(half * d.bits, (half + 1) * d.bits)]
        entries = range(half * d.entries // 2, -(-(half + 1) * d.entries // 2))
        each = range(d.grid_words)
        constants = [
            d.constants([Word(grid[e * d.grid_words + j, 0]) for j in each]) for e in entries
        ]
        return d.registers(codes, constants)

    @cute.jit
    def multiply_tile(self, fragments, shared, tensors, problem, tile, k_tiles, step, t):
        """One tile. Returns the number of K tiles so far."""
        mma, operand, x_fragment, acc = fragments
        row_scale, row_zero, token_scale, token_sum, bias, outputs = tensors
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        row_tile, _, expert, start, end = self.locate(tile, problem)
        tokens = self.fetch_tokens(token_scale, token_sum, start, end, t)
        channel = row_tile * ROWS + t // 32 * 16 + t % 32 // 4
        n = problem[2]
        row = expert * (problem[5] * ROW_MULTIPLE) + channel
        channels = self.fetch_channels(row_scale, row_zero, bias, row, channel, n)
        acc.fill(0)
        begin, last = step, step + k_tiles
        while step < last:
            stage, buffer = step % self.stages, step % BUFFERS
            cute.arch.mbarrier_wait(full + stage, step // self.stages % 2)
            cute.arch.barrier(barrier_id=DECODED + buffer, number_of_threads=256)
            warpgroup.fence()
            for j in cutlass.range_constexpr(2 * self.per_half):
                a, b = operand[None, None, j, buffer], x_fragment[None, None, j, stage]
                cute.gemm(mma, acc, a, b, acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if step > begin:
                self.free(empty, step - 1)
            step += 1
        warpgroup.wait_group(0)
        self.free(empty, last - 1)
        table = self.share_tokens(shared, tokens, 1, t)
        for i in cutlass.range_constexpr(2):
            self.store(
                acc, i, channels, table, outputs, n,
                row_tile * ROWS + i * 64 + t // 32 * 16, start, end,
                shared.outputs.data_ptr() + (4 + t // 32) * (48 * self.batch), t % 32,
            )  # fmt: skip
        cute.arch.barrier(barrier_id=2, number_of_threads=128)  # the table is read
        return step
