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
    f = Function("rotate", NAMES, isa)
    row, lanes = f.number("row"), min(isa.floats, size)
    starts = range(0, size, lanes)
    with (
        f.chunks(PART // size, f.number("units")) as (first, last),
        f.loop(first, last) as unit,
    ):
        t, at = unit // row, unit % row * size
        x = f.at("x", t * f.number("x_stride") + at * BYTES[dtype])
        factors = f.at("vector", at * BYTES[vector])
        out = f.at("out", unit * (size * BYTES[dtype]))
        some = [read(dtype, x, i * BYTES[dtype], lanes) for i in starts]
        scale = [read(vector, factors, i * BYTES[vector], lanes) * size**-0.5 for i in starts]
        if not after:
            some = [a * b for a, b in zip(some, scale, strict=True)]
        some = transformed(some, lanes, size)
        if after:
            some = [a * b for a, b in zip(some, scale, strict=True)]
        for i, numbers in zip(starts, some, strict=True):
            f.store(rounded(numbers, dtype), out, i * BYTES[dtype])
    return build.kernel(f)


def transformed(some: list[Value], lanes: int, run: int) -> list[Value]:
    """Sylvester's transform, not normalized, of each run of so many numbers in several vectors."""
    f, step = some[0].function, 1
    while step < run:
        if step < lanes:  # y[i] = x[i ^ step] + x[i], or - x[i] where i has that bit
            signs = ", ".join(f"float {-1.0 if i & step else 1.0}" for i in range(lanes))
            sign = Value(f, f"<{signs}>", vec(lanes, F32))
            some = [v.fma(sign, v.pick([i ^ step for i in range(lanes)])) for v in some]
        else:
            some = butterfly(some, step // lanes)
        step *= 2
    return some


def butterfly(x: list[Value], stride: int) -> list[Value]:
    """Sums of vectors that lie `stride` apart, and their differences."""
    upper = [i // stride % 2 for i in range(len(x))]
    return [x[i - stride] - v if upper[i] else v + x[i + stride] for i, v in enumerate(x)]
