"""Numbers of any dtype as fp32 in registers, and functions of them."""

import struct
from collections.abc import Callable

from anybit.kernels.native.ir import BF16, F32, I8, I16, I32, Value, lanes, scalar, suffix, vec

BYTES = {F32: 4, BF16: 2, "half": 2, I8: 1, I16: 2}
# Of exp: Taylor's series up to r**7 / 7! for |r| <= ln(2) / 2, which is below fp32's rounding.
SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the first times 127 is exact in fp32
LARGEST = 127.0  # int8 code
LEAST, MOST = -88.0, 88.7  # exp is 0 below; inf above
ROUND = 1.5 * 2**23  # added to a small number, it leaves the nearest whole one in the last bits
ROUND_BITS = struct.unpack("i", struct.pack("f", ROUND))[0]


def several(kind: str, count: int) -> str:
    """The type of `count` numbers: a vector, or a scalar for 1."""
    return vec(count, kind) if count > 1 else kind


def every(number: Value, count: int) -> Value:
    """A scalar in `count` lanes; itself for 1."""
    return number.splat(count) if count > 1 else number


def read(kind: str, pointer: Value, offset: Value | int, count: int) -> Value:
    """`count` numbers of LLVM's type `kind` from memory, as fp32."""
    return single(pointer.function.load(several(kind, count), pointer, offset))


def single(some: Value) -> Value:
    """Numbers of any type as fp32."""
    count, kind = lanes(some.kind), scalar(some.kind)
    if kind == F32:
        return some
    if kind == BF16:
        bits = some.bits(several(I16, count))
        return (bits.cast("zext", several(I32, count)) << 16).bits(several(F32, count))
    return some.cast("sitofp" if kind == I8 else "fpext", several(F32, count))


def rounded(value: Value, kind: str) -> Value:
    """fp32 as another float type, rounded to the nearest even."""
    count, isa = lanes(value.kind), value.function.isa
    if kind == F32:
        return value
    if kind != BF16 or (isa.bf16 and count >= isa.floats // 2):
        return value.cast("fptrunc", several(kind, count))
    bits = value.bits(several(I32, count))
    up = bits + ((bits >> 16) & 1) + 0x7FFF
    nan = bits.like(0x7FC00000)
    high = value.compare("uno", value).select(nan, up) >> 16
    return high.cast("trunc", several(I16, count)).bits(several(BF16, count))


def through(value: Value, kind: str) -> Value:
    """fp32 after a rounding to another float type."""
    return single(rounded(value, kind))


def maximum(a: Value, b: Value) -> Value:
    """The larger number; NaN where one is."""
    assert a.real
    return a.call(f"llvm.maximum.{suffix(a.kind)}", b)


def magnitude(value: Value) -> Value:
    """|value|."""
    bits = value.bits(several(I32, lanes(value.kind)))
    return (bits & 0x7FFFFFFF).bits(value.kind)


def largest(value: Value) -> Value:
    """The largest lane; NaN where one is."""
    while (count := lanes(value.kind)) > 2:
        half = count // 2
        low = value.pick(range(half))
        value = maximum(low, value.pick(range(half, count)))
    return maximum(value.lane(0), value.lane(1))


def int8(x: Value) -> Value:
    """The nearest int8 codes from -127 to 127, ties to even."""
    return whole(x, -LARGEST, LARGEST).cast("trunc", several(I8, lanes(x.kind)))


def whole(x: Value, least: float, most: float) -> Value:
    """The nearest 32-bit integers within bounds, ties to even."""
    code = x.call(f"llvm.rint.{suffix(x.kind)}")
    for how, limit in (("ogt", most), ("olt", least)):
        bound = x.like(limit)
        code = code.compare(how, bound).select(bound, code)
    return code.cast("fptosi", several(I32, lanes(x.kind)))


def exp(x: Value) -> Value:
    """e**x within 2 ulp; exactly 0 for -inf, NaN for NaN."""
    kind = x.kind
    least, most = x.like(LEAST), x.like(MOST)
    x = (x < least).select(least, x)
    x = (x > most).select(most, x)
    shifted = x.fma(x.like(1.4426950408889634), x.like(ROUND))
    whole = shifted - ROUND
    rest = whole.fma(x.like(-LN2_HIGH), x)
    rest = whole.fma(x.like(-LN2_LOW), rest)
    total = x.like(SERIES[0])
    for factor in SERIES[1:]:
        total = total.fma(rest, x.like(factor))
    power = shifted.bits(several(I32, lanes(kind))) - (ROUND_BITS - 127)
    return total * (power << 23).bits(kind)


def root(x: Value) -> Value:
    """The square root of a scalar."""
    return x.call("llvm.sqrt.f32")


def along(first: Value | int, stop: Value, count: int, body: Callable[[Value, int], None]) -> None:
    """`body(i, lanes)` for all of range(first, stop): `count` at once, then one by one."""
    f, start = stop.function, stop.like(first)
    whole = start + (stop - start) // count * count
    with f.loop(start, whole, count) as i:
        body(i, count)
    with f.loop(whole, stop) as i:
        body(i, 1)
