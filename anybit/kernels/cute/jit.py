"""One kernel in CuTe DSL: its file, and compiling it without a GPU where there is none.

A kernel is one file: a line of JSON (entry point, shared memory, threads, registers) and the cubin.
The name holds a hash of the kernel's fields and of every source it may be compiled from, and then
the version of the DSL that compiled it. So no edit and no other DSL is ever hidden by a stale file.
A machine without the DSL takes a kernel of any version: the folder can be carried to it.

What the DSL generates is for machines of one's own: its licence does not clearly allow giving it
away.
"""

import hashlib
import inspect
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anybit.errors import Unsupported
from anybit.files.directory import cache_folder, written_whole
from anybit.kernels import ahead
from anybit.kernels.cute import cubin as elf
from anybit.kernels.cute.driver import Launcher, sizes

SOURCES = Path(__file__).parent
STACK = 64  # bytes that a thread may spill: a few registers cost nothing that can be measured
_carried: dict[Path, Path] = {}  # kernels of any version, where there is no DSL, by their names
_compiler = threading.Lock()  # two threads in the DSL at once fail, or crash the process


class BuildError(Unsupported):
    """A kernel that must not be used: it spills much, or is not what its launcher expects."""


class Compiled(NamedTuple):
    """What the DSL makes of a program. shared: bytes of shared memory that it may use."""

    ptx: str
    cubin: bytes
    shared: int


class KernelSpec(Protocol):
    """Everything that is fixed when a kernel is compiled; its repr tells it from all others."""

    def __hash__(self) -> int: ...

    @property
    def architecture(self) -> str:
        """What it is compiled for, such as "sm_90a"."""

    @property
    def launcher(self) -> type[Launcher]:
        """What launches it: with a struct of a field for each parameter."""

    @property
    def name(self) -> str:
        """The start of its file's name."""

    @property
    def header(self) -> dict[str, int]:
        """What a launcher must know beside the entry point and the shared memory."""

    @property
    def batch(self) -> int:
        """WGMMAs that are waited for together; 0 in a kernel without them."""

    @property
    def classes(self) -> tuple[type, ...]:
        """Whose modules are sources of the kernel, wherever they lie."""

    def generate(self) -> Compiled:
        """Compile it; needs CuTe DSL."""


# Names.


def kernel_folder(folder: str | Path | None = None) -> Path:
    """Where kernels lie: `folder`, else $ANYBIT_CACHE, else the user's cache folder."""
    return cache_folder(folder) / "cute"


def kernel_file(kernel: KernelSpec, folder: str | Path | None = None) -> Path:
    """The file of a kernel, whether or not it exists."""
    files = {inspect.getfile(each) for each in kernel.classes}
    own = Path(inspect.getfile(type(kernel))).parent
    sources = [folder_hash(SOURCES), folder_hash(own), *sorted(map(file_hash, files))]
    text = f"{kernel!r} {kernel.architecture} {sources}"
    start = f"{kernel.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place, dsl = kernel_folder(folder), dsl_version()
    if dsl is None:
        if place / start not in _carried:  # once each: every layer asks, and listing takes 1 ms
            found = max(place.glob(f"{start}_dsl*.kernel"), default=None)
            if found is None:
                return place / f"{start}.kernel"
            _carried[place / start] = found
        return _carried[place / start]
    return place / f"{start}_dsl{dsl}.kernel"


@cache
def folder_hash(folder: Path) -> str:
    """Of the Python files of a folder: their bytes, which every Python version sees alike."""
    return hashlib.sha256(
        "".join(f"{path.name} {file_hash(path)}\n" for path in sorted(folder.glob("*.py"))).encode()
    ).hexdigest()


