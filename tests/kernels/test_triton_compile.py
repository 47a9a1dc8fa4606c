"""The GEMM compiles for every supported architecture, on a machine without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import EVERY_KERNEL

pytest.importorskip("triton")
Target = tuple[str, int | str, int]

# backend, architecture, lanes of a warp; what its matrix unit is called in the assembly
TARGETS = {
    ("cuda", 80, 32): "mma.sync", ("cuda", 89, 32): "mma.sync", ("cuda", 90, 32): "wgmma",
    ("cuda", 100, 32): "mma", ("cuda", 120, 32): "mma.sync",
    ("hip", "gfx942", 64): "v_mfma", ("hip", "gfx1100", 32): "v_wmma",
}  # fmt: skip
SCHEMES = (
    "int4:group=128", "fp6", "q4_k", "liquid@int8", "trellis", "trellis:bits=3,code=pair8@int8"
)  # fmt: skip
PROGRAM = """
import json
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
cases = json.loads(sys.argv[1])
torch.version.hip = "6.4" if cases[0][0] == "hip" else None  # as torch is built for AMD's GPUs
import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.triton import gemm, lang, viterbi
from anybit.kernels.triton.layout import layout_of

POINTER = {16: "*i16", 8: "*i8"}
NUMBER = {torch.uint8: "*u8", torch.float16: "*fp16", torch.float32: "*fp32"}
for backend, architecture, lanes, scheme in cases:
    if scheme == "ternary":
        import ternary
    fmt, activation = parse_scheme(scheme)
    layout = layout_of(fmt, activation)
    x = "*i8" if layout.unit == 8 else "*fp16"
    words = (POINTER[layout.unit],) * len(layout.segments) if not fmt.window else ("*i32",)
    kinds = dict(
        x=x, words=words, scale="*fp16",
        x_scale="*fp32", grid=tuple(NUMBER[entry.default_dtype] for _, entry in layout.grid),
        y="*fp16", partial="*fp32",
        locks="*i32", M="i32", N="i32", K="i32", PADDED="i32", PIECES="i32", X_STRIDE="i32",
        SPLIT="i32",
    )
    constants = dict(
        bias=None, LAYOUT=layout, DECODE=lang.jit(type(fmt).triton_decode),
        MODE=layout.scale_mode, HAS_X_SCALE=activation is not None, HAS_BIAS=False, EVEN_K=True,
        TOKENS=16, ROWS=64, SHARED=False, CUT=1, STEPS=1, STAGES=2, BAND=8,
    )
    names = gemm.gemm.arg_names
    signature = {n: kinds.get(n, "constexpr") for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(gemm.gemm, signature, values)
    target = GPUTarget(backend, architecture, lanes)
    made = triton.compile(source, target=target, options={"num_warps": 4}).asm
    text = made["ptx" if backend == "cuda" else "amdgcn"]
    lines = [line for line in text.splitlines() if '"' not in line]  # no names of files
    unit = [line for line in lines if "mma" in line or "mfma" in line]
    count = sum(line.rstrip().endswith(";") for line in lines)
    print(scheme, count, len(unit), unit[0].strip() if unit else "")
    if fmt.window:
        kinds = dict(
            x="*fp32", ends="*i32", back="*u8", FIRST="i32", COUNT="i32", KEPT="i32", ZERO="i32"
        )
        constants = dict(
            PINNED=True, LAYOUT=layout, DECODE=lang.jit(type(fmt).triton_decode), STATE=fmt.window,
            STEPS=256,
        )
        names = viterbi._forward.arg_names
        signature = {n: kinds.get(n, "constexpr") for n in names}
        values = {(names.index(n),): v for n, v in constants.items()}
        options = {"num_warps": viterbi.warps(fmt)}
        triton.compile(
            ASTSource(viterbi._forward, signature, values), target=target, options=options
        )
"""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "add_a_format.md"


def compiled(cases: list[tuple[Target, str]], paths: str = "") -> list[str]:
    """A line for each target and scheme: its name, instructions, products, the first of these."""
    given = json.dumps([(*target, scheme) for target, scheme in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"} | ({"PYTHONPATH": paths} if paths else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [scheme for _, scheme in cases]
    return lines


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_gemm_compiles_without_a_gpu(backend: str) -> None:
    """Every target with some schemes, or with all."""
    targets = [target for target in TARGETS if target[0] == backend]
    cases = [
        (target, scheme)
        for i, target in enumerate(targets)
        for j, scheme in enumerate(SCHEMES)
        if EVERY_KERNEL or (i + j) % 3 == 0
    ]
    for (target, _), line in zip(cases, compiled(cases), strict=True):
        assert TARGETS[target] in line, line


def test_a_users_decoder_is_as_short_as_a_built_in_one(tmp_path: Path) -> None:
    """The format of docs/add_a_format.md beside int2, whose codes have as many bits."""
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert source
    (tmp_path / "ternary.py").write_text(source[1])
    paths = os.pathsep.join([str(tmp_path), str(PAGE.parents[1])])
    ours = [(("cuda", 90, 32), scheme) for scheme in ("ternary", "int2")]
    own, built_in = (int(line.split()[1]) for line in compiled(ours, paths))
    assert own == built_in > 100
