"""Products with few activations: a row's codes are decoded in registers and multiplied at once.

Every group is summed on its own and scaled in fp32 (or in integers, where they are), so that the
product is that of the reference: numbers of the activation's dtype, scales and sums in fp32.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from anybit.kernels.native import build, ir
from anybit.kernels.native.decode import Codes
from anybit.kernels.native.floats import every, several
from anybit.kernels.native.ir import F32, I8, I32, Function, Value, vec
from anybit.kernels.native.operand import BAND, BLOCK, RUN, Operand
from anybit.kernels.native.steps import Coded

NAMES = (
    "next",
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
    "m",
    "chunk",
    "shift",
)
CHAINS = 4  # sums of a band that do not wait for each other
AHEAD = 2048  # bytes between small groups and what is asked of memory; others gain nothing by it
CHAIN = 16  # products that wait for each other; those of the next chain do not
Sums = list[list[list[list[ir.Variable]]]]
MOST_GROUPS = 1 << 14  # of a row: their scales lie on the stack in fp32


@dataclass(frozen=True)
class Few:
    """What a kernel is compiled for.

    Attributes:
        codes: how they are decoded.
        operand: what is multiplied.
        group: columns that share a scale, at most a block; 0: there are row scales only.
        form: "" without offsets, "scaled": scale * (T + offset), "plain": scale * T + offset.
        m: activations that are multiplied at once.
        dtype: LLVM's name of what y (M, N) is stored in.
        quantized: whether activations have scales.
        wide: 0 where scales and offsets are fp16, 1 where they are fp32; of bands also how many
            are products of whole numbers and the same fp16.
        tail: codes of the last block, if it is a short one.
    """

    codes: Coded
    operand: Operand
    group: int
    form: str
    m: int
    dtype: str
    quantized: bool
    wide: int = 0
    tail: int = 0


@cache
def kernel(spec: Few) -> build.Kernel:
    """The compiled kernel; its arguments are `NAMES`."""
    f = (_Bands if spec.operand.banded else _Rows)(spec).function
    return build.kernel(f)


class _Rows:
    """The function under construction."""

    def __init__(self, spec: Few):
        self.spec = spec
        self.function = f = Function("few", NAMES, spec.operand.isa)
        operand, step = spec.operand, spec.codes.block_bytes()
        blocks, n = f.number("blocks"), f.number("n")
        self.table: Any = spec.codes.table(operand, f.pointer("table"))
        self.per_block = BLOCK // spec.group if spec.group else 0
        self.groups = blocks * self.per_block
        if spec.group:
            self.groups = self.groups + -(-spec.tail // spec.group)
        self.scales = f.allocate(F32, MOST_GROUPS + 16) if spec.group else None
        x_step = operand.units * operand.vectors * operand.isa.bits // 8 * spec.m
        zero = f.zero(operand.totals)
        with (
            f.chunks(f.number("chunk"), n) as (first, last),
            f.loop(first, last) as r,
        ):
            tails = self._read_scales(r)
            w = f.at("w", spec.codes.row(self.table, r, blocks, spec.tail))
            totals = [f.variable(zero) for _ in range(spec.m)]
            with f.loop(0, blocks) as b:
                codes, x = f.at(w, b * step), f.at("x", b * x_step)
                self._block(codes, x, b, totals)
            if spec.tail:
                codes, x = f.at(w, blocks * step), f.at("x", blocks * x_step)
                self._block(codes, x, blocks, totals, spec.tail)
            for i, total in enumerate(totals):
                with f.when(f.integer(i) < f.number("m")):
                    self._store(r, i, total.get().sum(), tails[i] if tails else None)

    def _block(
        self, codes: Value, x: Value, b: Value, totals: list[ir.Variable], count: int = BLOCK
    ) -> None:
        """Add the products of a block of `count` codes to the totals of each activation."""
        f, spec, operand = self.function, self.spec, self.spec.operand
        m, size, zero = spec.m, operand.isa.bits // 8, f.zero(operand.sums)
        small = 0 < spec.group < operand.codes  # groups whose scales lie in one vector
        chain = CHAIN // 2 if operand.isa.arm else CHAIN  # shorter vectors: as many products sooner
        units = spec.group // operand.codes or min(operand.units, chain // operand.vectors)
        first = b * self.per_block
        at, last = 0, count // operand.codes - 1
        for unit in range(last + 1):
            if unit % units == 0:
                sums = [zero] * m
            numbers = spec.codes.unit(codes, unit, self.table, count)
            for j, weight in enumerate(numbers):
                for i in range(m):
                    number = f.load(operand.vector, x, (at * m + i) * size)
                    sums[i] = operand.dot(zero if small else sums[i], weight, number)
                at += 1
                if small:
                    many = operand.codes // spec.group
                    some = self._scale(vec(many, F32), first + unit * many)
                    lanes = [column // spec.group for column in operand.columns(j)]
                    self._add(sums, some.pick(lanes), totals)
            if ((unit + 1) % units == 0 or unit == last) and not small:
                factor = None
                if spec.group:
                    one = self._scale(F32, first + unit // units)
                    factor = one.splat(operand.isa.floats)
                self._add(sums, factor, totals)

    def _scale(self, kind: str, group: Value) -> Value:
        """Scales of groups, as numbers of what is summed."""
        assert self.scales is not None
        scale = self.function.load(kind, self.scales, group << 2, align=4)
        whole = I32 if kind == F32 else vec(ir.lanes(kind), I32)
        return scale.cast("fptosi", whole) if self.spec.operand.whole else scale

    def _add(self, sums: list[Value], factor: Value | None, totals: list[ir.Variable]) -> None:
        """Add sums, scaled, to the totals."""
        for total, part in zip(totals, sums, strict=True):
            old = total.get()
            part = part.cast("sitofp", total.kind)
            if factor is None:
                total.set(old + part)
            elif self.spec.operand.whole:
                total.set(old + part * factor)
            else:
                total.set(part.fma(factor, old))

    def _read_scales(self, r: Value) -> list[Value]:
        """Put a row's scales on the stack; the sums of its offsets for each activation."""
        if self.scales is None:
            return []
        f, spec = self.function, self.spec
        kind, lanes = spec.operand.totals, spec.operand.isa.floats
        tails = [f.variable(f.zero(kind)) for _ in range(spec.m)] if spec.form else []
        stride = (self.groups + 15) & -16  # of sums, as `activations.pack` lays them out
        with f.loop(0, self.groups, lanes) as g:
            scale = scales_at(f.pointer("scale"), r * self.groups + g, lanes, spec.wide)
            f.store(scale, self.scales, g << 2)
            if spec.form:
                at = r * self.groups + g
                offset = scales_at(f.pointer("offset"), at, lanes, spec.wide)
                if spec.form == "scaled":
                    offset = offset * scale
                if spec.operand.whole:
                    offset = offset.cast("fptosi", kind)
                for i, tail in enumerate(tails):
                    x = f.load(spec.operand.sums, "xsum", (stride * i + g) << 2)
                    old, x = tail.get(), x.cast("sitofp", kind)
                    tail.set(old + offset * x if spec.operand.whole else offset.fma(x, old))
        return [tail.get().sum() for tail in tails]

    def _store(self, r: Value, i: int, total: Value, tail: Value | None) -> None:
        """Scale the sum of row r and activation i and store it."""
        spec = self.spec
        total = total if tail is None else total + tail
        shifted = spec.operand.whole and not spec.group
        store(total, r, i, spec.dtype, spec.quantized, shifted)


