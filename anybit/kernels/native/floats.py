"""Numbers of any dtype as fp32 in registers, and functions of them."""

import struct
from collections.abc import Callable

from anybit.kernels.native.ir import BF16, F32, I8, I16, I32, Function, Value, lanes, scalar, vec
from anybit.kernels.native.isa import Isa

BYTES = {F32: 4, BF16: 2, "half": 2, I8: 1}
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


def every(f: Function, number: Value, count: int) -> Value:
    """A scalar in `count` lanes; itself for 1."""
    return f.splat(number, count) if count > 1 else number


def read(f: Function, kind: str, pointer: Value, offset: Value | int, count: int) -> Value:
    """`count` numbers of LLVM's type `kind` from memory, as fp32."""
    some, single = f.load(several(kind, count), pointer, offset), several(F32, count)
    if kind == F32:
        return some
    if kind == BF16:
        bits = f.bits(some, several(I16, count))
        return f.bits(f.cast("zext", bits, several(I32, count)) << 16, single)
    return f.cast("sitofp" if kind == I8 else "fpext", some, single)


def rounded(f: Function, isa: Isa, value: Value, kind: str) -> Value:
    """fp32 as another float type, rounded to the nearest even."""
    count = lanes(value.kind)
    if kind == F32:
        return value
    if kind != BF16 or (isa.bf16 and count >= isa.floats // 2):
        return f.cast("fptrunc", value, several(kind, count))
    bits = f.bits(value, several(I32, count))
    up = bits + ((bits >> 16) & 1) + 0x7FFF
    nan = f.constant(0x7FC00000, bits.kind)
    high = f.select(f.compare("uno", value, value), nan, up) >> 16
    return f.bits(f.cast("trunc", high, several(I16, count)), several(BF16, count))


def through(f: Function, isa: Isa, value: Value, kind: str) -> Value:
    """fp32 after a rounding to another float type."""
    if kind == F32:
        return value
    count, single = lanes(value.kind), value.kind
    some = rounded(f, isa, value, kind)
    if kind != BF16:
        return f.cast("fpext", some, single)
    bits = f.cast("zext", f.bits(some, several(I16, count)), several(I32, count))
    return f.bits(bits << 16, single)


def maximum(f: Function, a: Value, b: Value) -> Value:
    """The larger number; NaN where one is."""
    assert scalar(a.kind) == F32
    suffix = f"v{lanes(a.kind)}f32" if lanes(a.kind) > 1 else "f32"
    return f.call(a.kind, f"llvm.maximum.{suffix}", a, b)


def magnitude(f: Function, value: Value) -> Value:
    """|value|."""
    bits = f.bits(value, several(I32, lanes(value.kind)))
    return f.bits(bits & 0x7FFFFFFF, value.kind)


def largest(f: Function, value: Value) -> Value:
    """The largest lane; NaN where one is."""
    while (count := lanes(value.kind)) > 2:
        half = count // 2
        low = f.shuffle(value, value, range(half))
        value = maximum(f, low, f.shuffle(value, value, range(half, count)))
    return maximum(f, f.lane(value, 0), f.lane(value, 1))


def int8(f: Function, x: Value) -> Value:
    """The nearest int8 codes from -127 to 127, ties to even."""
    return f.cast("trunc", whole(f, x, -LARGEST, LARGEST), several(I8, lanes(x.kind)))


def whole(f: Function, x: Value, least: float, most: float) -> Value:
    """The nearest 32-bit integers within bounds, ties to even."""
    count = lanes(x.kind)
    code = f.call(x.kind, f"llvm.rint.v{count}f32" if count > 1 else "llvm.rint.f32", x)
    for how, limit in (("ogt", most), ("olt", least)):
        bound = f.constant(limit, x.kind)
        code = f.select(f.compare(how, code, bound), bound, code)
    return f.cast("fptosi", code, several(I32, count))


def exp(f: Function, x: Value) -> Value:
    """e**x within 2 ulp; exactly 0 for -inf, NaN for NaN."""
    kind = x.kind
    least, most = f.constant(LEAST, kind), f.constant(MOST, kind)
    x = f.select(f.compare("olt", x, least), least, x)
    x = f.select(f.compare("ogt", x, most), most, x)
    shifted = f.fma(x, f.constant(1.4426950408889634, kind), f.constant(ROUND, kind))
    whole = shifted - ROUND
    rest = f.fma(whole, f.constant(-LN2_HIGH, kind), x)
    rest = f.fma(whole, f.constant(-LN2_LOW, kind), rest)
    total = f.constant(SERIES[0], kind)
    for factor in SERIES[1:]:
        total = f.fma(total, rest, f.constant(factor, kind))
    power = f.bits(shifted, several(I32, lanes(kind))) - (ROUND_BITS - 127)
    return total * f.bits(power << 23, kind)


def root(f: Function, x: Value) -> Value:
    """The square root of a scalar."""
    return f.call(F32, "llvm.sqrt.f32", x)


def along(
    f: Function, first: Value | int, stop: Value, count: int, body: Callable[[Value, int], None]
) -> None:
    """`body(i, lanes)` for all of range(first, stop): `count` at once, then one by one."""
    start = first if isinstance(first, Value) else f.integer(first)
    whole = start + (stop - start) // count * count
    with f.loop(start, whole, count) as i:
        body(i, count)
    with f.loop(whole, stop) as i:
        body(i, 1)
