"""What the codebook kernels share: the launch, and a warp's own ring of chunks in shared memory.

No warp waits for another's copies. Weights of a tile of 16 rows are contiguous along K, so a chunk
is one bulk copy. The warp's first lane starts the copies; a slot is filled again as soon as its
words are in registers.
"""

import operator
from functools import reduce
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, const_expr

from anybit.kernels.cute.cells import ROWS
from anybit.kernels.cute.jit import Compiled, compile_program
from anybit.kernels.hopper.codebook_tiles import CodebookKernel
from anybit.kernels.hopper.fragments import bulk_load_bytes, init_barrier
from anybit.kernels.hopper.launch import ARCHITECTURE
from anybit.kernels.hopper.tiles import MAX_SHARED


class Program:
    """A kernel with the parameters of `launch.CodebookArguments`."""

    kernel: Any

    def __init__(self, spec: CodebookKernel):
        self.spec, self.cells = spec, spec.cells
        self.tokens, self.dtype = spec.tokens, spec.dtype
        self.warps, self.stages = spec.warps, spec.stages

    def compile(self) -> Compiled:
        """For sm_90a. A launch names the shared memory that it wants: up to all there is."""
        half = {"float16": Float16, "bfloat16": BFloat16}[self.dtype]
        pointers = [(half, 16), (Uint8, 32), (half, 16), (Float32, 4), (half, 2), (half, 2),
                    (Float32, 16), (Int32, 4)]  # fmt: skip
        return compile_program(self, pointers, 7, ARCHITECTURE)._replace(shared=MAX_SHARED)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        book: cute.Pointer,
        row_scale: cute.Pointer,
        bias: cute.Pointer,
        y: cute.Pointer,
        work: cute.Pointer,
        counters: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        cluster: Int32,
        splits: Int32,
        early: Int32,
        grid: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Shared:
            data: cute.struct.Align[cute.struct.MemRange[Uint8, self.spec.shared()], 1024]

        self.shared = Shared
        given = (x, w, book, row_scale, bias, y, work, counters, m, n, k, cluster, splits, early)
        self.kernel(*given).launch(
            grid=(grid, 1, 1),
            block=(self.spec.threads, 1, 1),
            min_blocks_per_mp=self.spec.ctas,
            preferred_smem_carveout=100,  # given, or the DSL asks the driver
            use_pdl=True,
            stream=stream,
        )

    def source(
        self, w: Any, tile: Any, tile_step: Any, blocks: Any, first: Any, chunks: Any
    ) -> tuple:
        """What a warp reads: every `tile_step`-th tile from `tile` on, chunks from `first` on.

        (first address, chunks, bytes from the last chunk of a tile to the next tile's first, bytes
        of the tile's blocks from `first` to the end of K).
        """
        bytes_of = self.spec.cells.block_bytes
        block = first * self.spec.blocks
        address = Int64(w.toint()) + (Int64(tile) * blocks + block) * bytes_of
        step = blocks * tile_step * bytes_of - (chunks - 1) * self.spec.chunk_bytes
        return address, chunks, step, (blocks - block) * bytes_of

    @cute.jit
    def open_ring(self, barriers, lane):
        """Make the barriers."""
        if lane == 0:
            for slot in cutlass.range_constexpr(self.spec.stages):
                init_barrier(barriers + slot * 8, Int32(1))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def refill(self, source, ring, barriers, slot, lane, address, chunk, left, read=0):
        """Fetch the chunk at `address` if any are left; returns the next (address, chunk, left).

        read: depends on every word that was read from the slot, see `bulk_load_bytes`.
        """
        _, chunks, step, rest = source
        size = const_expr(self.spec.chunk_bytes)
        if left > 0 and lane == 0:
            bulk_load_bytes(
                ring + slot * size,
                address,
                cutlass.min(rest - chunk * size, size),
                barriers + slot * 8,
                read,
            )
        left -= 1
        if const_expr(self.spec.chunks == 1):
            address += step
        else:
            chunk += 1
            if chunk >= chunks:
                chunk = Int32(0)
                address += step
            else:
                address += size
        return address, chunk, left

    def read_all(self, words: list) -> Any:
        """A word that depends on one word of each load of a chunk."""
        loaded = [piece for codes, scales in words for piece in (*(c[0] for c in codes), *scales)]
        return reduce(operator.xor, loaded)

    @cute.jit
    def fetch_row(self, row_scale, bias, tile, row, n):
        """Scale and bias of a row of a tile; of the nearest where there is none."""
        at = cutlass.max(cutlass.min(tile * ROWS + row, n - 1), 0)
        scale = cute.make_tensor(row_scale, cute.make_layout(n))[at]
        offset = Float32(0.0)
        if bias.toint() != 0:
            offset = cute.make_tensor(bias, cute.make_layout(n))[at].to(Float32)
        return scale, offset
