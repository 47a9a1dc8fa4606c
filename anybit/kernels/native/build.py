"""Compile kernels with LLVM, keep them on disk, and run them on torch's own threads."""

import ctypes
import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.files.directory import cache_folder, written_whole
from anybit.kernels.native.ir import Function
from anybit.kernels.native.isa import Isa
from anybit.version import __version__

log = logging.getLogger(__name__)

DIGEST = 32  # bytes


class Kernel:
    """A compiled function with one argument: a block of 64-bit numbers and addresses."""

    def __init__(self, engine: Any, name: str):
        self.engine = engine  # owns the code
        self.address = engine.get_function_address(name)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, arguments: Sequence[int], threads: int = 1) -> None:
        """Run on `threads` threads at once. The threads share the block of arguments."""
        block = (ctypes.c_int64 * len(arguments))(*arguments)
        calls = getattr(_local, "calls", None)
        if calls is not None:
            calls.append((self, list(arguments)))
        if threads == 1:
            self.call(ctypes.addressof(block))
        else:
            parallel()(self.address, ctypes.addressof(block), threads, 0)


def pointer(t: Tensor | None) -> int:
    """Where a tensor lies, as kernels take it; 0: there is none."""
    return 0 if t is None else t.data_ptr()


_local = threading.local()  # of a thread: a list of calls that is recorded, and a workspace


@contextmanager
def recorded(calls: list[Any]) -> Iterator[None]:
    """Append what this thread runs to a list: (kernel, its arguments), and workspaces.

    These belong to the recording alone, which any thread may replay beside others.
    """
    own, _local.workspace = getattr(_local, "workspace", None), None
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls, _local.workspace = None, own


def workspace(size: int) -> Tensor:
    """Bytes that calls of this thread share, or of a recording: fresh pages would cost more than
    small products. Nothing outlasts the call that asks for it.
    """
    buffer: Tensor | None = getattr(_local, "workspace", None)
    if buffer is None or buffer.numel() < size:
        buffer = _local.workspace = torch.empty(size, dtype=torch.uint8)
    if getattr(_local, "calls", None) is not None:
        _local.calls.append(buffer)  # must live as long as the recording
    return buffer


def parallel() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch runs on; None where it has no such function.

    torch's operators and these kernels so share one set of threads: none wakes or spins beside it.
    """
    library = openmp()
    return library and library.GOMP_parallel


@cache
def openmp() -> Any:
    """The OpenMP library that torch runs on, if it has GNU's functions, or None.

    torch for macOS brings LLVM's, which has them.
    """
    folder = Path(torch.__file__).parent / "lib"
    beside = sorted(folder.glob("libgomp*")) + sorted(folder.glob("libomp.dylib"))
    for path in (*map(str, beside), "libgomp.so.1"):
        try:
            library = ctypes.CDLL(path)
            function = library.GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return library
    return None


def _machine(isa: Isa, triple: str = "") -> Any:
    from llvmlite import binding

    if triple:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    else:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
    # evex512: or LLVM 20 aborts at an operator of 512 bits.
    own = [] if isa.arm else ["-prefer-256-bit"] + ["+evex512"] * (isa.bits == 512)
    features = ",".join([*own, *(f"+{feature}" for feature in isa.features)])
    target = binding.Target.from_triple(triple or binding.get_default_triple())
    cpu = "generic" if isa.arm else "x86-64-v3"
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def optimized(text: str, isa: Isa, triple: str = "") -> tuple[Any, Any]:
    """The machine that a module is compiled for, this one or that of a triple, and the module."""
    from llvmlite import binding

    machine = _machine(isa, triple)
    module = binding.parse_assembly(text)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine, module


def compile_text(text: str, isa: Isa) -> bytes:
    """Object code of a module."""
    machine, module = optimized(text, isa)
    return bytes(machine.emit_object(module))


def kernel(function: Function) -> Kernel:
    return load(function.text(), function.name, function.isa)


def load(text: str, name: str, isa: Isa) -> Kernel:
    """A function of a module, compiled now or read from the cache."""
    from llvmlite import binding

    path = _place(text, isa)
    code = _kept(path)
    if code is None:
        code = compile_text(text, isa)
        _keep(path, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(isa))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Kernel(engine, name)


def _place(text: str, isa: Isa) -> Path:
    """The file of a module's code, of which the operating system is a part: folders are shared."""
    from llvmlite import __version__ as llvmlite
    from llvmlite import binding

    key = "\n".join((__version__, llvmlite, binding.get_default_triple(), *isa.features, text))
    return cache_folder() / "native" / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".o")


def _kept(path: Path) -> bytes | None:
    """Code from the cache, if it is there and whole: it comes after its own digest."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST], content[DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Write to the cache as one step, so that no process reads half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            part.write(hashlib.sha256(code).digest() + code)
    except OSError as error:
        log.warning(
            "compiled CPU kernels are not kept, and every process compiles them anew: %s; set "
            "ANYBIT_CACHE to a folder that can be written",
            error,
        )
