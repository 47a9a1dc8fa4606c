"""A kernel's file: what its name tells apart, that it is compiled once, or refused."""

import ast
import json
import os
import shutil
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anybit.core.format import get_format
from anybit.kernels import ahead
from anybit.kernels.cute import build, cubin, jit
from anybit.kernels.cute.cells import Cells
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.driver import sizes
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.launch import CodebookLauncher
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.build import kernels_of
from anybit.kernels.hopper.codebook_tiles import CodebookKernel
from anybit.kernels.hopper.tile import Kernel, Tile
from tests.forks import CONTEXT

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)


def decoder_of(spec: str, operand: str) -> Decoder:
    d = decoder(get_format(spec), operand)
    assert isinstance(d, Decoder)
    return d


# Names.


def some_kernels() -> list[jit.KernelSpec]:
    d = decoder_of("fp6", "float16")
    return [
        Kernel(d, tiles.fitted(Tile(16, ctas=2), d), "float16"),
        Kernel(d, tiles.fitted(Tile(16, ctas=2, split=2), d), "float16"),
        Kernel(d, tiles.fitted(Tile(16, ctas=2), d), "float16", grouped=True),
        Kernel(decoder_of("fp5", "float16"), Tile(16, ctas=2, stages=6), "float16"),
        Kernel(decoder_of("fp6:group=128", "float16"), Tile(16, ctas=2, stages=6), "float16"),
        *kernels_of("codebook:m=1,v=4,group=128"),
    ]


def names() -> list[str]:
    return [jit.kernel_file(kernel).name for kernel in some_kernels()]


def test_names_tell_kernels_apart(tmp_path: Path) -> None:
    kernels = some_kernels()
    files = {jit.kernel_file(kernel, tmp_path) for kernel in kernels}
    assert len(files) == len(kernels)
    assert all(file.parent == tmp_path / "cute" for file in files)


def test_names_change_with_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever a kernel is compiled from: any file of the folder, the DSL, the architecture."""
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    seen = set(before := names())
    hopper = Path(tiles.__file__).parent
    edits = [(jit.SOURCES, "decode.py"), (hopper, "tiles.py"), (hopper, "new.py")]
    for folder, source in edits:
        copy = tmp_path / source.removesuffix(".py")
        shutil.copytree(folder, copy)
        with (copy / source).open("a") as file:
            file.write("ROW_MULTIPLE = 512\n")
        hashed = jit.folder_hash

        def edited(path: Path, folder: Path = folder, copy: Path = copy, hashed=hashed) -> str:
            return hashed(copy if path == folder else path)

        monkeypatch.setattr(jit, "folder_hash", edited)
        changed = names()
        assert seen.isdisjoint(changed)
        seen |= {*changed}
    monkeypatch.undo()
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.2")
    assert seen.isdisjoint(names())
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    assert names() == before
    for kind in (Kernel, CodebookKernel):
        monkeypatch.setattr(kind, "architecture", "sm_100a")
    assert seen.isdisjoint(names())


def test_names_change_with_a_decoder_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And with what its module defines beside the class."""

    def name(folder: str, text: str) -> str:
        path = tmp_path / folder / "elsewhere.py"
        path.parent.mkdir()
        path.write_text(text)
        module = ModuleType("elsewhere")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "elsewhere", module)
        exec(text, vars(module))
        d = module.Own("float16", (0, 1))
        return jit.kernel_file(Kernel(d, Tile(8, stages=2), "float16")).name

    text = (
        "from anybit.kernels.cute.decode import Decoder\n"
        "class Own(Decoder):\n"
        "    pass\n"
        "PLACE = 1\n"
    )  # fmt: skip
    first = name("a", text)
    assert name("b", text) == first
    assert name("c", text.replace("PLACE = 1", "PLACE = 2")) != first


