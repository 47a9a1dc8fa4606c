"""Compile the Hopper kernels, without a GPU, into a folder that machines without the DSL can use.

    python -m anybit.kernels.hopper.build                       every kernel of the usual schemes
    python -m anybit.kernels.hopper.build liquid@int8 fp6       those of some schemes
    python -m anybit.kernels.hopper.build --cache DIR --jobs 8

A kernel is one file: a line of JSON (entry point, shared memory, threads, registers) and the cubin.
Its name holds a hash of the sources that made it, so no edit is ever hidden by a stale file. What
the DSL generates is for machines of one's own: its licence does not clearly allow giving it away.
"""

import argparse
import hashlib
import inspect
import json
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anybit import files
from anybit.dispatch import parse_scheme
from anybit.kernels.hopper import codebook_tiles
from anybit.kernels.hopper.cells import Cells, CodebookKernel, cells_of
from anybit.kernels.hopper.decode import Decoder, decoder
from anybit.kernels.hopper.lookup import LookupDecoder
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tiles import Kernel, family, family_grouped

SCHEMES = (
    "liquid@int8", "int8@int8", "int4@int8", "sparse@int8",
    "fp6", "fp5", "fp4", "fp8", "sparse", "fp6@fp8", "int4@fp8",
    "int8", "int4:group=128", "int4:group=64", "int4:group=128,zero", "int3:group=64",
    "int2:group=64",
)  # fmt: skip
SOURCES = ("decode.py", "epilogue.py", "excp.py", "gemm.py", "lang.py", "ptx.py")
ENTRY = re.compile(r"\.entry (\w+)\(")
WAIT = 0x8000000079C5  # WARPGROUP.DEPBAR
WGMMA = (0xDF0, 0xDF1, 0xDF3)  # HGMMA, IGMMA, QGMMA
# Bytes of the kernel's parameters, in the order of `load.Arguments`.
PARAMETERS = [128, 8, *[8] * 8, 4, 4, 4, 4, 1]


class BuildError(RuntimeError):
    """A kernel that must not be used: it spills, or its parameters are not what `load` passes."""


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where kernels lie: `folder`, else $ANYBIT_CACHE, else the user's cache folder."""
    return files.cache_folder(folder) / "hopper"


def kernel_file(kernel: Kernel, folder: str | Path | None = None) -> Path:
    """The file of a kernel, whether or not it exists."""
    d = kernel.decoder
    own = decoder_hash(type(d))  # type: ignore[arg-type]  # mypy takes classes for unhashable
    text = f"{kernel!r} {sources_hash(SOURCES + d.sources)} {own}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"{d.bits}bit_{d.operand}_{kernel.tile.name}_{kernel.output}_{digest}.kernel"
    return cache_folder(folder) / name


