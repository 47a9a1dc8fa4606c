"""The GEMM compiles for every supported architecture, on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

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
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
torch.version.hip = "6.4" if sys.argv[1] == "hip" else None  # as torch is built for AMD's GPUs
import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.triton import gemm, lang, viterbi
from anybit.kernels.triton.layout import layout_of

POINTER = {16: "*i16", 8: "*i8"}
NUMBER = {torch.uint8: "*u8", torch.float16: "*fp16", torch.float32: "*fp32"}
for scheme in sys.argv[4:]:
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
    backend, architecture, lanes = sys.argv[1:4]
    if backend == "cuda":
        architecture = int(architecture)
    target = GPUTarget(backend, architecture, int(lanes))
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


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_gemm_compiles_without_a_gpu(target: tuple[str, int | str, int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, target), *SCHEMES],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMES)
    assert all(TARGETS[target] in line for line in lines), done.stdout


def test_a_users_decoder_is_as_short_as_a_built_in_one(tmp_path: Path) -> None:
    """The format of docs/add_a_format.md beside int2, whose codes have as many bits."""
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert source
    (tmp_path / "ternary.py").write_text(source[1])
    paths = os.pathsep.join([str(tmp_path), str(PAGE.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cuda", "90", "32", "ternary", "int2"],
        capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    own, built_in = (int(line.split()[1]) for line in done.stdout.splitlines())
    assert own == built_in > 100
