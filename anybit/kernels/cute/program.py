"""What a kernel in CuTe DSL is launched as, where its shared memory is one array of bytes."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from anybit.kernels.cute.jit import Compiled, compile_program
from anybit.kernels.cute.launch import CodebookArguments
from anybit.kernels.cute.ptx import TYPES


class Program:
    """A kernel whose parameters are a named tuple: addresses, then numbers.

    Attributes:
        kernel: The device's code, of the parameters.
        shared_bytes: Of shared memory that a CTA has.
        aligned: Bytes to whose multiple its address is.
        threads: Of a CTA.
        ctas: That should fit a multiprocessor.
        overlap: Whether it may begin before the previous kernel has finished.
    """

    kernel: Any
    shared_bytes: int
    aligned: int
    threads: int
    ctas: int
    overlap: bool

    @cute.jit
    def __call__(self, given: Any, grid: Int32, stream: cuda.CUstream):
        @cute.struct
        class Shared:
            data: cute.struct.Align[cute.struct.MemRange[Uint8, self.shared_bytes], self.aligned]

        self.shared = Shared
        self.kernel(given).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,  # given, or the DSL asks the driver
            use_pdl=self.overlap,
            stream=stream,
        )

    def who(self) -> tuple[Any, ...]:
        """This thread, its CTA and how many there are, its warp, its lane; its shared memory."""
        thread, cta, ctas = (
            place()[0] for place in (cute.arch.thread_idx, cute.arch.block_idx, cute.arch.grid_dim)
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        return thread, cta, ctas, warp, thread % 32, Int32(shared.data.data_ptr().toint())


class CodebookProgram(Program):
    """A kernel with `CodebookArguments`. spec: either family's kernel."""

    def __init__(self, spec: Any):
        self.spec, self.cells, self.dtype = spec, spec.cells, spec.dtype

    def compile(self) -> Compiled:
        """For the architecture of the kernel."""
        half = TYPES[self.dtype]
        pointers = {
            "x": (half, 16),
            "w": (Uint8, 32),
            "book": (half, 16),
            "row_scale": (Float32, 4),
            "bias": (half, 2),
            "y": (half, 2),
            "work": (Float32, 16),
            "counters": (Int32, 4),
        }
        return compile_program(self, CodebookArguments, pointers, self.spec.architecture)
