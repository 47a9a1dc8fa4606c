"""The GEMM compiles for every supported architecture, on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# backend, architecture, lanes of a warp; what its matrix unit is called in the assembly
TARGETS = {
    ("cuda", 80, 32): "mma.sync", ("cuda", 89, 32): "mma.sync", ("cuda", 90, 32): "wgmma",
    ("cuda", 100, 32): "mma", ("cuda", 120, 32): "mma.sync",
    ("hip", "gfx942", 64): "v_mfma", ("hip", "gfx1100", 32): "v_wmma",
}  # fmt: skip
SCHEMES = ("int4:group=128", "fp6", "q4_k", "liquid@int8")
PROGRAM = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
torch.version.hip = "6.4" if sys.argv[1] == "hip" else None  # as torch is built for AMD's GPUs
import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.triton import gemm, lang
from anybit.kernels.triton.layout import layout_of

POINTER = {16: "*i16", 8: "*i8"}
NUMBER = {torch.uint8: "*u8", torch.float16: "*fp16", torch.float32: "*fp32"}
for scheme in sys.argv[4:]:
    fmt, activation = parse_scheme(scheme)
    layout = layout_of(fmt, activation)
    x = "*i8" if layout.unit == 8 else "*fp16"
    kinds = dict(
        x=x, words=(POINTER[layout.unit],) * len(layout.segments), scale="*fp16",
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
    print(scheme, len(unit), unit[0].strip() if unit else "")
"""


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