@cache
def sources_hash(names: tuple[str, ...]) -> str:
    """Of the code that kernels are made from: its bytes, which every Python version sees alike."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()


@cache
def decoder_hash(kind: type[Decoder]) -> str:
    """Of a decoder that is defined elsewhere."""
    return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()


def have_dsl() -> bool:
    """Whether CuTe DSL can be imported."""
    from importlib.util import find_spec

    return find_spec("cutlass") is not None and find_spec("cutlass.cute") is not None


def missing_kernels(files: list[Path], what: str = "") -> str | None:
    """Why kernels of these files cannot be had here, or None. what: the schemes to build."""
    missing = [path for path in files if not path.exists()]
    if not missing or have_dsl():
        return None
    command = f"python -m anybit.kernels.hopper.build {what}".strip()
    return (
        f"{len(missing)} kernels are not in {missing[0].parent}, and CuTe DSL is not installed: "
        f"pip install 'anybit[hopper]', or run `{command}` elsewhere and carry the folder"
    )


def compile_kernel(kernel: Kernel, folder: str | Path | None = None) -> Path:
    """Compile one kernel for sm_90a and write its file. Raises BuildError when it is no good."""
    ptx, cubin, shared = generate(kernel)
    header = {
        "shared": shared,
        "threads": kernel.tile.threads,
        "cluster": kernel.tile.split,
        "box": kernel.tile.tokens,
    }
    # A batch of products is 64 columns; loops may be unrolled.
    most_waits = products(cubin) * 4 // kernel.decoder.slot + 1
    path = kernel_file(kernel, folder)
    return write_kernel(path, kernel, ptx, cubin, PARAMETERS, header, most_waits)


def write_kernel(
    path: Path,
    kernel: object,
    ptx: str,
    cubin: bytes,
    wanted: list[int],
    header: dict[str, int],
    most_waits: int = 0,
) -> Path:
    """Write a kernel's file whole: a line of JSON, then the cubin.

    wanted: bytes of each parameter. header: what the launcher must know beside the entry's name.
    most_waits: for WGMMAs: one for each batch, one at the end.
    Raises BuildError when the kernel spills, waits for every WGMMA, or takes other parameters.
    """
    registers, stack = resources(cubin)
    if stack:
        raise BuildError(f"{kernel} spills: {stack} bytes of stack; choose a smaller tile")
    if (count := waits(cubin)) > most_waits:
        raise BuildError(
            f"{kernel} waits for its products at {count} places, not {most_waits}: ptxas "
            "serialized them (see `gemm.Gemm.release`)"
        )
    if parameters(ptx) != wanted:
        raise BuildError(f"{kernel} takes parameters of {parameters(ptx)} bytes, not {wanted}")
    entry = ENTRY.search(ptx)
    assert entry is not None
    line = json.dumps({"entry": entry[1], **header, "registers": registers})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(line.encode() + b"\n" + cubin)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def generate(kernel: Kernel) -> tuple[str, bytes, int]:
    """A kernel's PTX, its cubin for sm_90a, and the bytes of shared memory that it wants."""
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint8
    from cutlass.cute.runtime import make_ptr
    from cutlass.cute.typing import AddressSpace

    from anybit.kernels.hopper.excp import Explicit
    from anybit.kernels.hopper.gemm import TYPES, Gemm

    if isinstance(kernel.decoder, LookupDecoder):
        from anybit.kernels.hopper.lookup_gemm import LookupGemm

        gemm: Gemm = LookupGemm(kernel)
    else:
        gemm = (Explicit if kernel.pipeline == "explicit" else Gemm)(kernel)
    out = TYPES[kernel.output]
    kinds = ((gemm.b, 16), (Uint8, 128), (Float32, 4), (Int32, 4), (Float32, 4), (Int32, 4),
             (out, 2), (out, 16), (Int32, 4))  # fmt: skip
    pointers = [make_ptr(t, 0, AddressSpace.gmem, assumed_align=a) for t, a in kinds]
    sizes = Int32(1), Int32(128), Int32(128), Int32(1), Int32(1)  # m, n, k, experts, grid
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch=sm_90a --keep-ptx --keep-cubin --dump-dir={dump}"
        made = cute.compile(gemm, *pointers, *sizes, cuda.CUstream(0), options=options)
        return made.artifacts.PTX, made.artifacts.CUBIN, gemm.shared.__sizeof__()  # type: ignore[call-arg]