@cache
def file_hash(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def dsl_version() -> str | None:
    """The version of CuTe DSL, or None where it is not installed."""
    try:
        return version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return None


def missing_kernels(kernels: Iterable[KernelSpec], what: str = "") -> str | None:
    """Why kernels cannot be had here, or None. what: the schemes to build.

    kernels: not looked at where they can be compiled: to name the file of one takes 0.1 ms.
    """
    if dsl_version():
        return None
    missing = [path for path in map(kernel_file, kernels) if not path.exists()]
    if not missing:
        return None
    command = f"anybit build {what}".strip()
    return (
        f"{len(missing)} kernels are not in {missing[0].parent}, and CuTe DSL is not installed: "
        f"pip install 'anybit[hopper]', or run `{command}` elsewhere and carry the folder"
    )


# Compiling.


def built(kernel: KernelSpec) -> Path:
    """The file of a kernel, compiled if need be. Raises RuntimeError where it cannot be."""
    if reason := missing_kernels([kernel]):
        raise Unsupported(reason)
    path = kernel_file(kernel)
    if path.exists():
        return path
    if (notes := ahead.notes()) is None:
        return compile_kernel(kernel)
    raise notes.missing(str(kernel), partial(compile_kernel, kernel))


def compile_kernel(kernel: KernelSpec, folder: str | Path | None = None) -> Path:
    """Write a kernel's file, whole, unless there is one; other processes wait for it.

    Raises BuildError when the kernel spills much, waits for every WGMMA, or takes other parameters
    than its launcher passes.
    """
    return store(kernel_file(kernel, folder), lambda: checked(kernel, kernel.generate()))


def store(path: Path, content: Callable[[], bytes]) -> Path:
    """Write a file, whole, unless there is one; other processes wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            data = content()
            with written_whole(path) as file:
                file.write(data)
    return path


def checked(kernel: KernelSpec, made: Compiled) -> bytes:
    """The content of a kernel's file. Raises BuildError when the kernel is no good."""
    registers, stack = elf.resources(made.cubin)
    if stack > STACK:
        raise BuildError(f"{kernel} spills: {stack} bytes of stack; choose a smaller tile")
    # One wait for each batch, and one at the end; loops may be unrolled.
    most = elf.products(made.cubin) // kernel.batch + 1 if kernel.batch else 0
    if (count := elf.waits(made.cubin)) > most:
        raise BuildError(
            f"{kernel} waits for its products at {count} places, not {most}: ptxas serialized "
            "them (see `gemm.Gemm.release`)"
        )
    taken, passed = elf.parameters(made.ptx), sizes(kernel.launcher.arguments)
    if taken != passed:
        raise BuildError(f"{kernel} takes parameters of {taken} bytes, not {passed}")
    header = {"entry": elf.entry(made.ptx), "shared": made.shared, **kernel.header}
    return json.dumps(header | {"registers": registers}).encode() + b"\n" + made.cubin


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process, and one thread of it, at a time.

    The file goes away with the lock. Whoever waited for it may then run beside a newcomer, but
    finds the work done.
    """
    import fcntl  # Windows has none, nor the DSL

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def compile_program(
    program: Any, parameters: Any, pointers: dict[str, tuple[Any, int]], architecture: str
) -> Compiled:
    """Compile a program of CuTe DSL.

    Args:
        program: What is called with its parameters, the grid and a stream; afterwards its `shared`
            is the struct in shared memory.
        parameters: The named tuple that they are (`launch.py`).
        pointers: (type, alignment) of what an address is of, by name; the others are numbers.
        architecture: As `KernelSpec.architecture`.
    """
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import make_ptr

    where = cute.AddressSpace.gmem
    places = {n: make_ptr(kind, 0, where, assumed_align=a) for n, (kind, a) in pointers.items()}
    given = parameters(*(places.get(name, Int32(128)) for name in parameters._fields))
    with _compiler, tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch={architecture} --keep-ptx --keep-cubin --dump-dir={dump}"
        made = cute.compile(program, given, Int32(128), cuda.CUstream(0), options=options)
        return Compiled(made.artifacts.PTX, made.artifacts.CUBIN, program.shared.__sizeof__())
