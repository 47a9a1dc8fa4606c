"""The GEMM compiles for every supported architecture, on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARCHITECTURES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "mma", 120: "mma.sync"}
SCHEMES = ("int4:group=128", "fp6", "liquid@int8")
PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.triton import gemm, lang
from anybit.kernels.triton.layout import layout_of

POINTER = {16: "*i16", 8: "*i8"}
for scheme in sys.argv[2:]:
    fmt, activation = parse_scheme(scheme)
    layout = layout_of(fmt, activation)
    x = "*i8" if layout.unit == 8 else "*fp16"
    kinds = dict(
        x=x, words=(POINTER[layout.unit],) * len(layout.segments), scale="*fp16",
        x_scale="*fp32", grid=("*u8",) * len(layout.grid), y="*fp16", partial="*fp32",
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
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]
    unit = [line for line in ptx.splitlines() if "mma" in line]
    print(scheme, len(unit), unit[0].strip() if unit else "")
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gemm_compiles_without_a_gpu(arch: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arch), *SCHEMES],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMES)
    assert all(ARCHITECTURES[arch] in line for line in lines), done.stdout