def parameters(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in this PTX."""
    start = ptx.index(".entry")
    sizes = {"u64": 8, "u32": 4, "s32": 4, "b64": 8, "b32": 4}
    out = []
    for line in ptx[start : ptx.index(")", start)].splitlines():
        if ".param" in line:
            array = re.search(r"\.b8 \w+\[(\d+)\]", line)
            plain = re.search(r"\.param \.(\w+)", line)
            out.append(int(array[1]) if array else sizes[plain[1]])  # type: ignore[index]
    return out


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread at launch, bytes of its stack) from the cubin's ELF sections."""
    registers = stack = 0
    for name, data in sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if kind != 4:  # a value of two bytes or less lies in the header itself
                continue
            if attribute == 0x11:  # EIATTR_FRAME_SIZE
                stack = max(stack, struct.unpack_from("<II", data, at)[1])
            elif attribute == 0x2F:  # EIATTR_REGCOUNT
                registers = max(registers, struct.unpack_from("<II", data, at)[1])
            at += size
    return registers, stack


def waits(cubin: bytes) -> int:
    """Instructions that wait for WGMMAs."""
    return sum(word == WAIT for word in instructions(cubin))


def products(cubin: bytes) -> int:
    """WGMMAs."""
    return sum(word & 0xFFF in WGMMA for word in instructions(cubin))


def instructions(cubin: bytes) -> Iterator[int]:
    """The first half of every instruction of 16 bytes."""
    for name, code in sections(cubin):
        if name.startswith(".text."):
            yield from (word for word, _ in struct.iter_unpack("<QQ", code))


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a 64-bit ELF file's sections."""
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    table = headers[names][4]
    for name, _, _, _, at, length in headers:
        end = elf.index(b"\0", table + name)
        yield elf[table + name : end].decode(), elf[at : at + length]


def built(kernel: Kernel | CodebookKernel) -> Path:
    """The file of a kernel, compiled if need be. Raises RuntimeError where it cannot be."""
    make = maker(kernel)
    path: Path = make.kernel_file(kernel)
    if reason := missing_kernels([path]):
        raise RuntimeError(reason)
    if not path.exists():
        make.compile_kernel(kernel)
    return path


def maker(kernel: Kernel | CodebookKernel) -> Any:
    """The module that names and compiles a kernel."""
    if isinstance(kernel, CodebookKernel):
        from anybit.kernels.hopper import codebook_build

        return codebook_build
    return sys.modules[__name__]


def kernels_of(scheme: str) -> list[Kernel | CodebookKernel]:
    """Every kernel that a layer of this scheme may launch. ValueError when there is none."""
    fmt, activation = parse_scheme(scheme)
    cells = cells_of(fmt)
    if activation is None and isinstance(cells, Cells):
        return [*codebook_tiles.family(cells), *lookup_kernels(cells)]
    operands = {"int8": ["int8"], "fp8": ["float8_e4m3fn"], None: ["float16", "bfloat16"]}
    out: list[Kernel | CodebookKernel] = []
    for operand in operands[activation]:
        d = decoder(fmt, operand)
        if isinstance(d, str):
            raise ValueError(f"{scheme}: {d}")
        outputs = [operand] if activation is None else ["float16", "bfloat16"]
        out += [Kernel(d, tile, o) for tile in family(d) for o in outputs]
        out += [Kernel(d, tile, o, grouped=True) for tile in family_grouped(d) for o in outputs]
    return out


def build(
    kernels: Sequence[Kernel | CodebookKernel],
    folder: str | Path | None = None,
    jobs: int = 0,
    verbose: bool = False,
) -> list[str]:
    """Compile what is missing, in parallel processes; returns the errors."""
    every = dict.fromkeys(kernels)
    missing = [k for k in every if not maker(k).kernel_file(k, folder).exists()]
    errors: list[str] = []
    if not missing:
        return errors
    pool = ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn"))
    with pool:
        futures = [pool.submit(maker(kernel).compile_kernel, kernel, folder) for kernel in missing]
        for kernel, future in zip(missing, futures, strict=True):
            try:
                path = future.result()
                if verbose:
                    print(path.name, flush=True)
            except Exception as error:
                errors.append(f"{kernel}: {error}")
    return errors


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m anybit.kernels.hopper.build")
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", default=SCHEMES)
    parser.add_argument("--cache", metavar="DIR", help="instead of the user's cache folder")
    parser.add_argument("--jobs", type=int, default=0, help="processes; one a core by default")
    options = parser.parse_args(args)
    if not have_dsl():
        print("CuTe DSL is not installed; pip install 'anybit[hopper]'", file=sys.stderr)
        return 1
    start = time.monotonic()
    kernels = [kernel for scheme in options.schemes for kernel in kernels_of(scheme)]
    errors = build(kernels, options.cache, options.jobs, verbose=True)
    folder = cache_folder(options.cache)
    print(f"{len(set(kernels))} kernels in {folder} ({time.monotonic() - start:.0f} s)")
    for error in errors:
        print("error:", error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
