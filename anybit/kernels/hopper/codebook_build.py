"""Compile the codebook kernels; `build.py` says how and where, and is what is run."""

import hashlib
import tempfile
from pathlib import Path

from anybit.kernels.hopper import build
from anybit.kernels.hopper.cells import CodebookKernel

SOURCES = ("cells.py", "codebook.py", "fragments.py", "psumbook.py", "ptx.py", "ring.py")
# Bytes of the kernel's parameters, in the order of `codebook_load.Arguments`.
PARAMETERS = [*[8] * 6, *[4] * 5]


def kernel_file(kernel: CodebookKernel, folder: str | Path | None = None) -> Path:
    """The file of a kernel, whether or not it exists."""
    digest = hashlib.sha256(f"{kernel!r} {build.sources_hash(SOURCES)}".encode()).hexdigest()[:16]
    return build.cache_folder(folder) / f"{kernel.name}_{digest}.kernel"


def compile_kernel(kernel: CodebookKernel, folder: str | Path | None = None) -> Path:
    """Compile one kernel for sm_90a and write its file. Raises BuildError when it spills."""
    ptx, cubin = generate(kernel)
    path, header = kernel_file(kernel, folder), {"threads": kernel.threads}
    return build.write_kernel(path, kernel, ptx, cubin, PARAMETERS, header)


def generate(kernel: CodebookKernel) -> tuple[str, bytes]:
    """A kernel's PTX and its cubin for sm_90a."""
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass import BFloat16, Float16, Float32, Int32, Uint8
    from cutlass.cute.runtime import make_ptr
    from cutlass.cute.typing import AddressSpace

    from anybit.kernels.hopper.codebook import Codebook
    from anybit.kernels.hopper.psumbook import Psumbook

    half = {"float16": Float16, "bfloat16": BFloat16}[kernel.dtype]
    kinds = ((half, 16), (Uint8, 32), (half, 16), (Float32, 4), (half, 2), (half, 2))
    pointers = [make_ptr(t, 0, AddressSpace.gmem, assumed_align=a) for t, a in kinds]
    sizes = [Int32(1)] * 6  # m, n, k, cluster, early, grid
    program = Psumbook(kernel) if kernel.psumbook else Codebook(kernel)
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch=sm_90a --keep-ptx --keep-cubin --dump-dir={dump}"
        made = cute.compile(program, *pointers, *sizes, cuda.CUstream(0), options=options)
        return made.artifacts.PTX, made.artifacts.CUBIN
