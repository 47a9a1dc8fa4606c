"""Activations as the kernels read them: one type, whole blocks, tokens side by side."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.native import build, ir
from anybit.kernels.native.floats import (
    BYTES,
    along,
    every,
    int8,
    largest,
    magnitude,
    maximum,
    read,
    several,
    single,
    whole,
)
from anybit.kernels.native.ir import BF16, F32, I8, I16, I32, Function, Value, vec
from anybit.kernels.native.isa import Isa
from anybit.kernels.native.operand import Operand, laid

NAMES = ("next", "x", "stride", "k", "m", "tokens", "units", "to", "sums", "groups")
TOKENS = ("next", "x", "stride", "k", "m", "to", "scale")
DTYPES = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: "half",
    torch.int8: I8,
    torch.int16: I16,
}
WIDEST = 16  # lanes of 32 bits
SERIAL = 1 << 16  # numbers that one thread moves sooner than two would be woken


@dataclass(frozen=True)
class Packing:
    """What the kernel is compiled for: source is LLVM's name of x's type.

    group: columns whose sums are asked for; 0: the row; None: no sums.
    """

    operand: Operand
    source: str
    group: int | None


def pack(
    x: Tensor, operand: Operand, tokens: int, group: int | None
) -> tuple[Tensor, Tensor | None]:
    """Lay activations out.

    Args:
        x: (M, K), a float dtype, int8 or int16, whose columns lie side by side.
        operand: what is multiplied.
        tokens: how many lie side by side; the rest of M is a part of its own, unless M is less.
        group: see `Packing`.

    Returns:
        The numbers by (tokens, vector, token), and sums fp32 or int32, (M, 1) or
        (M, groups), with zeros behind them up to a multiple of `WIDEST`. Where M is less than
        `tokens`, what lies behind M is anything.
    """
    m, k = x.shape
    columns = laid(k)
    out = torch.empty(max(m, tokens) * columns * operand.token_bytes, dtype=torch.uint8)
    sums = None
    if group is not None:
        count = -(-columns // (group * WIDEST)) * WIDEST if group else 1
        dtype = torch.int32 if operand.integer else torch.float32
        sums = torch.empty(max(m, tokens), count, dtype=dtype)
    threads = 1 if x.numel() < SERIAL else torch.get_num_threads()
    where = (0, 0) if sums is None else (sums.data_ptr(), sums.shape[1])
    stride = x.stride(0) * x.itemsize
    kernel(Packing(operand, DTYPES[x.dtype], group))(
        (0, x.data_ptr(), stride, k, m, tokens, columns // operand.codes, out.data_ptr(), *where),
        threads,
    )
    return out, sums


@cache
def kernel(spec: Packing) -> build.Kernel:
    f = _pack(spec)
    return build.kernel(f)


def quantize(x: Tensor, isa: Isa) -> tuple[Tensor, Tensor]:
    """int8 codes (M, K) and scales (M,) fp32 of activations, those of the reference.

    Args:
        x: (M, K), a float dtype, whose columns lie side by side.
        isa: what the processor can do.
    """
    m, k = x.shape
    codes, scale = torch.empty(m, k, dtype=torch.int8), torch.empty(m)
    threads = 1 if x.numel() < SERIAL else torch.get_num_threads()
    where = x.data_ptr(), x.stride(0) * x.itemsize, k, m, codes.data_ptr(), scale.data_ptr()
    quantizer(DTYPES[x.dtype], isa)((0, *where), threads)
    return codes, scale


@cache
def quantizer(source: str, isa: Isa) -> build.Kernel:
    """What quantizes activations whose type LLVM calls `source`."""
    f = Function("quantize", TOKENS, isa)
    k, size = f.number("k"), BYTES[source]
    with f.chunks(1, f.number("m")) as (t, _):
        row = f.at("x", t * f.number("stride"))
        to = f.at("to", t * k)
        scale = _top(source, row, k) // 127
        scale = scale.compare("oeq", 0).select(scale.like(1), scale)
        f.store(scale, "scale", t << 2)

        def divide(i: Value, count: int) -> None:
            some = read(source, row, i * size, count)
            f.store(int8(some // every(scale, count)), to, i)

        along(0, k, isa.floats, divide)
    return build.kernel(f)


def _top(kind: str, row: Value, k: Value) -> Value:
    """The largest magnitude of k numbers; NaN where one is."""
    f = row.function
    tops = {n: f.variable(f.constant(0, several(F32, n))) for n in (f.isa.floats, 1)}

    def compare(i: Value, count: int) -> None:
        some = magnitude(read(kind, row, i * BYTES[kind], count))
        tops[count].set(maximum(tops[count].get(), some))

    along(0, k, f.isa.floats, compare)
    return maximum(largest(tops[f.isa.floats].get()), tops[1].get())


def fixed(x: Tensor, isa: Isa) -> tuple[Tensor, Tensor]:
    """bf16 activations in 16 bits of fixed point, (M, K) int16, and scales (M,) fp32.

    A scale is the power of two by which a token's largest number takes all bits: that number, and
    those down to a 64th of it, keep all of theirs. Codes are at most 127 * 256, so that their
    nearest multiple of 256 fits a byte. NaN where a token holds NaN or inf.
    """
    m, k = x.shape
    out, scale = torch.empty(m, k, dtype=torch.int16), torch.empty(m)
    fixer(isa)((0, x.data_ptr(), x.stride(0) * 2, k, m, out.data_ptr(), scale.data_ptr()))
    return out, scale


@cache
def fixer(isa: Isa) -> build.Kernel:
    f = Function("fixed", TOKENS, isa)
    k = f.number("k")
    with f.chunks(1, f.number("m")) as (t, _):
        row = f.at("x", t * f.number("stride"))
        to = f.at("to", t * k * 2)
        top = _top(BF16, row, k)
        exponent = top.bits(I32) >> 23
        above = (top.bits(I32) + (1 << 16)) >> 23  # one more for the largest mantissa
        high = above.compare("ugt", 15)
        power = high.select(above, f.constant(15, I32))
        nan = f.constant(0x7FC00000, I32).bits(F32)
        scale = ((power - 14) << 23).bits(F32)
        finite = exponent.compare("ult", 255)
        f.store(finite.select(scale, nan), "scale", t << 2)
        inverse = ((268 - power) << 23).bits(F32)

        def move(i: Value, count: int) -> None:
            some = read(BF16, row, i * 2, count) * every(inverse, count)
            code = whole(some, -32768.0, 32767.0)
            f.store(code.cast("trunc", several(I16, count)), to, i * 2)

        along(0, k, isa.floats, move)
    return build.kernel(f)


def _split(some: Value) -> Value:
    """int16 as signed bytes: of each 32, upper ones and then lower ones; upper * 256 + lower."""
    count = ir.lanes(some.kind)
    low = some.cast("trunc", vec(count, I8))
    high = ((some - low.cast("sext", some.kind)) >> 8).cast("trunc", low.kind)
    places = [
        half + i + byte for i in range(0, count, 32) for half in (0, count) for byte in range(32)
    ]
    return high.shuffle(low, places)


def _pack(spec: Packing) -> Function:
    operand = spec.operand
    f = Function("pack", NAMES, operand.isa)
    unit, size = operand.codes, operand.isa.bits // 8
    k, m, tokens = f.number("k"), f.number("m"), f.number("tokens")
    units = f.number("units")
    bytes_ = BYTES[spec.source]
    rest = f.allocate(I8, unit * bytes_)
    with f.chunks(tokens, m) as (first, last):
        left = m - first
        # A last part that is smaller than the others lies closer, unless it is the only one.
        few = tokens > m
        span = few.select(tokens, left.smaller(tokens))
        to = f.at("to", first * units * (unit * operand.token_bytes))
        with f.loop(first, last) as t:
            row = f.at("x", t * f.number("stride"))
            if spec.group is not None:
                groups = f.number("groups") if spec.group else f.integer(1)
                with f.loop(0, groups) as g:
                    f.store(f.zero(I32), "sums", (t * groups + g) << 2)
            with f.loop(0, units) as u:
                source = f.at(row, u * (unit * bytes_))
                there = k - u * unit
                with f.when(there < unit):
                    with f.loop(0, unit * bytes_) as i:
                        f.store(f.zero(I8), rest, i)
                    with f.loop(0, there * bytes_) as i:
                        f.store(f.load(I8, source, i), rest, i)
                whole = there >= unit
                some = f.load(vec(unit, spec.source), whole.select(source, rest))
                numbers = _convert(operand, some)
                if operand.order() != list(range(unit)):
                    numbers = numbers.pick(operand.order())
                if operand.banded:
                    numbers = _split(numbers) if operand.kind == "split" else numbers
                    f.store(numbers, to, u * (unit * operand.token_bytes))
                place = f.at(to, (u * operand.vectors * span + (t - first)) * size)
                for j in range(0 if operand.banded else operand.vectors):
                    count = unit // operand.vectors
                    part = numbers.pick(range(j * count, (j + 1) * count))
                    f.store(part, place, span * (j * size))
                if spec.group is not None:
                    _sum(spec, some, t, u)
    return f


def _convert(operand: Operand, some: Value) -> Value:
    count, source = ir.lanes(some.kind), ir.scalar(some.kind)
    target = ir.scalar(operand.vector)
    if source == target or operand.kind == "split":
        return some
    if operand.whole:
        return some.cast("sext", vec(count, target))
    return single(some).cast("fptrunc", vec(count, target))


def _sum(spec: Packing, some: Value, t: Value, u: Value) -> None:
    """Add a unit to the sums of its groups."""
    f, unit, operand = some.function, spec.operand.codes, spec.operand
    wide = some.cast("sext", vec(unit, I32)) if operand.integer else single(some)
    size = spec.group or unit
    count = max(1, unit // size)  # groups in a unit
    for i in range(count):
        some = wide if count == 1 else wide.pick(range(i * size, (i + 1) * size))
        total = some.sum()
        at = t
        if spec.group:
            group = u // (size // unit) if count == 1 else u * count + i
            at = t * f.number("groups") + group
        place = f.at("sums", at << 2)
        f.store(f.load(total.kind, place) + total, place)
