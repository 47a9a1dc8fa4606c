"""Compiled kernels in a file: what is taken from it, and what is refused before anything is."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybit.errors import AnybitError
from anybit.kernels import archive
from anybit.kernels.cute import jit
from anybit.kernels.mma.build import kernels_of
from tests import forks

triton = pytest.importorskip("triton")
CUDA = torch.device("cuda", 0)
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from anybit.kernels.triton.likeliest import _largest

kinds = {"logits": "*bf16", "largest": "*fp32", "tokens": "*i32", "V": "i32", "STRIDE": "i32"}
names = _largest.arg_names
signature = {name: kinds.get(name, "constexpr") for name in names}
fixed = {"WIDE": 64, "PDL": False} | dict.fromkeys(("best", "temperature", "least", "keys"))
values = {(names.index(name),): value for name, value in fixed.items()}
seen = lambda cache_hit, **rest: print("found" if cache_hit else "compiled")
triton.knobs.compilation.listener = seen
triton.compile(ASTSource(_largest, signature, values), target=GPUTarget("cuda", 89, 32))
"""


def compiled(cache: Path) -> str:
    """What Triton does for one of anybit's kernels, with its cache in a folder."""
    done = forks.run(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Turns to empty caches of a name, as another machine has them, which has an RTX 4090."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "RTX 4090")

    def turn(name: str) -> Path:
        monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / name))
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / name / "triton"))
        return tmp_path / name

    return turn


@pytest.fixture
def packed(tmp_path: Path, caches: Callable[[str], Path]) -> Path:
    """A file with contents that stand for kernels; afterwards the caches are empty."""
    here, kernels = caches("here"), kernels_of("fp6", (8, 9))[:3]
    for i, kernel in enumerate(kernels):
        jit.store(jit.kernel_file(kernel), f"kernel {i}".encode)
    ours = f'#loc = loc("{archive.ROOM}/triton/gemm.py":1:0)'
    for key, arch, lines in (("OURS", 89, ours), ("ANOTHERGPU", 90, ours), ("THEIRS", 89, "")):
        folder = here / "triton" / key
        folder.mkdir(parents=True)
        (folder / "gemm.json").write_text(json.dumps({"target": {"arch": arch}}))
        (folder / "gemm.cubin").write_bytes(b"machine code")
        (folder / "gemm.ttir").write_text(lines)
        (folder / "__grp__gemm.json").write_text("{}")
    assert archive.pack(tmp_path / "kernels.pack", kernels, None, ["8.9"]) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["kernels.pack"]
    caches("there")
    return tmp_path / "kernels.pack"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_kernels_arrive_where_they_are_looked_for(packed: Path, tmp_path: Path) -> None:
    archive.unpack(packed, CUDA)
    here, there = contents(tmp_path / "here"), contents(tmp_path / "there")
    group = json.loads(there.pop("triton/OURS/__grp__gemm.json"))["child_paths"]
    folder = tmp_path / "there" / "triton" / "OURS"
    assert group == {name: str(folder / name) for name in ("gemm.json", "gemm.cubin")}
    wanted = {"triton/OURS/gemm.json", "triton/OURS/gemm.cubin"}  # for this GPU, and ours
    assert there == {n: here[n] for n in here if n.startswith("cute/") or n in wanted}
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    archive.unpack(packed, CUDA)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_triton_compiles_nothing_that_a_file_has(
    tmp_path: Path, caches: Callable[[str], Path]
) -> None:
    here = caches("here")
    assert compiled(here / "triton") == "compiled"
    assert archive.pack(tmp_path / "kernels.pack", [], None, ["8.9"]) == 2
    shutil.rmtree(here)
    there = caches("there")
    archive.unpack(tmp_path / "kernels.pack", CUDA)
    assert compiled(there / "triton") == "found"


def changed(
    path: Path, change: Callable[[dict], object], name: str = "", data: bytes = b""
) -> None:
    """Write a file anew with another manifest, and with other contents under a name."""
    with zipfile.ZipFile(path) as old:
        found = {each: old.read(each) for each in old.namelist()}
    facts = json.loads(found.pop("manifest.json"))
    change(facts)
    if name:
        found[name] = data
    with zipfile.ZipFile(path, "w") as new:
        for each, content in {"manifest.json": json.dumps(facts).encode(), **found}.items():
            new.writestr(each, content)


def test_what_does_not_fit_is_refused_in_a_line(
    packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = packed.read_bytes()

    def refused(what: str, device: torch.device = CUDA) -> None:
        with pytest.raises(AnybitError, match=what) as caught:
            archive.unpack(packed, device)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "there").exists()
        packed.write_bytes(whole)

    refused("holds kernels of GPUs, and the device is cpu", torch.device("cpu"))
    for broken in (whole[:-100], whole[: len(whole) // 2], b"some text", b""):
        packed.write_bytes(broken)
        refused("no file of kernels, or not all of it")
    changed(packed, dict.clear)
    refused("no file of kernels, or not all of it")
    for name in ("cute/../../out", "/etc/out", "triton/../out", "cute\\..\\out", "cute/a/b", "out"):
        changed(packed, lambda facts, name=name: facts["files"].update({name: ""}), name)
        refused("which is no place for a kernel")
    changed(packed, lambda facts: None, "cute/more.kernel")
    refused("does not hold the files that it names")
    with zipfile.ZipFile(packed) as archived:
        kernel = archived.namelist()[1]
    changed(packed, lambda facts: None, kernel, b"another kernel")
    refused(f"{kernel} was altered")
    changed(packed, lambda facts: facts.update(Triton="3.0.0"))
    refused("made with Triton 3.0.0, and .* is here")
    changed(packed, lambda facts: facts.update(gpus=["9.0"]))
    refused("for GPUs of compute capability 9.0, and RTX 4090 has 8.9")
    monkeypatch.setattr(archive, "sources", lambda: "others")
    refused("made from other sources of anybit")
    packed.unlink()
    with pytest.raises(AnybitError, match="there is no file"):
        archive.unpack(packed, CUDA)


def test_a_bit_that_changed_never_becomes_a_kernel(packed: Path, tmp_path: Path) -> None:
    whole, here = packed.read_bytes(), contents(tmp_path / "here")
    refused = 0
    for at in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[at] ^= 0x40
        packed.write_bytes(flipped)
        try:
            archive.unpack(packed, CUDA)
        except AnybitError:
            refused += 1
            assert not (tmp_path / "there").exists()
        else:  # in a field that nothing is read by, such as a date
            there = contents(tmp_path / "there")
            assert all(here[name] == there[name] for name in there if "__grp__" not in name)
            shutil.rmtree(tmp_path / "there")
    assert refused > 10
