"""Products with few activations: a row's codes are decoded in registers and multiplied at once.

Every group is summed on its own and scaled in fp32 (or in integers, where they are), so that the
product is that of the reference: numbers of the activation's dtype, scales and sums in fp32.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from anybit.kernels.native import build, ir
from anybit.kernels.native.ir import F32, I32, PTR, Arguments, Function, Value, vec
from anybit.kernels.native.operand import BLOCK, Operand
from anybit.kernels.native.steps import Coded

NAMES = (
    "next", "w", "table", "scale", "offset", "row", "bias", "x", "xsum", "xscale", "y",
    "n", "blocks", "m", "chunk", "shift",
)  # fmt: skip
CHAIN = 16  # products that wait for each other; those of the next chain do not
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
        wide: whether scales and offsets are fp32, not fp16.
        tail: codes of the last block, if it is a short one.
    """

    codes: Coded
    operand: Operand
    group: int
    form: str
    m: int
    dtype: str
    quantized: bool
    wide: bool = False
    tail: int = 0


@cache
def kernel(spec: Few) -> build.Kernel:
    """The compiled kernel; its arguments are `NAMES`."""
    f = _Rows(spec).function
    return build.load(ir.module([f]), [f.name], spec.operand.isa)[0]


class _Rows:
    """The function under construction."""

    def __init__(self, spec: Few):
        self.spec = spec
        self.function = f = Function("few", [PTR])
        self.args = args = Arguments(f, NAMES)
        operand, step = spec.operand, spec.codes.block_bytes()
        blocks, n = args.number("blocks"), args.number("n")
        self.table: Any = spec.codes.table(f, operand, args.pointer("table"))
        self.per_block = BLOCK // spec.group if spec.group else 0
        self.groups = blocks * self.per_block
        if spec.group:
            self.groups = self.groups + -(-spec.tail // spec.group)
        self.scales = f.allocate(F32, MOST_GROUPS + 16) if spec.group else None
        x_step = operand.units * operand.vectors * operand.isa.bits // 8 * spec.m
        zero = f.zero(operand.totals)
        with (
            f.chunks(args.address("next"), args.number("chunk"), n) as (first, last),
            f.loop(first, last) as r,
        ):
            tails = self._read_scales(r)
            w = f.at(args.pointer("w"), spec.codes.row(f, self.table, r, blocks, spec.tail))
            totals = [f.variable(zero) for _ in range(spec.m)]
            with f.loop(0, blocks) as b:
                codes, x = f.at(w, b * step), f.at(args.pointer("x"), b * x_step)
                self._block(codes, x, b, totals)
            if spec.tail:
                codes, x = f.at(w, blocks * step), f.at(args.pointer("x"), blocks * x_step)
                self._block(codes, x, blocks, totals, spec.tail)
            for i, total in enumerate(totals):
                with f.when(f.compare("slt", f.integer(i), args.number("m"))):
                    self._store(r, i, f.sum(total.get()), tails[i] if tails else None)
        f.give()

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
            numbers = spec.codes.unit(f, operand, codes, unit, self.table, count)
            for j, weight in enumerate(numbers):
                for i in range(m):
                    number = f.load(operand.vector, x, (at * m + i) * size)
                    sums[i] = operand.dot(f, zero if small else sums[i], weight, number)
                at += 1
                if small:
                    many = operand.codes // spec.group
                    some = self._scale(vec(many, F32), first + unit * many)
                    lanes = [column // spec.group for column in operand.columns(j)]
                    self._add(sums, f.shuffle(some, some, lanes), totals)
            if ((unit + 1) % units == 0 or unit == last) and not small:
                factor = None
                if spec.group:
                    one = self._scale(F32, first + unit // units)
                    factor = f.splat(one, operand.isa.floats)
                self._add(sums, factor, totals)

    def _scale(self, kind: str, group: Value) -> Value:
        """Scales of groups, as numbers of what is summed."""
        assert self.scales is not None
        scale = self.function.load(kind, self.scales, group << 2, align=4)
        whole = I32 if kind == F32 else vec(ir.lanes(kind), I32)
        return self.function.cast("fptosi", scale, whole) if self.spec.operand.whole else scale

    def _add(self, sums: list[Value], factor: Value | None, totals: list[ir.Variable]) -> None:
        """Add sums, scaled, to the totals."""
        for total, part in zip(totals, sums, strict=True):
            old = total.get()
            if part.kind != total.kind:
                part = self.function.cast("sitofp", part, total.kind)
            if factor is None:
                total.set(old + part)
            elif self.spec.operand.whole:
                total.set(old + part * factor)
            else:
                total.set(self.function.fma(part, factor, old))

    def _read_scales(self, r: Value) -> list[Value]:
        """Put a row's scales on the stack; the sums of its offsets for each activation."""
        if self.scales is None:
            return []
        f, spec, args = self.function, self.spec, self.args
        kind, lanes = spec.operand.totals, spec.operand.isa.floats
        tails = [f.variable(f.zero(kind)) for _ in range(spec.m)] if spec.form else []
        stride = (self.groups + 15) & -16  # of sums, as `activations.pack` lays them out
        with f.loop(0, self.groups, lanes) as g:
            scale = scales_at(f, args.pointer("scale"), r * self.groups + g, lanes, spec.wide)
            f.store(scale, self.scales, g << 2)
            if spec.form:
                at = r * self.groups + g
                offset = scales_at(f, args.pointer("offset"), at, lanes, spec.wide)
                if spec.form == "scaled":
                    offset = offset * scale
                if spec.operand.whole:
                    offset = f.cast("fptosi", offset, kind)
                for i, tail in enumerate(tails):
                    x = f.load(spec.operand.sums, args.pointer("xsum"), (stride * i + g) << 2)
                    old = tail.get()
                    x = x if x.kind == kind else f.cast("sitofp", x, kind)
                    tail.set(old + offset * x if spec.operand.whole else f.fma(offset, x, old))
        return [f.sum(tail.get()) for tail in tails]

    def _store(self, r: Value, i: int, total: Value, tail: Value | None) -> None:
        """Scale the sum of row r and activation i and store it."""
        f, args, operand = self.function, self.args, self.spec.operand
        if tail is not None:
            total = total + tail
        if operand.whole:
            if not self.spec.group:
                shift = f.cast("trunc", args.number("shift"), I32)
                total = total + shift * f.load(I32, args.pointer("xsum"), 4 * i)
            total = f.cast("sitofp", total, F32)
        if self.spec.quantized:
            total = total * f.load(F32, args.pointer("xscale"), 4 * i)
        row, bias = (f.load(F32, args.pointer(name), r << 2) for name in ("row", "bias"))
        place = (args.number("n") * i + r) * (4 if self.spec.dtype == F32 else 2)
        y = ir.rounded(f, f.fma(total, row, bias), self.spec.dtype)
        f.store(y, args.pointer("y"), place)


def scales_at(f: Function, memory: Value, group: Value, count: int, wide: bool) -> Value:
    """The fp32 of `count` scales from a group on, which lie in memory in fp16, or fp32 if wide."""
    if wide:
        return f.load(vec(count, F32), memory, group << 2, align=4)
    half = f.load(vec(count, "half"), memory, group << 1)
    return f.cast("fpext", half, vec(count, F32))
