"""Kernels for Arm, compiled on any processor: `make test-arm` runs them, in an emulator."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from anybit.kernels.native.isa import ARM, Isa, levels

if levels() is ARM:
    pytest.skip("Arm's kernels run here in all other tests", allow_module_level=True)

from anybit.core.format import get_format
from anybit.kernels.native import backend, build, dense, fused, rotation, viterbi
from tests.kernels.test_native import packed, tokens
from tests.needs import pairs

LINUX, MACOS = "aarch64-unknown-linux-gnu", "arm64-apple-macosx"
MODULES = (dense, fused, rotation, viterbi)


class Texts(list[str]):
    """Stands for `build.load`: keeps the texts of kernels, which do nothing."""

    def __call__(self, text: str, name: str, isa: Isa) -> "Texts.Nothing":
        self.append(text)
        return self.Nothing()

    class Nothing:
        address = 1

        def __call__(self, arguments: list[int], threads: int = 1) -> None:
            pass


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Isa, Texts]:
    """Let kernels be written for a level of Arm; the level, and where the texts go."""
    # An object of its own, for which no kernel is known yet.
    (level,) = (replace(some) for some in ARM if some.name == name)
    texts = Texts()
    monkeypatch.setattr(build, "load", texts)
    monkeypatch.setattr(backend, "isa", lambda: level)
    for module in MODULES:
        monkeypatch.setattr(module, "level", lambda: level, raising=False)
    return level, texts


def inner_loop(text: str, level: Isa) -> Counter[str]:
    """The longest run of instructions that nothing jumps into, counted by name."""
    machine, module = build.optimized(text, level, LINUX)
    runs: list[list[str]] = [[]]
    for line in machine.emit_assembly(module).splitlines():
        if re.match(r"[\w.]+:", line):
            runs.append([])
        elif line.startswith("\t") and line[1].isalpha():
            runs[-1].append(line.split()[0])
    return Counter(max(runs, key=len))


# Instructions for 32 weights that decode and multiply; and all, with loads and addresses.
EXPECTED = [
    ("neon_bf16", "int4", None, {"tbl": 4, "trn1": 2, "trn2": 2, "bfdot": 4}, 25),
    ("neon_bf16", "fp6", None, {"tbl": 4, "trn1": 2, "trn2": 2, "bfdot": 4}, 42),
    ("neon_bf16", "fp8", None, {"fcvtl": 4, "fcvtl2": 4, "uzp2": 4, "bfdot": 4}, 35),
    ("neon_bf16", "int8", None, {"scvtf": 8, "uzp2": 4, "bfdot": 4}, 42),
    ("neon_dot", "int4", None, {"tbl": 4, "trn1": 2, "trn2": 2, "fmla": 8}, 48),
    ("neon_dot", "int4", "int8", {"sdot": 2}, 8),
    ("neon_dot", "int8", "int8", {"sdot": 2}, 9),
    ("neon", "int4", "int8", {"smull": 2, "smull2": 2, "sadalp": 4}, 15),
]


@pytest.mark.parametrize(("name", "spec", "activation", "expected", "most"), EXPECTED)
def test_the_instructions_that_are_meant(
    name: str,
    spec: str,
    activation: str | None,
    expected: dict[str, int],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level, texts = choose(name, monkeypatch)
    weight = packed(spec, 8, 512)
    backend.linear(tokens(1, 512, torch.bfloat16), backend.prepare(weight, activation), None)
    (text,) = (text for text in texts if "@few(" in text)
    found = inner_loop(text, level)
    runs = 512 // 32
    for instruction, count in expected.items():
        assert found[instruction] / runs == pytest.approx(count, rel=0.3), found
    assert found.total() <= most * runs


@pytest.mark.parametrize(("name", "triple", "magic"), [
    *((level.name, LINUX, b"\x7fELF") for level in ARM),
    (ARM[0].name, MACOS, b"\xcf\xfa\xed\xfe"),
])  # fmt: skip
def test_objects_of_linux_and_macos(
    name: str, triple: str, magic: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, texts = choose(name, monkeypatch)
    tables = ("int3:group=16,zero", "fp6", "fp8", "codebook:m=2,v=8,group=128")
    for spec, m in pairs((*tables, "trellis:code=look"), (1, 5)):
        weight = packed(spec, 8)
        x = tokens(m, weight.shape[1], torch.bfloat16)
        backend.linear(x, backend.prepare(weight, None), None)
    backend.linear(tokens(5, 512), backend.prepare(packed("liquid", 8, 512), "int8"), None)
    x = tokens(2, 256, torch.bfloat16)
    fused.add_norm(x, x, x[0], 1e-5)
    fused.silu_mul(x, x)
    dense.linear(x, x)
    rotation.rotate(x, x[0], True)
    viterbi.paths(tokens(6, 8).view(3, 8, 2), tokens(16, 2), get_format("trellis"), 4)
    for text in texts:
        machine, module = build.optimized(text, level, triple)
        assert machine.emit_object(module)[:4] == magic