class _Bands:
    """The function under construction where the lanes of a vector are rows."""

    def __init__(self, spec: Few):
        self.spec = spec
        self.function = f = Function("few", NAMES, spec.operand.isa)
        self.operand = operand = spec.operand
        self.blocks = blocks = f.number("blocks")
        self.span = operand.span(spec.group)
        self.table: Any = spec.codes.table(operand, f.pointer("table"))
        last_token = f.number("m") - 1
        self.tokens = [f.integer(i).smaller(last_token) for i in range(spec.m)]
        x, size = f.pointer("x"), operand.token_bytes
        self.x = [f.at(x, token * blocks * (RUN * size)) for token in self.tokens]
        self.scratch = f.allocate(ir.scalar(operand.totals), BAND)
        step, zero = spec.codes.block_bytes(), f.zero(operand.totals)
        bands = (f.number("n") + (BAND - 1)) // BAND
        with (
            f.chunks(f.number("chunk"), bands) as (first, last),
            f.loop(first, last) as r,
        ):
            w = f.at("w", r * blocks * step)
            totals = [[f.variable(zero) for _ in range(operand.parts)] for _ in range(spec.m)]
            if 0 < self.span <= RUN:
                with f.loop(0, blocks) as b:
                    for line in range(0, step, 64):
                        f.prefetch(w, b * step + (AHEAD + line))
                    for first_column in range(0, RUN, self.span):
                        sums = self._fresh(1)
                        self._multiply(f.at(w, b * step), b, sums, first_column, self.span)
                        span = b * (RUN // self.span) + first_column // self.span
                        self._add(r, span, sums, totals)
            else:
                per = self.span // RUN or blocks
                with f.loop(0, (blocks + per - 1) // per if self.span else 1) as span:
                    # Products of one sum wait for each other, those of several do not.
                    sums = self._fresh(max(1, CHAINS // (operand.parts * spec.m)))
                    with f.loop(span * per, ((span + 1) * per).smaller(blocks)) as b:
                        self._multiply(f.at(w, b * step), b, sums, 0, RUN)
                    self._add(r, span, sums, totals)
            self._store(r, totals)

    def _fresh(self, chains: int) -> Sums:
        """Sums of nothing: by token, part of the band, half of the tokens' numbers, and chain."""
        f, halves = self.function, 2 if self.operand.kind == "split" else 1
        zero = f.zero(self.operand.sums)
        return [
            [
                [[f.variable(zero) for _ in range(chains)] for _ in range(halves)]
                for _ in range(self.operand.parts)
            ]
            for _ in range(self.spec.m)
        ]

    def _multiply(self, codes: Value, b: Value, sums: Sums, first: int, count: int) -> None:
        """Add the products of `count` columns of block b."""
        f, spec, operand = self.function, self.spec, self.operand
        columns, size = operand.columns_of_unit, operand.token_bytes
        x = [f.at(token, b * (RUN * size)) for token in self.x]
        for unit in range(first // columns, (first + count) // columns):
            for j, weight in enumerate(spec.codes.unit(codes, unit, self.table)):
                part, at = operand.place(unit, j)
                for i, token in enumerate(x):
                    for half, chains in enumerate(sums[i][part]):
                        total = chains[unit % len(chains)]
                        number = operand.everywhere(token, 4 * at + RUN * half)
                        total.set(operand.dot(total.get(), weight, number))

    def _add(self, r: Value, span: Value, sums: Sums, totals: list[list[ir.Variable]]) -> None:
        """Add the sums of a span, scaled, to the totals."""
        f, spec, operand = self.function, self.spec, self.operand
        count, kind = operand.isa.floats, operand.totals
        columns, first = self.blocks * RUN, 0
        if operand.kind == "split" and isinstance(spec.codes, Codes):
            first = spec.codes.first or 0
        factors = self._factors(r, span, columns)
        for i, token in enumerate(self.tokens):
            if spec.form or first:  # the sum of the token's numbers
                spans = (columns + (self.span - 1)) // self.span
                at = ((spans + 15) & -16) * token + span
                x = f.load(ir.scalar(operand.sums), "xsum", at << 2)
            for part, total in enumerate(totals[i]):
                value, *lower = (_added(chains) for chains in sums[i][part])
                if lower:
                    value = (value << 8) + lower[0]
                    value = value + (x * first).splat(count) if first else value
                value, old = value.cast("sitofp", kind), total.get()
                if not spec.group:
                    total.set(old + value)
                    continue
                scale, *shift = factors[part]
                if shift:
                    all_x = x.splat(count).cast("sitofp", kind)
                    old = old + shift[0] * all_x if operand.whole else shift[0].fma(all_x, old)
                total.set(old + value * scale if operand.whole else value.fma(scale, old))

    def _factors(self, r: Value, span: Value, columns: Value) -> list[list[Value]]:
        """Scales, and offsets if there are any, of each part of a band's rows."""
        spec, operand = self.spec, self.operand
        if not spec.group:
            return []
        groups = (columns + (spec.group - 1)) // spec.group
        group = r * groups + span // (spec.group // self.span)
        out = []
        for part in range(operand.parts):
            some = factors_at(group, part, operand, spec.form, spec.wide)
            out.append([a.cast("fptosi", operand.totals) if operand.whole else a for a in some])
        return out

    def _store(self, r: Value, totals: list[list[ir.Variable]]) -> None:
        """Scale the sums of a band and store them, those of rows that there are."""
        f, spec, n = self.function, self.spec, self.function.number("n")
        row, last = r * BAND, (r * BAND + BAND).smaller(n)
        whole = row + BAND <= n
        part_of_band = row + BAND > n
        shifted = self.operand.whole and not spec.group
        how = spec.dtype, spec.quantized, shifted
        for i, parts in enumerate(totals):
            with f.when(f.integer(i) < f.number("m")):
                for part, total in enumerate(parts):
                    count = self.operand.isa.floats
                    f.store(total.get(), self.scratch, part * count * 4)
                    with f.when(whole):
                        store(total.get(), row + part * count, i, *how)
                with f.when(part_of_band), f.loop(row, last) as single:
                    kind = ir.scalar(self.operand.totals)
                    value = f.load(kind, self.scratch, (single - row) << 2)
                    store(value, single, i, *how)


def _added(chains: list[ir.Variable]) -> Value:
    total, *rest = (chain.get() for chain in chains)
    for part in rest:
        total = total + part
    return total


def factors_at(group: Value, part: int, operand: Operand, form: str, wide: int) -> list[Value]:
    """Scales of a part of a band's rows, and offsets if there are any; group: of all bands'."""
    f, count = group.function, operand.isa.floats
    out = []
    for name in ("scale", "offset") if form else ("scale",):
        memory = f.pointer(name)
        if wide > 1:
            d = f.at(memory, group // wide * ((2 + wide) * BAND))
            step = f.load(vec(count, I8), d, (group % wide + 2) * BAND + part * count)
            step = step.cast("sitofp", vec(count, F32))
            out.append(step * scales_at(d, f.integer(part * count), count, 0))
        else:
            out.append(scales_at(memory, group * BAND + part * count, count, wide))
    if form == "scaled":
        out[1] = out[0] * out[1]
    return out


def store(
    total: Value,
    row: Value,
    token: Value | int,
    dtype: str,
    quantized: bool,
    shifted: bool,
) -> None:
    """Scale sums of a token and of rows from `row` on, add the bias, and put them into y.

    Args:
        total: fp32 or int32, a number or a vector of them, of a function with the names xsum,
            xscale, row, bias, y, n and shift.
        row: the first one.
        token: which.
        dtype: LLVM's name of what y (M, N) is stored in.
        quantized: whether tokens have scales.
        shifted: whether codes are `shift` more than the numbers that were multiplied.
    """
    f, count = total.function, ir.lanes(total.kind)
    single, at = several(F32, count), row.like(token)
    if shifted:
        shift = f.number("shift").cast("trunc", I32)
        total = total + every(shift * f.load(I32, "xsum", at << 2), count)
    total = total.cast("sitofp", single)
    if quantized:
        total = total * every(f.load(F32, "xscale", at << 2), count)
    factor, bias = (f.load(single, name, row << 2) for name in ("row", "bias"))
    place = (f.number("n") * at + row) * (4 if dtype == F32 else 2)
    f.store(ir.rounded(total.fma(factor, bias), dtype), "y", place)


def scales_at(memory: Value, group: Value, count: int, wide: int) -> Value:
    """The fp32 of `count` scales from a group on, which lie in memory in fp16, or fp32 if wide."""
    f = memory.function
    if wide:
        return f.load(vec(count, F32), memory, group << 2, align=4)
    half = f.load(vec(count, "half"), memory, group << 1)
    return half.cast("fpext", vec(count, F32))