def imported(path: Path) -> set[str]:
    """Modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return found | {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}


def test_programs_are_made_of_hashed_sources_alone() -> None:
    """What is written in the DSL imports nothing of anybit from outside the hashed folders."""
    hopper = Path(tiles.__file__).parent
    rooms = {"cute": jit.SOURCES, "hopper": hopper, "mma": hopper.with_name("mma")}
    modules = {
        f"{room}/{path.name}": imported(path)
        for room, folder in rooms.items()
        for path in folder.glob("*.py")
    }
    others = ("cute/jit.py",)  # compiles programs, and is none
    programs = {n for n, found in modules.items() if "cutlass" in found and n not in others}
    assert {"hopper/gemm.py", "hopper/lookup_gemm.py", "mma/narrow.py", "mma/gemm.py"} <= programs
    for name in programs:
        ours = {module for module in modules[name] if module.startswith("anybit")}
        hashed = ("anybit.kernels.cute", f"anybit.kernels.{name.partition('/')[0]}")
        assert all(module.startswith(hashed) for module in ours), name


def test_without_the_dsl_a_kernel_of_any_version_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = some_kernels()[0]
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    with pytest.raises(RuntimeError, match="and CuTe DSL is not installed: pip install"):
        jit.built(kernel)
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.7.0")
    made = jit.kernel_file(kernel)
    made.parent.mkdir()
    made.touch()
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    assert jit.built(kernel) == made
    with pytest.raises(RuntimeError, match="carry the folder"):
        jit.built(some_kernels()[1])
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    assert jit.kernel_file(kernel) != made


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANYBIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.kernel_folder() == tmp_path / "anybit" / "cute"
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "mine"))
    assert jit.kernel_folder() == tmp_path / "mine" / "cute"
    assert jit.kernel_folder(tmp_path / "arg") == tmp_path / "arg" / "cute"


# Compiling.


def empty_cubin() -> bytes:
    """An ELF file with the table of sections' names, and nothing else."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HHH", header, 0x3A, 64, 1, 0)
    section = struct.pack("<IIQQQQ", 0, 3, 0, 0, 128, 1)
    return bytes(header) + section.ljust(64, b"\0") + b"\0"


@dataclass(frozen=True)
class Slow:
    """A kernel that takes a while to compile, and notes that it was."""

    log: str

    name = "slow"
    architecture = "sm_90a"
    launcher = CodebookLauncher
    batch = 0
    classes = ()
    header = {"threads": 32}

    def generate(self) -> Compiled:
        with open(self.log, "a") as log:
            log.write("compiled\n")
        time.sleep(0.5)
        params = [
            f".param .u{8 * size} p{i}" for i, size in enumerate(sizes(CodebookLauncher.arguments))
        ]
        return Compiled(".entry slow(\n" + ",\n".join(params) + "\n)", empty_cubin(), 1024)


def test_processes_compile_a_kernel_once(tmp_path: Path) -> None:
    kernel = Slow(str(tmp_path / "log"))
    with CONTEXT.Pool(2) as pool:
        pool.map(time.sleep, [0.1] * 2, chunksize=1)  # both have started
        files = pool.starmap(jit.compile_kernel, [(kernel, tmp_path)] * 4, chunksize=1)
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert len(set(files)) == 1
    assert list(files[0].parent.iterdir()) == [files[0]]  # no lock, no part of a file
    header, _, rest = files[0].read_bytes().partition(b"\n")
    assert json.loads(header) == {"entry": "slow", "shared": 1024, "threads": 32, "registers": 0}
    assert rest == empty_cubin()


@dataclass(frozen=True)
class Broken(Slow):
    """One that the compiler does not take."""

    name = "broken"

    def generate(self) -> Compiled:
        print("what a compiler prints")
        raise ValueError("no such instruction")


@dataclass(frozen=True)
class Deadly(Slow):
    """One that ends the compiler's process."""

    name = "deadly"

    def generate(self) -> Compiled:
        os._exit(3)


@dataclass(frozen=True)
class Unsendable(Slow):
    """One that cannot be given to another process."""

    name = "unsendable"

    def __reduce__(self) -> str:
        raise TypeError("it stays here")


def test_many_kernels_are_compiled_side_by_side(tmp_path: Path) -> None:
    logs = [str(tmp_path / f"log{i}") for i in range(5)]
    kernels = [*map(Slow, logs), Broken(logs[0]), Slow(logs[0])]
    done: list[str] = []
    errors = build.build(kernels, tmp_path, 2, lambda count, name: done.append(name))
    assert errors == [f"{kernels[5]}: no such instruction"]
    assert [Path(log).read_text() for log in logs] == ["compiled\n"] * 5
    assert sorted(done) == sorted(p.name for p in (tmp_path / "cute").iterdir())
    assert build.build(kernels[:5], tmp_path) == []
    assert [Path(log).read_text() for log in logs] == ["compiled\n"] * 5


def test_a_compiler_that_dies_is_an_error_and_no_hang(tmp_path: Path) -> None:
    kernel = Deadly(str(tmp_path / "log"))
    errors = build.build([kernel, Slow(str(tmp_path / "log"))], tmp_path, 1)
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert errors == [f"{kernel}: the process that compiles it has ended: Ran out of input"]
    kernel = Unsendable(str(tmp_path / "other"))
    errors = build.build([kernel, Slow(str(tmp_path / "other"))], tmp_path, 1)
    assert (tmp_path / "other").read_text() == "compiled\n"
    assert errors == [f"{kernel}: the process that compiles it has ended: it stays here"]


