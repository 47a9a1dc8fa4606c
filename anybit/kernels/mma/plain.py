"""Few tokens and a weight in 16 bits as it comes, row by row: `narrow.py` without a decoder.

A K tile of a row is 256 bytes, which half a warp copies. In shared memory rows lie as tokens do, so
that `ldmatrix` brings the operand's registers.

Of gate and up, 8 rows of each are a slice: a lane then has the sums of both, and writes SiLU(gate)
times up.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from anybit.kernels.cute.copies import copy_or_zero
from anybit.kernels.cute.launch import PlainArguments
from anybit.kernels.cute.ptx import load_matrices
from anybit.kernels.mma.narrow import Narrow
from anybit.kernels.mma.ptx import load_half, silu

# Of the pieces that a lane copies: from the address of a K tile on, what lies before `end` is not
# past K; its first row, the last one that the weight has, bytes of a row and of all rows.
Rows = namedtuple("Rows", "end row last stride whole")


class Plain(Narrow):
    parameters = PlainArguments
    each = 16  # rows of a slice that lie side by side in the weight

    @property
    def k_tile_bytes(self) -> int:
        return self.token_bytes

    def weights(self, given, row_tile, warp, lane):
        """Where this lane's piece of the tile's first row lies, and what it copies of others."""
        first, stride = row_tile * (self.slices * self.each), given.k * 2
        row = given.w.toint() + Int64(first) * stride
        at = row + warp * self.token_bytes + lane % 16 * 16
        whole = Int64(given.rows) * stride
        return at, Rows(row + stride, lane // 16, given.rows - 1 - first, stride, whole)

    @cute.jit
    def fetch_weights(self, to, at, rows, lane):
        """Start the copies of a K tile of this warp's rows; past K there are zeros."""
        inside = at < rows.end
        piece = (lane % 16) ^ rows.row
        for i in cutlass.range_constexpr(8 * self.slices):
            # Of its slice: a row of those side by side, or the same one of the weight's other half.
            slice_, line = divmod(2 * i, 16)
            row = cutlass.min(rows.row + slice_ * self.each + line % self.each, rows.last)
            source = at + Int64(row) * rows.stride
            if const_expr(line >= self.each):
                source += rows.whole
            into = to + rows.row * self.token_bytes + (piece ^ (2 * i & 6)) * 16
            copy_or_zero(into, 2 * i * self.token_bytes, source, 0, inside, Int32(1))

    def multiply(self, acc, stage, row, thread, grids):
        """Add a K tile's products; see `Product.multiply`."""
        line = thread % 16
        at = stage + line * self.token_bytes + ((thread // 16) ^ (line % 8)) * 16
        steps = self.steps // 2
        for half in range(2):
            a = []
            for i in range(self.slices):
                found = []
                for j in range(half * steps, (half + 1) * steps):
                    found += load_matrices(at ^ (j * 32), i * 16 * self.token_bytes)
                a.append(found)
            self.multiply_half(acc, row, a, half)

    @cute.jit
    def row_values(self, given, before, row):
        """As `Product.row_values`, of rows without scales."""
        offset = Float32(0.0)
        if given.bias.toint() != 0:
            offset = load_half(
                given.bias.toint() + Int64(cutlass.min(row, given.n - 1)) * 2, self.out
            )
        return Float32(1.0), Int32(0), offset


class Gated(Plain):
    """SiLU(gate) * up of a weight whose first half of rows is gate's, and whose other half is up's.

    `rows` and `n` are of a half.
    """

    each = 8

    @cute.jit
    def row_values(self, given, before, row):
        """Of a row of gate, or of up where it is one of the upper 8 of 16."""
        offset = Float32(0.0)
        if given.bias.toint() != 0:
            half = cutlass.min(row // 16 * 8 + row % 8, given.rows - 1) + row // 8 % 2 * given.rows
            offset = load_half(given.bias.toint() + Int64(half) * 2, self.out)
        return Float32(1.0), Int32(0), offset

    def add_up(self, given, at, rows, tokens, token, channel, end):
        """As `Narrow.add_up`: of 8 rows of gate and of up, and 8 tokens."""
        total = self.total(at)
        gate, up = ([s + r[2] for s in total[2 * v : 2 * v + 2]] for v, r in enumerate(rows))
        pair = [silu(g) * u for g, u in zip(gate, up, strict=True)]
        one, channel = (Float32(1.0), Int32(0), Float32(0.0)), channel // 16 * 8 + channel % 16
        self.store_pair(given, pair, one, tokens, token, channel, end)
