"""What the codebook kernels share: a warp's own ring of chunks in shared memory.

No warp waits for another's copies. Weights of a tile of 16 rows are contiguous along K, so a chunk
is one bulk copy. The warp's first lane starts the copies; a slot is filled again as soon as its
words are in registers.
"""

import operator
from collections import namedtuple
from functools import reduce
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from anybit.kernels.cute.cells import ROWS
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.program import CodebookProgram
from anybit.kernels.hopper.barriers import bulk_load_bytes, init_barrier
from anybit.kernels.hopper.codebook_tiles import CodebookKernel
from anybit.kernels.hopper.tiles import MAX_SHARED

# What a warp reads: the address of its first chunk, chunks of a tile, bytes from the last one to
# the next tile's first, bytes of a tile's blocks from its first chunk to the end of K.
Source = namedtuple("Source", "address chunks step rest")


# The chunk that a warp fetches next, by its number in the tile, and how many are left.
Next = namedtuple("Next", "address chunk left")


class Ring(CodebookProgram):
    aligned, overlap = 1024, True

    def __init__(self, spec: CodebookKernel):
        super().__init__(spec)
        self.tokens, self.warps, self.stages = spec.tokens, spec.warps, spec.stages
        self.threads, self.ctas, self.shared_bytes = spec.threads, spec.ctas, spec.shared()

    def compile(self) -> Compiled:
        """A launch names the shared memory that it wants: up to all there is."""
        return super().compile()._replace(shared=MAX_SHARED)

    def source(
        self, w: Any, tile: Any, tile_step: Any, blocks: Any, first: Any, chunks: Any
    ) -> Source:
        """What a warp reads: every `tile_step`-th tile from `tile` on, chunks from `first` on."""
        bytes_of = self.spec.cells.block_bytes
        block = first * self.spec.blocks
        address = Int64(w.toint()) + (Int64(tile) * blocks + block) * bytes_of
        step = blocks * tile_step * bytes_of - (chunks - 1) * self.spec.chunk_bytes
        return Source(address, chunks, step, (blocks - block) * bytes_of)

    @cute.jit
    def open_ring(self, barriers, lane):
        """Make the barriers."""
        if lane == 0:
            for slot in cutlass.range_constexpr(self.spec.stages):
                init_barrier(barriers + slot * 8, Int32(1))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def refill(self, source, ring, barriers, slot, lane, ahead, read=0):
        """Fetch the next chunk if any are left; returns what is next then.

        read: depends on every word that was read from the slot, see `bulk_load_bytes`.
        """
        address, chunk, left = ahead
        size = const_expr(self.spec.chunk_bytes)
        if left > 0 and lane == 0:
            bulk_load_bytes(
                ring + slot * size,
                address,
                cutlass.min(source.rest - chunk * size, size),
                barriers + slot * 8,
                read,
            )
        left -= 1
        if const_expr(self.spec.chunks == 1):
            address += source.step
        else:
            chunk += 1
            if chunk >= source.chunks:
                chunk = Int32(0)
                address += source.step
            else:
                address += size
        return Next(address, chunk, left)

    def read_all(self, words: list) -> Any:
        """A word that depends on one word of each load of a chunk."""
        loaded = [piece for codes, scales in words for piece in (*(c[0] for c in codes), *scales)]
        return reduce(operator.xor, loaded)

    @cute.jit
    def fetch_row(self, given, tile, row):
        """Scale and bias of a row of a tile; of the nearest where there is none."""
        at = cutlass.max(cutlass.min(tile * ROWS + row, given.n - 1), 0)
        scale = cute.make_tensor(given.row_scale, cute.make_layout(given.n))[at]
        offset = Float32(0.0)
        if given.bias.toint() != 0:
            offset = cute.make_tensor(given.bias, cute.make_layout(given.n))[at].to(Float32)
        return scale, offset