def test_kernels_may_be_noted_instead_of_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one thread, and until they are there."""
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    first, second = Slow(str(tmp_path / "1")), Slow(str(tmp_path / "2"))
    with ahead.collected() as wanted, ThreadPoolExecutor(1) as other:
        for _ in range(2):
            with pytest.raises(ahead.Uncompiled):
                jit.built(first)
        assert other.submit(jit.built, second).result().exists()
        jit.built(second)
    assert list(wanted.kernels) == [str(first)]
    assert jit.built(first).exists()


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    d = decoder_of("fp6", "float16")
    kernels: list[jit.KernelSpec] = [
        Kernel(d, tiles.fitted(Tile(16), d), "float16"),
        CodebookKernel(Cells(1, 4, 1), 1, "float16"),
    ]
    made: list[object] = []

    def checked(kernel: Any, compiled: Any) -> bytes:
        made.append(kernel)
        return b"{}\n"

    for kind in (Kernel, CodebookKernel):
        monkeypatch.setattr(kind, "generate", lambda self: Compiled("", b"", 1))
    monkeypatch.setattr(jit, "checked", checked)
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    files = [jit.built(kernel) for kernel in kernels * 2]
    assert made == kernels
    assert files == [jit.kernel_file(kernel) for kernel in kernels] * 2


def test_spills_and_serialized_products_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    d = decoder_of("fp6", "float16")
    kernel = Kernel(d, tiles.fitted(Tile(16), d), "float16")
    monkeypatch.setattr(Kernel, "generate", lambda self: Compiled(".entry k(\n)", b"", 1))
    monkeypatch.setattr(cubin, "products", lambda cubin: 8)
    monkeypatch.setattr(cubin, "resources", lambda cubin: (96, 72))
    with pytest.raises(jit.BuildError, match="spills: 72 bytes of stack"):
        jit.compile_kernel(kernel, tmp_path)
    monkeypatch.setattr(cubin, "resources", lambda cubin: (96, 64))  # few registers
    monkeypatch.setattr(cubin, "waits", lambda cubin: 9)
    with pytest.raises(jit.BuildError, match="waits for its products at 9 places, not 3"):
        jit.compile_kernel(kernel, tmp_path)
    monkeypatch.setattr(cubin, "waits", lambda cubin: 3)
    with pytest.raises(jit.BuildError, match=r"takes parameters of \[\] bytes"):
        jit.compile_kernel(kernel, tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@needs_dsl
def test_kernels_compile(tmp_path: Path) -> None:
    liquid = decoder_of("liquid", "int8")
    zero = decoder_of("int4:group=64,zero", "bfloat16")
    fp6 = decoder_of("fp6", "float16")
    good: list[Kernel] = [
        Kernel(liquid, tiles.fitted(Tile(16, ctas=2, split=4), liquid), "bfloat16"),
        Kernel(zero, tiles.fitted(Tile(128, rows=256), zero), "bfloat16"),
        Kernel(fp6, tiles.fitted(Tile(8, ctas=2), fp6), "float16", grouped=True),
    ]
    assert build.build(good, tmp_path, jobs=2) == []
    for kernel in good:
        header, _, code = jit.kernel_file(kernel, tmp_path).read_bytes().partition(b"\n")
        meta = json.loads(header)
        assert code.startswith(b"\x7fELF")
        assert meta["entry"].encode() in code
        assert meta["cluster"] == kernel.tile.split
        registers, stack = cubin.resources(code)
        assert stack == 0
        assert cubin.waits(code) == 2 * kernel.tile.rows // 128 + 1
        assert cubin.products(code) == kernel.tile.rows // 128 * kernel.decoder.slot // 2
        assert 32 < registers == meta["registers"]
        # Nine warps take registers like twelve: two CTAs fit into 65536.
        assert registers <= 65536 // (384 * kernel.tile.ctas) // 8 * 8 + 16
        assert meta["shared"] == tiles.shared_bytes(kernel.tile, kernel.decoder, kernel.grouped)
        assert tiles.places(kernel.tile, kernel.decoder) == kernel.tile.ctas
    before = {p: p.stat().st_mtime_ns for p in jit.kernel_folder(tmp_path).iterdir()}
    assert build.build(good, tmp_path) == []
    assert {p: p.stat().st_mtime_ns for p in jit.kernel_folder(tmp_path).iterdir()} == before


@needs_dsl
def test_a_codebook_kernel_compiles(tmp_path: Path) -> None:
    kernel = CodebookKernel(Cells(1, 4, 1), 1, "float16")
    path = jit.compile_kernel(kernel, tmp_path)
    header, _, code = path.read_bytes().partition(b"\n")
    meta = json.loads(header)
    assert meta["entry"].encode() in code
    assert (meta["threads"], meta["shared"]) == (512, tiles.MAX_SHARED)
    assert cubin.resources(code)[1] == 0


@needs_dsl
def test_threads_compile_what_one_does() -> None:
    d = decoder_of("fp6", "float16")
    kernels = [Kernel(d, tiles.fitted(Tile(8, split=s), d), "float16") for s in (1, 2)]
    alone = [kernel.generate() for kernel in kernels]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(Kernel.generate, kernels)) == alone
