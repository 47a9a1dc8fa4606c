"""What the main loops of this family share: words from shared memory to sums in registers.

The blobs and decoders are Hopper's: of a warp, a WGMMA's A operand in registers is that of m16n8k16
or m16n8k32 products. A warp multiplies `slices` of 16 rows by all tokens of its tile, so nothing is
decoded twice. Tokens lie in shared memory as they come, in pieces of 16 bytes that are XORed with
the token, so that `ldmatrix` meets no bank twice.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.jit import Compiled, compile_program
from anybit.kernels.cute.lang import Word
from anybit.kernels.cute.ptx import TYPES, load_matrices, load_shared, pack2, store_global
from anybit.kernels.mma.ptx import load_half, load_late, load_once, mma, transpose
from anybit.kernels.mma.tiles import Kernel, grid_bytes, shared_bytes, stage_bytes, token_bytes


class Product:
    """A kernel with the parameters of `launch.MmaArguments`."""

    kernel: Any
    ring_threads: int  # that share a ring

    def __init__(self, spec: Kernel):
        d, t = spec.decoder, spec.tile
        self.spec, self.decoder, self.tile = spec, d, t
        self.tokens, self.slices, self.warps, self.stages = t.tokens, t.slices, t.warps, t.stages
        self.rows, self.threads = t.rows, t.threads
        self.activation, self.out = spec.activation, spec.output
        self.integer = self.activation == "int8"
        self.quantized = self.activation in ("int8", "float8_e4m3fn")
        self.acc = Int32 if self.integer else Float32
        self.words = 2 * d.bits  # code words of a thread, slice and K tile
        self.whole = self.words // 4  # chunks of 4 words; 2 words may remain
        self.code_bytes = K_TILE * K_TILE * d.bits // 8  # of a blob
        self.grid_bytes = grid_bytes(d)
        self.token_bytes = token_bytes(d)
        self.stage_bytes = stage_bytes(t, d)
        self.x_at = self.stage_bytes - t.tokens * self.token_bytes
        self.width = d.slot // 8  # bytes of a number of X
        self.columns = self.token_bytes // 16  # pieces of a token in a K tile
        self.steps = self.token_bytes // 32  # products along a K tile
        self.blocks = self.tokens // 8
        self.shared_bytes = shared_bytes(t, d)

    def compile(self) -> Compiled:
        """For the architecture of the kernel."""
        out = TYPES[self.out]
        pointers = [(TYPES[self.activation], 16), (Uint8, 128), (Float32, 4), (Int32, 4),
                    (Float32, 4), (Int32, 4), (out, 2), (out, 16), (Float32, 16),
                    (Int32, 4), (Int32, 4)]  # fmt: skip
        return compile_program(self, pointers, 5, self.spec.architecture)

    @cute.jit
    def __call__(
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
        grid: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Shared:
            data: cute.struct.Align[cute.struct.MemRange[Uint8, self.shared_bytes], 256]

        self.shared = Shared
        self.kernel(
            x, w, row_scale, row_zero, token_scale, token_sum, bias, y, work, counters, starts,
            m, n, k, experts,
        ).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.tile.ctas,
            preferred_smem_carveout=100,
            use_pdl=self.spec.overlap,
            stream=stream,
        )  # fmt: skip

    # Multiplying.

    @cute.jit
    def lookup(self, ring, lane):
        """Address of this lane's row for `ldmatrix`, but for stage and step."""
        r = lane % 8
        if const_expr(self.tokens == 8):  # four pieces of 8 tokens
            return ring + self.x_at + r * self.token_bytes + (((lane // 8) ^ r) * 16)
        token = lane // 16 * 8 + r
        return ring + self.x_at + token * self.token_bytes + (((lane // 8 % 2) ^ r) * 16)

    def multiply(self, acc, stage, row, thread, grids):
        """Add a K tile's products.

        Args:
            acc: Sums (4, blocks of 8 tokens, slices).
            stage: Where the stage lies.
            row: `lookup` in it.
            thread: Of those that share the ring.
            grids: Where the grid words of this warp's first slice lie in the stage.
        """
        words, grid = self.read_words(stage, thread, grids)
        for half in range(2):
            a = [self.decode_half(words[i], grid[i], half) for i in range(self.slices)]
            self.multiply_half(acc, row, a, half)

    def read_words(self, stage, thread, grids):
        """This thread's code and grid words of each slice."""
        words, grid = [], []
        for i in range(self.slices):
            found = []
            for c in range(self.whole):
                piece = (i * self.whole + c) * self.ring_threads * 16
                found += load_shared(stage + thread * 16, 4, piece, True)
            if self.words % 4:
                piece = self.slices * self.whole * self.ring_threads * 16
                found += load_shared(stage + thread * 8, 2, piece + i * self.ring_threads * 8, True)
            words.append(found)
            some, n = [], self.grid_bytes // 32
            for c in range(0, n, 4):
                pair = stage + grids + thread % 32 // 4 * (4 * n)
                some += load_shared(pair, min(n, 4), i * self.grid_bytes + 4 * c, True)
            grid.append(some)
        return words, grid

    def decode_half(self, words, grid, half):
        """A registers of 64 columns; as `hopper.gemm.Gemm.decode_half`."""
        d = self.decoder
        codes = [Word(w) for w in words[half * d.bits : (half + 1) * d.bits]]
        entries = range(half * d.entries // 2, -(-(half + 1) * d.entries // 2))
        each = d.grid_words
        constants = [d.constants([Word(grid[e * each + j]) for j in range(each)]) for e in entries]
        return [word.bits for word in d.registers(codes, constants)]

    def multiply_half(self, acc, row, a, half):
        """Products of 64 columns: a[slice] are the decoded registers."""
        steps = self.steps // 2
        if self.tokens == 8:
            for j in range(0, steps, 2):
                b = load_matrices(row ^ ((half * steps + j) * 32))
                for jj in range(2):
                    for i in range(self.slices):
                        self.product(acc, 0, i, a[i], j + jj, b[2 * jj : 2 * jj + 2])
            return
        for j in range(steps):
            address = row ^ ((half * steps + j) * 32)
            for p in range(self.blocks // 2):
                b = load_matrices(address, p * 16 * self.token_bytes)
                for q in range(2):
                    for i in range(self.slices):
                        self.product(acc, 2 * p + q, i, a[i], j, b[2 * q : 2 * q + 2])

    def product(self, acc, block, i, a, j, b):
        sums = mma([acc[c, block, i] for c in range(4)], a[4 * j : 4 * j + 4], b, self.activation)
        for c in range(4):
            acc[c, block, i] = sums[c]

    # Fetching.

    def copy_words(self, to, thread, codes, rest, fetch):
        """Start the copies of a K tile's code words; every thread those that itself decodes.

        Args:
            to: The stage.
            thread: Of those that share the ring.
            codes: Where this thread's first 16 bytes of a blob lie; the next chunk's are 2048
                further, the next slice's 512.
            rest: Where its 8 bytes behind all chunks lie; the next slice's are 256 further.
            fetch: `ptx.copy`.
        """
        for i in range(self.slices):
            for c in range(self.whole):
                into = (i * self.whole + c) * self.ring_threads * 16
                fetch(to + thread * 16, into, codes, i * 512 + c * 2048)
            if self.words % 4:
                into = self.slices * self.whole * self.ring_threads * 16
                fetch(to + thread * 8, into + i * self.ring_threads * 8, rest, i * 256, 8)

    # Finishing.

    @cute.jit
    def row_values(self, row_scale, row_zero, bias, row, n):
        """Scale, zero point and bias of a channel; rows of weights are padded, biases are not."""
        scale = load_once(Int64(row_scale) + Int64(row) * 4, Float32)
        zero = Int32(0)
        if const_expr(self.integer):
            zero = load_once(Int64(row_zero) + Int64(row) * 4, Int32)
        offset = Float32(0.0)
        if Int64(bias) != 0:
            offset = load_half(Int64(bias) + Int64(cutlass.min(row, n - 1)) * 2, self.out)
        return scale, zero, offset

    @cute.jit
    def token_values(self, token_scale, token_sum, token, m):
        """Scale and code sum of a token."""
        scale, total = Float32(1.0), Int32(0)
        if const_expr(self.quantized):
            at = Int64(cutlass.min(token, m - 1)) * 4
            scale = load_late(Int64(token_scale) + at, Float32)
            if const_expr(self.integer):
                total = load_late(Int64(token_sum) + at, Int32)
        return scale, total

    @cute.jit
    def store_pair(self, sums, row, tokens, y, token, channel, m, n):
        """Scale, add the bias, round, transpose, and write two channels of a token.

        Args:
            sums: Of this lane's row and two tokens.
            row: `row_values`; tokens: `token_values` of both.
            y: Address of the output.
            token: That this lane stores, and `channel` the first of two.
        """
        scale, zero, offset = row
        pair = []
        for c in cutlass.range_constexpr(2):
            value = sums[c]
            if const_expr(self.integer):
                value = value - zero * tokens[c][1]
            factor = scale
            if const_expr(self.quantized):
                factor = factor * tokens[c][0]
            pair.append(value.to(Float32) * factor + offset)
        word = transpose(pack2(*pair, self.out))
        if (token < m) & (channel < n):
            store_global(Int64(y) + (Int64(token) * n + channel) * 2, [word])
