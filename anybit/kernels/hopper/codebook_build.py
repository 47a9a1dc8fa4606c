"""Compile the codebook kernels; `build.py` says how and where, and is what is run."""

import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from anybit.kernels.hopper import build
from anybit.kernels.hopper.cells import CodebookKernel

SOURCES = ("cells.py", "codebook.py", "fragments.py", "psumbook.py", "ptx.py", "ring.py")
# Bytes of the kernel's parameters, in the order of `codebook_load.Arguments`.
PARAMETERS = [*[8] * 6, *[4] * 5]


def kernel_file(kernel: CodebookKernel, folder: str | Path | None = None) -> Path:
    """The file of a kernel, whether or not it exists."""
    digest = hashlib.sha256(f"{kernel!r} {sources_hash()}".encode()).hexdigest()[:16]
    return build.cache_folder(folder) / f"{kernel.name}_{digest}.kernel"


@cache
def sources_hash() -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in SOURCES)).hexdigest()


def compile_kernel(kernel: CodebookKernel, folder: str | Path | None = None) -> Path:
    """Compile one kernel for sm_90a and write its file. Raises BuildError when it spills."""
    ptx, cubin = generate(kernel)
    registers, stack = build.resources(cubin)
    if stack:
        raise build.BuildError(f"{kernel} spills: {stack} bytes of stack")
    if build.parameters(ptx) != PARAMETERS:
        raise build.BuildError(
            f"{kernel} takes parameters of {build.parameters(ptx)} bytes, not {PARAMETERS}"
        )
    entry = build.ENTRY.search(ptx)
    assert entry is not None
    header = {"entry": entry[1], "threads": kernel.threads, "registers": registers}
    path = kernel_file(kernel, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(json.dumps(header).encode() + b"\n" + cubin)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


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
