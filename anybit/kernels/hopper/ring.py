"""A warp's own ring of chunks in shared memory: no other warp waits for it.

Weights of a tile of 16 rows are contiguous along K, so a chunk is one bulk copy. The warp's first
lane starts the copies; a slot is filled again as soon as its words are in registers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from anybit.kernels.hopper.cells import ROWS, CodebookKernel
from anybit.kernels.hopper.fragments import bulk_load_bytes, init_barrier


class Ring:
    kernel_of: CodebookKernel

    def source(self, w: Any, tile: Any, tile_step: Any, blocks: Any, first: Any, chunks: Any) -> tuple:
        """What a warp reads: every `tile_step`-th tile from `tile` on, chunks from `first` on.

        (first address, chunks, bytes from the last chunk of a tile to the next tile's first, bytes
        of the tile's blocks from `first` to the end of K).
        """
        bytes_of = self.kernel_of.cells.block_bytes
        block = first * self.kernel_of.blocks
        address = Int64(w.toint()) + (Int64(tile) * blocks + block) * bytes_of
        step = blocks * tile_step * bytes_of - (chunks - 1) * self.kernel_of.chunk_bytes
        return address, chunks, step, (blocks - block) * bytes_of

    @cute.jit
    def open_ring(self, barriers, lane):
        """Make the barriers."""
        if lane == 0:
            for slot in cutlass.range_constexpr(self.kernel_of.stages):
                init_barrier(barriers + slot * 8, Int32(1))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def refill(self, source, ring, barriers, slot, lane, address, chunk, left):
        """Fetch the chunk at `address` if any are left; returns the next (address, chunk, left)."""
        _, chunks, step, rest = source
        size = const_expr(self.kernel_of.chunk_bytes)
        if left > 0 and lane == 0:
            bulk_load_bytes(
                ring + slot * size,
                address,
                cutlass.min(rest - chunk * size, size),
                barriers + slot * 8,
            )
        left -= 1
        if const_expr(self.kernel_of.chunks == 1):
            address += step
        else:
            chunk += 1
            if chunk >= chunks:
                chunk = Int32(0)
                address += step
            else:
                address += size
        return address, chunk, left

    @cute.jit
    def fetch_row(self, row_scale, bias, tile, row, n):
        """Scale and bias of a row of a tile; of the nearest where there is none."""
        at = cutlass.max(cutlass.min(tile * ROWS + row, n - 1), 0)
        scale = cute.make_tensor(row_scale, cute.make_layout(n))[at]
        offset = Float32(0.0)
        if bias.toint() != 0:
            offset = cute.make_tensor(bias, cute.make_layout(n))[at].to(Float32)
        return scale, offset
