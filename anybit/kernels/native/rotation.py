"""Blockwise Hadamard transforms of tokens in registers: log2(block) additions for each number."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.rotation import block
from anybit.kernels.native import build
from anybit.kernels.native.activations import DTYPES
from anybit.kernels.native.floats import BYTES, read, rounded
from anybit.kernels.native.fused import PART, level, threads
from anybit.kernels.native.ir import F32, Function, Value, vec
from anybit.kernels.native.isa import Isa

NAMES = ("next", "x", "x_stride", "vector", "out", "units", "row")


def rotate(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    """`Family.rotate` of tokens (M, K) that `fused.suits`."""
    m, k = x.shape
    size, out = block(k), torch.empty(m, k, dtype=x.dtype)
    kernel = rotate_kernel(level(), DTYPES[x.dtype], DTYPES[vector.dtype], size, after)
    places = x.data_ptr(), x.stride(0) * x.itemsize, vector.data_ptr(), out.data_ptr()
    kernel((0, *places, m * (k // size), k // size), threads(m * k))
    return out


@cache
def rotate_kernel(isa: Isa, dtype: str, vector: str, size: int, after: bool) -> build.Kernel:
    """For blocks of `size` numbers; types are LLVM's names."""
    f = Function("rotate", NAMES)
    row, lanes = f.number("row"), min(isa.floats, size)
    starts = range(0, size, lanes)
    with (
        f.chunks(PART // size, f.number("units")) as (first, last),
        f.loop(first, last) as unit,
    ):
        t, at = unit // row, unit % row * size
        x = f.at(f.pointer("x"), t * f.number("x_stride") + at * BYTES[dtype])
        factors = f.at(f.pointer("vector"), at * BYTES[vector])
        out = f.at(f.pointer("out"), unit * (size * BYTES[dtype]))
        some = [read(f, dtype, x, i * BYTES[dtype], lanes) for i in starts]
        scale = [read(f, vector, factors, i * BYTES[vector], lanes) * size**-0.5 for i in starts]
        if not after:
            some = [a * b for a, b in zip(some, scale, strict=True)]
        some = transformed(f, some, lanes)
        if after:
            some = [a * b for a, b in zip(some, scale, strict=True)]
        for i, numbers in zip(starts, some, strict=True):
            f.store(rounded(f, isa, numbers, dtype), out, i * BYTES[dtype])
    return build.kernel(f, isa)


def transformed(f: Function, some: list[Value], lanes: int) -> list[Value]:
    """Sylvester's transform, not normalized, of a block in several vectors."""
    step = 1
    while step < lanes:  # y[i] = x[i ^ step] + x[i], or - x[i] where i has that bit
        signs = ", ".join(f"float {-1.0 if i & step else 1.0}" for i in range(lanes))
        sign, partners = Value(f, f"<{signs}>", vec(lanes, F32)), [i ^ step for i in range(lanes)]
        some = [f.fma(v, sign, f.shuffle(v, v, partners)) for v in some]
        step *= 2
    step = 1
    while step < len(some):
        some = [some[i ^ step] - v if i & step else v + some[i ^ step] for i, v in enumerate(some)]
        step *= 2
    return some
