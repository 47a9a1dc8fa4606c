"""What the main loops of this family share: words from shared memory to sums in registers.

The blobs and decoders are Hopper's: of a warp, a WGMMA's A operand in registers is that of m16n8k16
or m16n8k32 products. A warp multiplies `slices` of 16 rows by all tokens of its tile, so nothing is
decoded twice. Tokens lie in shared memory as they come, in pieces of 16 bytes that are XORed with
the token, so that `ldmatrix` meets no bank twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.jit import Compiled, compile_program
from anybit.kernels.cute.lang import Table, Word
from anybit.kernels.cute.launch import ProductArguments
from anybit.kernels.cute.pairs import added_up, offset_of_second, row_of_y
from anybit.kernels.cute.program import Program
from anybit.kernels.cute.ptx import (
    TYPES,
    dp4a,
    load_matrices,
    load_shared,
    mma,
    pack2,
    store_global,
)
from anybit.kernels.cute.table import load, store
from anybit.kernels.mma.ptx import load_half, load_late, load_once, transpose
from anybit.kernels.mma.tiles import Kernel, grid_bytes, shared_bytes, stage_bytes, token_bytes


class Product(Program):
    """A kernel with `ProductArguments`, unless `parameters` are others."""

    aligned = 256
    parameters: type = ProductArguments
    ring_threads: int  # that share a ring

    def __init__(self, spec: Kernel):
        d, t = spec.decoder, spec.tile
        self.spec, self.decoder, self.tile = spec, d, t
        self.tokens, self.slices, self.warps, self.stages = t.tokens, t.slices, t.warps, t.stages
        self.rows, self.threads, self.ctas = t.rows, t.threads, t.ctas
        self.overlap = spec.overlap
        self.activation, self.out = spec.activation, spec.output
        self.integer = self.activation == "int8"
        self.quantized = self.activation in ("int8", "float8_e4m3fn")
        self.joins = self.integer and not (t.sorted or t.columns)  # outputs of some rows of tokens
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
        self.blocks = -(-self.tokens // 8)
        self.shared_bytes = shared_bytes(t, d)
        # Registers of tokens are fewer than those of weights.
        self.arranged = d.arranges and t.kind != "decode" and self.blocks < 2 * self.slices
        # Of one token, four DP4As take less time than a product of eight on the tensor core.
        self.dotted = self.integer and self.tokens == 1
        self.looked_up = ()  # what `registers` gets of decoders that have a table

    @property
    def types(self) -> dict:
        """What addresses are of, with their alignment."""
        out, fp32, word = TYPES[self.out], (Float32, 4), (Int32, 4)
        return {
            "x": (TYPES[self.activation], 16),
            "w": (Uint8, 128),
            "row_scale": fp32,
            "row_zero": word,
            "table": word,
            "token_scale": fp32,
            "token_sum": word,
            "bias": (out, 2),
            "y": (out, 16),
            "work": (Float32, 16),
            "counters": word,
            "starts": word,
            "pairs": word,
        }

    def compile(self) -> Compiled:
        """For the architecture of the kernel."""
        return compile_program(self, self.parameters, self.types, self.spec.architecture)

    # A table, for decoders that look weights up; what follows it in shared memory is rings.

    def place_table(self, base):
        """Where the rings begin."""
        if self.decoder.table_bytes:
            self.looked_up = Table(base), self.arranged
        return base + self.decoder.table_bytes

    def load_table(self, given, thread):
        """Before what waits for the previous kernel."""
        if not self.decoder.table_bytes:
            return []
        return load(given.table.toint(), thread, self.threads)

    def store_table(self, words, thread):
        """Before a barrier of all threads."""
        if words:
            store(self.looked_up[0].words, words, thread, self.threads)

    # Multiplying.

    @cute.jit
    def lookup(self, ring, lane):
        """Address of this lane's row for `ldmatrix`, but for stage and step."""
        if const_expr(self.tokens <= 8):  # four pieces of 8 tokens, or of one, eight times
            r = lane % self.tokens
            return ring + self.x_at + r * self.token_bytes + (((lane // 8) ^ r) * 16)
        r = lane % 8
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
        return [word.bits for word in d.registers(codes, constants, *self.looked_up)]

    def multiply_half(self, acc, row, a, half):
        """Products of 64 columns: a[slice] are the decoded registers."""
        steps = self.steps // 2
        if self.tokens <= 8:
            for j in range(0, steps, 2):
                b = self.arrange(load_matrices(row ^ ((half * steps + j) * 32)))
                for jj in range(2):
                    for i in range(self.slices):
                        self.product(acc, 0, i, a[i], j + jj, b[2 * jj : 2 * jj + 2])
            return
        for j in range(steps):
            address = row ^ ((half * steps + j) * 32)
            for p in range(self.blocks // 2):
                b = self.arrange(load_matrices(address, p * 16 * self.token_bytes))
                for q in range(2):
                    for i in range(self.slices):
                        self.product(acc, 2 * p + q, i, a[i], j, b[2 * q : 2 * q + 2])

    def arrange(self, b):
        """Two operands of tokens as the weights' columns are."""
        if not self.arranged:
            return b
        return [word.bits for word in self.decoder.arrange([Word(w) for w in b])]

    def product(self, acc, block, i, a, j, b):
        if self.dotted:  # this lane's columns of two rows; `Narrow.total` adds up a quad's
            for r in range(4):
                acc[r % 2 * 2, block, i] = Int32(
                    dp4a(Uint32(a[4 * j + r]), b[r // 2], acc[r % 2 * 2, block, i], True)
                )
            return
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
            self.copy_slice(i, to, thread, codes, rest, i * 512, i * 256, fetch)

    def copy_slice(self, i, to, thread, codes, rest, at, at_rest, fetch):
        """As `copy_words`, of slice i, which lies `at` (`at_rest`) bytes further."""
        for c in range(self.whole):
            into = (i * self.whole + c) * self.ring_threads * 16
            fetch(to + thread * 16, into, codes, at + c * 2048)
        if self.words % 4:
            into = self.slices * self.whole * self.ring_threads * 16
            fetch(to + thread * 8, into + i * self.ring_threads * 8, rest, at_rest, 8)

    # Finishing.

    @cute.jit
    def row_values(self, given, before, row):
        """Scale, zero point and bias of a row; rows of weights are padded, biases are not.

        before: bytes of scales before the expert's. Without a bias in `given`, there is none.
        """
        scale = load_once(given.row_scale.toint() + before + Int64(row) * 4, Float32)
        zero = Int32(0)
        if const_expr(self.integer):
            zero = load_once(given.row_zero.toint() + before + Int64(row) * 4, Int32)
        offset = Float32(0.0)
        if const_expr(given.bias is not None):  # noqa: SIM102 - known when it is compiled
            if given.bias.toint() != 0:
                column = Int64(cutlass.min(row, given.n - 1))
                offset = load_half(given.bias.toint() + column * 2, self.out)
        return scale, zero, offset

    @cute.jit
    def token_values(self, given, token):
        """Scale and code sum of a token."""
        scale, total = Float32(1.0), Int32(0)
        if const_expr(self.quantized):
            at = Int64(cutlass.min(token, given.m - 1)) * 4
            scale = load_late(given.token_scale.toint() + at, Float32)
            if const_expr(self.integer):
                total = load_late(given.token_sum.toint() + at, Int32)
        return scale, total

    @cute.jit
    def two_tokens(self, given, token):
        """`token_values` of a token and the next one, and how many pairs of rows are joined."""
        count = Int32(0)
        if const_expr(self.joins):  # noqa: SIM102 - known when it is compiled
            if given.pairs.toint() != 0:
                count = load_late(given.pairs.toint(), Int32)
        return self.token_values(given, token), self.token_values(given, token + 1), count

    @cute.jit
    def store_pair(self, given, sums, row, tokens, token, channel, end):
        """Scale, add the bias, round, transpose, and write two channels of a token.

        Args:
            sums: Of this lane's row and two tokens.
            row: `row_values`; tokens: `two_tokens`.
            token: That this lane stores, before `end`; channel: the first of two.
        """
        scale, zero, offset = row
        pair, lane = [], cute.arch.lane_idx()
        joined = token - lane // 4 + lane % 4 * 2 < 2 * tokens[2]
        for c in cutlass.range_constexpr(2):
            value = sums[c]
            if const_expr(self.integer):
                value = value - zero * tokens[c][1]
            factor = scale
            if const_expr(self.quantized):
                factor = factor * tokens[c][0]
            if const_expr(self.joins and c == 1):
                offset = offset_of_second(offset, joined)
            pair.append(value.to(Float32) * factor + offset)
        if const_expr(self.joins):
            pair = added_up(pair, joined)
        word = transpose(pack2(*pair, self.out))
        at, whole = token, token < end
        if const_expr(self.joins):
            at, whole = row_of_y(token, tokens[2])
            whole = whole & (token < end)
        if whole & (channel < given.n):
            to = given.y.toint() + (Int64(at) * given.n + channel) * 2
            store_global(to, [word])
