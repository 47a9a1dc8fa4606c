"""The best path through a bitshift trellis, for formats whose values depend on the codes before.

State s' = (s << B | c) mod 2**L follows state s by code c of B bits, and stands for V numbers of a
table. Per step and state: the squared distance to what is to be coded, plus the least cost of a
state before. The states that lead to the same ones differ in their top B bits, so what is kept of a
step is the minimum over these, 2**(L - B) costs, and which top bits it had. Neighbouring states are
the lanes of a vector. The top bits replace the lowest bits of a cost, so that one minimum of
numbers finds both.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.kernels.native import build
from anybit.kernels.native.fused import level, threads
from anybit.kernels.native.ir import F32, I8, I32, I64, Function, Value, vec
from anybit.kernels.native.isa import Isa

NAMES = ("next", "slot", "x", "table", "scratch", "out", "count")
TOGETHER = 4  # vectors of states whose minima do not wait for each other
UNROLLED = 8  # top bits in one turn of a loop
FAR = 1e30  # the cost of a state that no path may begin with
FAR_BITS = 0x7F000000  # of a number above all costs


@dataclass(frozen=True)
class Trellis:
    """What the kernel is compiled for.

    state: L, bits of a state. bits: B, of a code; at most half of L. width: V. steps: of a path.
    lead: steps around the path's ends that the first of two passes looks at.
    """

    isa: Isa
    state: int
    bits: int
    width: int
    steps: int
    lead: int

    @property
    def ends(self) -> int:
        """Q, states after the minimum."""
        return 1 << (self.state - self.bits)


def paths(x: Tensor, table: Tensor, fmt: Format, lead: int) -> Tensor:
    """`anybit.kernels.viterbi.paths`."""
    n, steps, width = x.shape
    spec = Trellis(level(), (len(table) - 1).bit_length(), fmt.bits, width, steps, lead)
    x, numbers = x.contiguous(), table.T.contiguous()
    out = torch.empty(n, steps, dtype=torch.int32)
    count = min(n, threads(n * steps * len(table)))
    scratch = torch.empty(count, spec.ends * (8 + steps), dtype=torch.uint8)
    places = x.data_ptr(), numbers.data_ptr(), scratch.data_ptr(), out.data_ptr()
    kernel(spec)((0, 0, *places, n), count)
    return out


@cache
def kernel(spec: Trellis) -> build.Kernel:
    f = _Paths(spec).function
    return build.kernel(f)


class _Paths:
    """The function under construction."""

    def __init__(self, spec: Trellis):
        self.spec, self.lanes = spec, min(spec.isa.floats, spec.ends)
        self.function = f = Function("paths", NAMES, spec.isa)
        ends, steps = spec.ends, spec.steps
        mine = f.take(f.address("slot"), 1) * (ends * (8 + steps))
        self.costs = f.at("scratch", mine)
        self.back = f.at(self.costs, 8 * ends)
        self.table = f.pointer("table")
        with f.chunks(1, f.number("count")) as (at, _):
            self.x = f.at("x", at * (steps * spec.width * 4))
            out = f.at("out", at * (steps * 4))
            last = self._pass(steps - spec.lead, 2 * spec.lead, None)
            state = f.variable(self._back(2 * spec.lead - 1, self._best(last)))
            with f.loop(0, spec.lead - 1) as i:
                state.set(self._back(self._less(2 * spec.lead - 2, i), state.get() >> spec.bits))
            pin = state.get() >> spec.bits
            self._pass(0, steps, pin)
            end = f.variable(pin)
            with f.loop(0, steps) as i:
                t = self._less(steps - 1, i)
                found = self._back(t, end.get())
                f.store(found.cast("trunc", I32), out, t << 2)
                end.set(found >> spec.bits)

    def _less(self, number: int, i: Value) -> Value:
        return self.function.integer(number) - i

    def _back(self, t: Value | int, end: Value) -> Value:
        """The state at the best path's step t that ends with these bits."""
        f, spec = self.function, self.spec
        step = t if isinstance(t, Value) else f.integer(t)
        top = f.load(I8, self.back, step * spec.ends + end)
        return end | (top.cast("zext", I64) << (spec.state - spec.bits))

    def _pass(self, first: int, count: int, pin: Value | None) -> Value:
        """Costs after `count` steps from step `first` on, around the end; where they lie."""
        f, spec = self.function, self.spec
        start = f.constant(0 if pin is None else FAR, vec(self.lanes, F32))
        with f.loop(0, spec.ends, self.lanes) as q:
            f.store(start, self.costs, q << 2)
        if pin is not None:
            f.store(f.constant(0, F32), self.costs, pin << 2)
        one, other = f.integer(0), f.integer(4 * spec.ends)
        now, then = f.variable(one), f.variable(other)
        with f.loop(0, count) as t:
            step = (t + first) % spec.steps
            self._step(t, step, f.at(self.costs, now.get()), f.at(self.costs, then.get()))
            swap = now.get()
            now.set(then.get())
            then.set(swap)
        return f.at(self.costs, now.get())

    def _step(self, t: Value, step: Value, costs: Value, new: Value) -> None:
        """One step: the costs of states that end with the same bits, and their top bits."""
        f, spec, n = self.function, self.spec, self.lanes
        x = [f.load(F32, self.x, (step * spec.width + i) << 2).splat(n) for i in range(spec.width)]
        base = f.load(F32, costs)  # taken off, so that costs stay small
        far = base > FAR / 2
        base = far.select(f.constant(0, F32), base).splat(n)
        together = min(TOGETHER, spec.ends // n)
        tops = 1 << spec.bits
        unrolled = min(tops, UNROLLED)
        kind = vec(n, F32)
        most = f.constant(FAR_BITS, vec(n, I32)).bits(kind)
        with f.loop(0, spec.ends, n * together) as q:
            best = [f.variable(most) for _ in range(together)]
            with f.loop(0, tops, unrolled) as first:
                for more in range(unrolled):
                    top = first + more
                    mark = top.cast("trunc", I32).splat(n)
                    for i in range(together):
                        at = q + i * n
                        cost = self._before(costs, at, top)
                        state = (top << (spec.state - spec.bits)) | at
                        for v in range(spec.width):
                            number = f.load(kind, self.table, (state + (v << spec.state)) << 2)
                            d = number - x[v]
                            cost = d.fma(d, cost)
                        marked = (cost.bits(mark.kind) & -tops) | mark
                        found, least = marked.bits(kind), best[i].get()
                        smaller = found < least
                        best[i].set(smaller.select(found, least))
            for i in range(together):
                at, least = q + i * n, best[i].get()
                f.store(least - base, new, at << 2)
                top = least.bits(vec(n, I32)) & (tops - 1)
                f.store(top.cast("trunc", vec(n, I8)), self.back, t * spec.ends + at)

    def _before(self, costs: Value, at: Value, top: Value) -> Value:
        """Costs of the states before `lanes` states from `at` on: 2**B neighbours have one."""
        f, spec, n = self.function, self.spec, self.lanes
        shared = min(1 << spec.bits, n)
        place = ((at >> spec.bits) | (top << (spec.state - 2 * spec.bits))) << 2
        if shared == n:
            return f.load(F32, costs, place).splat(n)
        few = f.load(vec(n // shared, F32), costs, place)
        return few.pick([i // shared for i in range(n)])

    def _best(self, costs: Value) -> Value:
        """Which of the costs is least."""
        f, spec = self.function, self.spec
        least, at = f.variable(f.constant(3e38, F32)), f.variable(f.integer(0))
        with f.loop(0, spec.ends) as q:
            cost = f.load(F32, costs, q << 2)
            with f.when(cost < least.get()):
                least.set(cost)
                at.set(q)
        return at.get()
