"""Few tokens and a weight in 16 bits as it comes, row by row: `narrow.py` without a decoder.

A K tile of a row is 256 bytes, which half a warp copies. In shared memory rows lie as tokens do, so
that `ldmatrix` brings the operand's registers.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from anybit.kernels.cute.launch import PlainArguments
from anybit.kernels.cute.ptx import load_matrices
from anybit.kernels.mma.narrow import Narrow
from anybit.kernels.mma.ptx import copy_or_zero, load_half

# Of the pieces that a lane copies: from the address of a K tile on, what lies before `end` is not
# past K; its first row, the last one that the weight has, bytes of a row.
Rows = namedtuple("Rows", "end row last stride")


class Plain(Narrow):
    parameters = PlainArguments

    @property
    def k_tile_bytes(self) -> int:
        return self.token_bytes

    def weights(self, given, row_tile, warp, lane):
        """Where this lane's piece of the tile's first row lies, and what it copies of others."""
        first, stride = row_tile * self.rows, given.k * 2
        row = given.w.toint() + Int64(first) * stride
        at = row + warp * self.token_bytes + lane % 16 * 16
        return at, Rows(row + stride, lane // 16, given.rows - 1 - first, stride)

    @cute.jit
    def fetch_weights(self, to, at, rows, lane):
        """Start the copies of a K tile of this warp's rows; past K there are zeros."""
        inside = at < rows.end
        piece = (lane % 16) ^ rows.row
        for i in cutlass.range_constexpr(8 * self.slices):
            row = cutlass.min(rows.row + 2 * i, rows.last)
            into = to + rows.row * self.token_bytes + (piece ^ (2 * i & 6)) * 16
            copy_or_zero(
                into, 2 * i * self.token_bytes, at + Int64(row) * rows.stride, 0, inside, Int32(1)
            )

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
            column = Int64(cutlass.min(row, given.n - 1))
            offset = load_half(given.bias.toint() + column * 2, self.out)
        return Float32(1.0), Int32(0), offset
