"""What happens between products: residual + RMSNorm, SiLU and GELU * up, other dtypes."""

import math
import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.native import build
from anybit.kernels.native.activations import DTYPES, SERIAL
from anybit.kernels.native.floats import (
    BYTES,
    along,
    every,
    exp,
    read,
    root,
    rounded,
    several,
    through,
)
from anybit.kernels.native.ir import F32, Function, Value
from anybit.kernels.native.isa import Isa, isa

NORM = (
    "next",
    "x",
    "x_stride",
    "delta",
    "delta_stride",
    "weight",
    "out",
    "total",
    "m",
    "n",
    "eps",
)
GATED = ("next", "gate", "gate_stride", "up", "up_stride", "out", "m", "n", "parts")
COPY = ("next", "from", "to", "n")
PART = 1024  # columns that a thread takes at once
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@cache
def able() -> bool:
    """Whether kernels can be compiled for this processor and share torch's threads."""
    return isa() is not None and build.parallel() is not None


def level() -> Isa:
    """The processor's instructions, where there are kernels for it."""
    found = isa()
    assert found is not None
    return found


def threads(numbers: int) -> int:
    """Threads for work on so many numbers: one moves few sooner than two would be woken."""
    return torch.get_num_threads() if numbers >= SERIAL else 1


def bits_of(number: float) -> int:
    """A number as kernels take it among their arguments."""
    return int.from_bytes(struct.pack("f", number), "little")


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels take these: (M, N) of one float dtype whose columns lie side by side."""
    return all(
        t.dim() == 2 and t.stride(1) == 1 and t.dtype in FLOATS and t.dtype == tensors[0].dtype
        for t in tensors
    )


# RMSNorm.


@dataclass(frozen=True)
class Norm:
    """What the kernel is compiled for; types are LLVM's names."""

    isa: Isa
    dtype: str
    weight: str
    adds: bool


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + delta) * weight and x + delta, all (M, N); without a delta, of x.

    Rounded like `anybit.kernels.between.rms_norm`.
    """
    m, n = x.shape
    out = torch.empty(m, n, dtype=x.dtype)
    total = x if delta is None else torch.empty(m, n, dtype=x.dtype)
    stride = x.stride(0) * x.itemsize
    other = (0, 0) if delta is None else (delta.data_ptr(), delta.stride(0) * delta.itemsize)
    spec = Norm(level(), DTYPES[x.dtype], DTYPES[weight.dtype], delta is not None)
    places = weight.data_ptr(), out.data_ptr(), total.data_ptr()
    norm_kernel(spec)(
        (0, x.data_ptr(), stride, *other, *places, m, n, bits_of(eps)), threads(m * n)
    )
    return out, total


@cache
def norm_kernel(spec: Norm) -> build.Kernel:
    f = Function("norm", NORM, spec.isa)
    n, size, lanes = f.number("n"), BYTES[spec.dtype], spec.isa.floats
    eps = f.load(F32, f.address("eps"), align=4)
    with f.chunks(1, f.number("m")) as (t, _):
        x = f.at("x", t * f.number("x_stride"))
        out, total = (f.at(name, t * n * size) for name in ("out", "total"))
        delta = f.at("delta", t * f.number("delta_stride"))
        sums = {count: f.variable(f.constant(0, several(F32, count))) for count in (lanes, 1)}

        def add(i: Value, count: int) -> None:
            some = read(spec.dtype, x, i * size, count)
            if spec.adds:
                added = some + read(spec.dtype, delta, i * size, count)
                f.store(rounded(added, spec.dtype), total, i * size)
                some = through(added, spec.dtype)
            sums[count].set(some.fma(some, sums[count].get()))

        along(0, n, lanes, add)
        squares = sums[lanes].get().sum() + sums[1].get()
        mean = squares // n.cast("uitofp", F32)
        inverse = 1 // root(mean + eps)
        source = total if spec.adds else x

        def scale(i: Value, count: int) -> None:
            some = read(spec.dtype, source, i * size, count) * every(inverse, count)
            some = through(some, spec.weight)
            weight = read(spec.weight, f.pointer("weight"), i * BYTES[spec.weight], count)
            some = through(some * weight, spec.weight)
            f.store(rounded(some, spec.dtype), out, i * size)

        along(0, n, lanes, scale)
    return build.kernel(f)


# SiLU and GELU.


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, both (M, N), in fp32 until it is rounded to their dtype."""
    return _gated(gate, up, False)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """GELU(gate) by tanh, rounded to its dtype, * up, both (M, N)."""
    return _gated(gate, up, True)


def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    m, n = up.shape
    out = torch.empty(m, n, dtype=up.dtype)
    places = [number for t in (gate, up) for number in (t.data_ptr(), t.stride(0) * t.itemsize)]
    parts = -(-n // PART)
    gated_kernel(level(), DTYPES[up.dtype], gelu)(
        (0, *places, out.data_ptr(), m, n, parts), threads(m * n)
    )
    return out


@cache
def gated_kernel(isa: Isa, dtype: str, gelu: bool) -> build.Kernel:
    f = Function("gated", GATED, isa)
    n, parts, size = f.number("n"), f.number("parts"), BYTES[dtype]
    with f.chunks(1, f.number("m") * parts) as (unit, _):
        t, first = unit // parts, unit % parts * PART
        gate, up = (f.at(name, t * f.number(f"{name}_stride")) for name in ("gate", "up"))
        out = f.at("out", t * n * size)

        def multiply(i: Value, count: int) -> None:
            x = read(dtype, gate, i * size, count)
            z = x
            if gelu:  # (1 + tanh(z / 2)) / 2 is 1 / (1 + exp(-z))
                cubic = (x * x).fma(f.constant(0.044715, x.kind), f.constant(1, x.kind))
                z = x * cubic * (2 * math.sqrt(2 / math.pi))
            one = f.constant(1, x.kind)
            y = x // (one + exp(0 - z))
            y = through(y, dtype) if gelu else y
            y = y * read(dtype, up, i * size, count)
            f.store(rounded(y, dtype), out, i * size)

        along(first, (first + PART).smaller(n), isa.floats, multiply)
    return build.kernel(f)


# Other dtypes.


def convert(x: Tensor, out: Tensor) -> None:
    """Write numbers to a tensor of another float dtype; both lie side by side."""
    kernel = copy_kernel(level(), DTYPES[x.dtype], DTYPES[out.dtype])
    kernel((0, x.data_ptr(), out.data_ptr(), x.numel()), threads(x.numel()))


@cache
def copy_kernel(isa: Isa, source: str, target: str) -> build.Kernel:
    f = Function("convert", COPY, isa)
    n = f.number("n")
    with f.chunks(PART, n) as (first, last):

        def move(i: Value, count: int) -> None:
            some = read(source, f.pointer("from"), i * BYTES[source], count)
            f.store(rounded(some, target), "to", i * BYTES[target])

        along(first, last, isa.floats, move)
    return build.kernel(f)
