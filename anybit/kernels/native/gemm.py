"""Products with many activations: strips of rows are decoded to tiles, which stay in the cache.

Both factors run along K in vectors, so that neither is transposed: `rows` rows times `TOKENS`
activations are as many vectors of partial sums, which are added up at the end of a part of K.
Bands need no adding up: the vectors of a strip's bands times `BAND_TOKENS` activations are sums.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from anybit.kernels.native import build, ir
from anybit.kernels.native.floats import several
from anybit.kernels.native.gemv import factors_at, scales_at, store
from anybit.kernels.native.ir import BF16, I16, I32, I64, PTR, Function, Value, vec
from anybit.kernels.native.isa import Isa
from anybit.kernels.native.operand import BAND, BLOCK, RUN, Operand
from anybit.kernels.native.steps import Coded

NAMES = (
    "next",
    "slot",
    "w",
    "table",
    "scale",
    "offset",
    "row",
    "bias",
    "x",
    "xsum",
    "xscale",
    "y",
    "n",
    "blocks",
    "vectors",
    "m",
    "strip",
    "part",
    "decode",
    "scratch",
    "room",
    "shift",
)
TOKENS = 4
STRIP = 48  # rows of a tile; it and an equal share of x fill half of a cache of 1 MB
PART = 16  # blocks of bytes in a row of a tile, 8 KB
BAND_TOKENS = 6
BAND_PART = 6144  # bytes of a row of a tile of bands


def rows(isa: Isa) -> int:
    """Rows that are multiplied at once: as many as there are registers for."""
    return 6 if isa.registers == 32 else 3


@dataclass(frozen=True)
class Tile:
    """What a tile's decoding is compiled for; see `gemv.Few`.

    The product counts a short last block as any other; `vectors` says where a row ends.
    """

    codes: Coded
    operand: Operand
    group: int
    form: str
    wide: int = 0
    tail: int = 0


@cache
def decoder(spec: Tile) -> build.Kernel:
    """What decodes a part of a row or of a band; `product` calls it."""
    f = (_decode_band if spec.operand.banded else _decode)(spec)
    return build.kernel(f)


@cache
def product(operand: Operand, dtype: str, quantized: bool, bands: int = 0) -> build.Kernel:
    """The compiled product, of any format; its arguments are `NAMES`.

    dtype: LLVM's name of what y (M, N) is stored in. quantized: whether activations have scales.
    bands: of a strip, where there are any.
    """
    kind = _Bands if bands else _Product
    f = kind(operand, dtype, quantized, bands).function
    return build.kernel(f)


def bands(isa: Isa, n: int, threads: int) -> int:
    """Bands of a strip: as many as there are registers for, and fewer if threads had no work."""
    most = 4 if isa.registers == 32 else 1
    return most if threads == 1 or n >= 3 * threads * most * BAND else max(1, most // 2)


def room(operand: Operand, strip: int, part: int, m: int) -> int:
    """Bytes that a thread works in: a tile, and the sums of a strip."""
    columns = part * (RUN if operand.banded else BLOCK)
    return strip * (columns * operand.itemsize + -(-m // TOKENS) * TOKENS * 4)


def _decode(spec: Tile) -> Function:
    """(arguments, row, first block, last block, where to, bytes between vectors there)."""
    operand, step = spec.operand, spec.codes.block_bytes()
    f = Function("decode", NAMES, operand.isa, [PTR, I64, I64, I64, PTR, I64])
    _, row, first, last, out, stride = f.arguments
    table: Any = spec.codes.table(operand, f.pointer("table"))
    whole = f.number("blocks") - (1 if spec.tail else 0)
    per = BLOCK // spec.group if spec.group else 0
    groups = whole * per + (-(-spec.tail // spec.group) if spec.group else 0)
    w = f.at("w", spec.codes.row(table, row, whole, spec.tail))
    vectors = operand.units * operand.vectors

    def block(b: Value, count: int) -> None:
        codes, to = f.at(w, b * step), f.at(out, (b - first) * vectors * stride)
        for i in range(0, step, 64):
            f.prefetch(codes, 1024 + i)
        _block(spec, table, count, codes, row * groups + b * per, to, stride)

    with f.loop(first, last.smaller(whole)) as b:
        block(b, BLOCK)
    if spec.tail:
        with f.when(last > whole):
            block(whole, spec.tail)
    return f


def _block(
    spec: Tile,
    table: Any,
    count: int,
    codes: Value,
    group: Value,
    to: Value,
    stride: Value,
) -> None:
    """Decode a block of `count` codes, whose first group is `group`."""
    f, operand = codes.function, spec.operand
    groups = BLOCK // spec.group if spec.group else 0  # of a whole block
    many = max(1, groups // operand.units)  # of a unit
    for unit in range(count // operand.codes):
        if (groups and unit * groups % operand.units == 0) or many > 1:
            g = group + unit * groups // operand.units
            scale = scales_at(f.pointer("scale"), g, many, spec.wide)
            offset = f.zero(scale.kind)
            if spec.form:
                offset = scales_at(f.pointer("offset"), g, many, spec.wide)
            if spec.form == "scaled":
                offset = offset * scale
        for j, weight in enumerate(spec.codes.unit(codes, unit, table, count)):
            if groups:
                columns = operand.columns(j) if many > 1 else [0] * operand.isa.floats
                lanes = [column // spec.group for column in columns]
                both = [a.pick(lanes) for a in (scale, offset)]
                weight = _scaled(operand, weight, *both)
            f.store(weight, to, stride * (unit * operand.vectors + j))


def _decode_band(spec: Tile) -> Function:
    """As `_decode`, of a band."""
    operand, parts, group = spec.operand, spec.operand.parts, spec.group
    f = Function("decode", NAMES, operand.isa, [PTR, I64, I64, I64, PTR, I64])
    _, band, first, last, out, stride = f.arguments
    table: Any = spec.codes.table(operand, f.pointer("table"))
    blocks, step = f.number("blocks"), spec.codes.block_bytes()
    groups = (blocks * RUN + (group - 1)) // group if group else blocks
    w = f.at("w", band * blocks * step)
    steps = operand.units * operand.vectors // parts  # of a block
    factors: list[tuple[Value, Value]] = []
    with f.loop(first, last) as b:
        codes, to = f.at(w, b * step), f.at(out, (b - first) * steps * stride)
        for i in range(0, step, 64):
            f.prefetch(codes, 1024 + i)
        for unit in range(operand.units):
            column = unit * operand.columns_of_unit
            if group and column % min(group, RUN) == 0:
                at = band * groups + (b * RUN + column) // group
                factors = []
                for part in range(parts):
                    some = factors_at(at, part, operand, spec.form, spec.wide)
                    factors.append((some[0], some[1] if spec.form else f.zero(some[0].kind)))
            for j, weight in enumerate(spec.codes.unit(codes, unit, table)):
                part, place = operand.place(unit, j)
                if group:
                    weight = _scaled(operand, weight, *factors[part])
                f.store(weight, to, stride * place + part * (operand.isa.bits // 8))
    return f


def _scaled(operand: Operand, weight: Value, factor: Value, more: Value) -> Value:
    """weight * factor + more, rounded to the operand's type; unsigned bytes are 128 more.

    factor, more: fp32 for each lane of the sums.
    """
    lanes = operand.isa.floats
    if operand.whole:
        # Numbers that come in pairs have the factor of their lane.
        whole = vec(lanes, I32)
        factor, more = (a.cast("fptosi", whole) & 0xFFFF for a in (factor, more))
        factor, more = ((a | (a << 16)).bits(vec(2 * lanes, I16)) for a in (factor, more))
        if operand.kind == "i16":
            return weight * factor + more
        if operand.kind == "u8":
            more = more + 128
        pair = weight.bits(factor.kind)
        even, odd = (pair & 255) * factor + more, (pair >> 8) * factor + more
        if operand.kind == "s8":
            even = even & 255
        return (even | (odd << 8)).bits(operand.vector)
    if operand.kind == "fp32":
        return weight.fma(factor, more)
    pair = weight.bits(vec(lanes, I32))
    both = [half.bits(factor.kind) for half in (pair << 16, pair & -65536)]
    even, odd = (a.fma(factor, more).cast("fptrunc", vec(lanes, BF16)) for a in both)
    return even.shuffle(odd, [i // 2 + i % 2 * lanes for i in range(2 * lanes)])


class _Product:
    """The function under construction."""

    def __init__(self, operand: Operand, dtype: str, quantized: bool, bands: int = 0):
        self.operand, self.dtype, self.quantized = operand, dtype, quantized
        self.bands = bands
        self.function = f = Function("product", NAMES, operand.isa)
        self.rows, self.size = rows(operand.isa), operand.isa.bits // 8
        self.vectors = operand.units * operand.vectors  # of a whole block
        self.long = f.number("vectors")  # of a row
        self.m, self.blocks, self.strip = (f.number(a) for a in ("m", "blocks", "strip"))
        part = f.number("part")
        slot = f.take(f.address("slot"), 1)  # every thread has a room of its own
        self.tile = f.at("scratch", slot * f.number("room"))
        high = self.strip // BAND if bands else self.strip
        self.sums = f.at(self.tile, high * part * (self.vectors * self.size))
        n = f.number("n")
        with f.chunks(self.strip, n) as (self.first, self.last):
            self.height = self.last - self.first
            with f.loop(0, (self.blocks + part - 1) // part) as i:
                self._part(i * part, ((i + 1) * part).smaller(self.blocks))
            with f.loop(0, self.m) as t:
                self._finish(t)

    def _part(self, start: Value, stop: Value) -> None:
        """Decode the strip's blocks from `start` to `stop` and multiply them."""
        f = self.function
        long = (stop * self.vectors).smaller(self.long) - start * self.vectors
        with f.loop(0, self.height) as j:
            place = (j // self.rows * self.rows * long + j % self.rows) * self.size
            stride = f.integer(self.rows * self.size)
            to = f.at(self.tile, place)
            f.run(f.pointer("decode"), f.arguments[0], self.first + j, start, stop, to, stride)
        self._panels(TOKENS, start, long)

    def _panels(self, most: int, start: Value, long: Value) -> None:
        """Multiply the tile by all activations, `most` at a time."""
        f, whole = self.function, self.m // most * most
        with f.loop(0, whole, most) as t:
            self._panel(t, most, start, long)
        for rest in range(1, most):
            with f.when((self.m - whole).compare("eq", rest)):
                self._panel(whole, rest, start, long)

    def _panel(self, t: Value, tokens: int, start: Value, long: Value) -> None:
        """Multiply the tile by activations t to t + tokens, which lie side by side."""
        f, operand, size = self.function, self.operand, self.size
        place = t * self.long + start * (self.vectors * tokens)
        panel = f.at("x", place * size)
        fresh = start.compare("eq", 0)
        zero = f.zero(operand.sums)
        with f.loop(0, self.height, self.rows) as j:
            block = f.at(self.tile, j * long * size)
            totals = [[f.variable(zero) for _ in range(tokens)] for _ in range(self.rows)]
            with f.loop(0, long) as k:
                w, x = f.at(block, k * (self.rows * size)), f.at(panel, k * (tokens * size))
                f.prefetch(panel, (long * (j // self.rows + tokens) + k) * size, 2)  # the next one
                numbers = [f.load(operand.vector, x, i * size) for i in range(tokens)]
                for r, row in enumerate(totals):
                    weight = f.load(operand.vector, w, r * size)
                    for total, number in zip(row, numbers, strict=True):
                        total.set(operand.dot(total.get(), weight, number))
            for r, row in enumerate(totals):
                added = _add_up([total.get() for total in row])
                to = f.at(self.sums, (t * self.strip + (j + r) * TOKENS) * 4)
                old = fresh.select(f.zero(added.kind), f.load(added.kind, to))
                f.store(old + added, to)

    def _finish(self, t: Value) -> None:
        """Scale the sums of activation t, add the bias and store them in y."""
        f, lanes = self.function, self.operand.isa.floats
        whole = self.height // lanes * lanes
        with f.loop(0, whole, lanes) as j:
            self._store(t, j, lanes)
        with f.loop(whole, self.height) as j:
            self._store(t, j, 1)

    def _store(self, t: Value, j: Value, count: int) -> None:
        how = self.dtype, self.quantized, self.operand.whole
        store(self._sum(t, j, count, ir.scalar(self.operand.sums)), self.first + j, t, *how)

    def _sum(self, t: Value, j: Value, count: int, kind: str) -> Value:
        """Sums of activation t and of `count` rows from j on."""
        f = self.function
        at = (t // TOKENS * TOKENS * self.strip + j * TOKENS + t % TOKENS) * 4
        if count > 1:
            some = f.load(vec(TOKENS * count, kind), self.sums, at)
            return some.pick(range(0, TOKENS * count, TOKENS))
        return f.load(kind, self.sums, at)


class _Bands(_Product):
    """The same of bands: a strip is as many rows as registers hold sums of."""

    def _part(self, start: Value, stop: Value) -> None:
        f, operand, size = self.function, self.operand, self.size
        parts = operand.parts
        self.width = self.bands * parts  # vectors of a step
        steps = (stop - start) * (self.vectors // parts)
        first = self.first // BAND
        with f.loop(0, (self.height + (BAND - 1)) // BAND) as j:
            to, stride = f.at(self.tile, j * (parts * size)), f.integer(self.width * size)
            f.run(f.pointer("decode"), f.arguments[0], first + j, start, stop, to, stride)
        self._panels(BAND_TOKENS, start, steps)

    def _panel(self, t: Value, tokens: int, start: Value, long: Value) -> None:
        """Multiply the tile by activations t to t + tokens, `long` times 32 bits of each."""
        f, operand = self.function, self.operand
        row = self.blocks * (RUN * operand.token_bytes)
        first = f.at("x", start * (RUN * operand.token_bytes))
        x = [f.at(first, (t + i) * row) for i in range(tokens)]
        zero = f.zero(operand.sums)
        totals = [[f.variable(zero) for _ in x] for _ in range(self.width)]
        with f.loop(0, long) as k:
            numbers = [operand.everywhere(token, k << 2) for token in x]
            for v, sums in enumerate(totals):
                at = (k * self.width + v) * self.size
                weight = f.load(operand.vector, self.tile, at)
                for total, number in zip(sums, numbers, strict=True):
                    total.set(operand.dot(total.get(), weight, number))
        fresh = start.compare("eq", 0)
        for v, sums in enumerate(totals):
            for i, total in enumerate(sums):
                to = f.at(self.sums, ((t + i) * self.strip + v * operand.isa.floats) * 4)
                old = fresh.select(zero, f.load(operand.sums, to))
                f.store(old + total.get(), to)

    def _sum(self, t: Value, j: Value, count: int, kind: str) -> Value:
        at = (t * self.strip + j) * 4
        return self.function.load(several(kind, count), self.sums, at)


def _add_up(parts: list[Value]) -> Value:
    """The sums of up to four vectors, in a vector of four."""
    count = ir.lanes(parts[0].kind)
    a, b, c, d = parts + [parts[0].function.zero(parts[0].kind)] * (TOKENS - len(parts))

    def both(p: Value, q: Value, width: int) -> Value:
        """Halves of each four lanes of p and q, added up, side by side."""
        low = [
            start + i + other * count
            for start in range(0, count, 4)
            for i, other in (
                [(0, 0), (0, 1), (1, 0), (1, 1)] if width == 1 else [(0, 0), (1, 0), (0, 1), (1, 1)]
            )
        ]
        return p.shuffle(q, low) + p.shuffle(q, [i + 2 for i in low])

    total = both(both(a, b, 1), both(c, d, 1), 2)
    while (lanes := ir.lanes(total.kind)) > TOKENS:
        half = lanes // 2
        total = total.pick(range(half)) + total.pick(range(half, lanes))
    return total
