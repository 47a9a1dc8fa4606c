"""The best closed path through a trellis, for many sequences at once; see `native/viterbi.py`.

A program takes one sequence after another. Costs and which top bits were best lie in memory that
the program alone uses and that stays in the caches. Values of states are computed by the format's
own `triton_decode`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.core.format import Format
from anybit.kernels.triton import lang
from anybit.kernels.triton.layout import Layout

FAR = tl.constexpr(1e30)
PROGRAMS = 2  # for each multiprocessor
MOST_BACK = 1 << 30  # bytes of top bits in memory at a time
BLOCK = 1024  # states that a program minimizes at once
WARPS = 4


@triton.jit(do_not_specialize=["COUNT"])
def _paths(
    x, costs, back, out, COUNT,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, STATE: tl.constexpr, STEPS: tl.constexpr,
    LEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x (COUNT, STEPS, V) fp32 -> states (COUNT, STEPS) int32."""
    BITS: tl.constexpr = LAYOUT.fmt.bits
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    ENDS: tl.constexpr = 1 << (STATE - BITS)
    mine = tl.program_id(0)
    costs += mine * (2 * ENDS)
    back += mine.to(tl.int64) * (STEPS * ENDS)
    for sequence in range(mine, COUNT, tl.num_programs(0)):
        own = x + tl.cast(sequence, tl.int64) * (STEPS * WIDTH)
        end = _pass(own, costs, back, 0, STEPS - LEAD, 2 * LEAD, False, LAYOUT, DECODE, STATE,
                    STEPS, BLOCK)  # fmt: skip
        for i in range(LEAD):
            end = _before(back, end, 2 * LEAD - 1 - i, STATE, BITS) >> BITS
        tl.debug_barrier()
        _pass(own, costs, back, end, 0, STEPS, True, LAYOUT, DECODE, STATE, STEPS, BLOCK)
        for i in range(STEPS):
            t = STEPS - 1 - i
            state = _before(back, end, t, STATE, BITS)
            tl.store(out + tl.cast(sequence, tl.int64) * STEPS + t, state)
            end = state >> BITS
        tl.debug_barrier()


@triton.jit
def _before(back, end, t, STATE: tl.constexpr, BITS: tl.constexpr):
    """The state at the best path's step t that ends with these bits."""
    top = tl.load(back + t * (1 << (STATE - BITS)) + end).to(tl.int32)
    return end | top << (STATE - BITS)


@triton.jit
def _pass(
    x, costs, back, pin, first, count, PINNED: tl.constexpr,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, STATE: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Costs and top bits of `count` steps from step `first` on; the state of least cost."""
    BITS: tl.constexpr = LAYOUT.fmt.bits
    ENDS: tl.constexpr = 1 << (STATE - BITS)
    lane = tl.arange(0, BLOCK)
    for q in range(0, ENDS, BLOCK):
        start = tl.where(lane + q == pin, 0.0, FAR) if PINNED else tl.zeros((BLOCK,), tl.float32)
        tl.store(costs + q + lane, start)
    tl.debug_barrier()
    for t in range(count):
        now, new = costs + t % 2 * ENDS, costs + (t + 1) % 2 * ENDS
        base = tl.load(now)  # taken off, so that costs stay small
        base = tl.where(base > FAR / 2, 0.0, base)
        for q in range(0, ENDS, BLOCK):
            _step(x, now, new, back + t * ENDS, (t + first) % STEPS, base, q + lane,
                  LAYOUT, DECODE, STATE)  # fmt: skip
        tl.debug_barrier()
    last = costs + count % 2 * ENDS
    least = tl.load(last)
    best = least.to(tl.int32) * 0
    for q in range(0, ENDS, BLOCK):
        part = tl.load(last + q + lane)
        lowest = tl.min(part, 0)
        best = tl.where(lowest < least, q + tl.argmin(part, 0), best)
        least = tl.minimum(lowest, least)
    return best


@triton.jit
def _step(
    x, now, new, back, step, base, end,
    LAYOUT: tl.constexpr, DECODE: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The costs of states that end with these bits, and their top bits, which are stored."""
    BITS: tl.constexpr = LAYOUT.fmt.bits
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    FORMAT: tl.constexpr = LAYOUT.fmt
    BLOCK: tl.constexpr = end.shape[0]
    best = tl.full((BLOCK,), 3e38, tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    for top in range(1 << BITS):
        state = end | top << (STATE - BITS)
        cost = tl.load(now + (state >> BITS)) - base
        window = tl.reshape(state, (1, BLOCK)).to(tl.uint32, bitcast=True)
        values = DECODE(FORMAT, ((window,), 0, LAYOUT, tl.float32, ())).to(tl.float32)
        if WIDTH == 1:
            d = tl.reshape(values, (BLOCK,)) - tl.load(x + step)
            cost += d * d
        else:
            first, second = tl.split(tl.reshape(values, (BLOCK, 2)))
            d, e = first - tl.load(x + step * 2), second - tl.load(x + step * 2 + 1)
            cost += d * d + e * e
        which = tl.where(cost < best, top, which)
        best = tl.minimum(cost, best)
    tl.store(new + end, best)
    tl.store(back + end, which.to(tl.uint8))


def paths(x: Tensor, fmt: Format, lead: int, state: int | None = None) -> Tensor:
    """States (n, steps) int32 of closed sequences near x (n, steps, V) fp32.

    Args:
        x: What is to be coded.
        fmt: A format of sequences whose steps have 1 or 2 weights.
        lead: Steps at either end of a sequence that the first pass takes.
        state: Bits of a state, where they are fewer than the format's.
    """
    n, steps, _ = x.shape
    state = fmt.window if state is None else state
    ends = 1 << (state - fmt.bits)
    programs = min(n, max(1, MOST_BACK // (steps * ends)))
    if x.is_cuda:
        facts = torch.cuda.get_device_properties(x.device)
        programs = min(programs, PROGRAMS * facts.multi_processor_count)
    out = torch.empty(n, steps, dtype=torch.int32, device=x.device)
    _paths[(programs,)](
        x.contiguous(), x.new_empty(programs, 2, ends),
        torch.empty(programs, steps, ends, dtype=torch.uint8, device=x.device), out, n,
        LAYOUT=Layout(fmt), DECODE=lang.jit(type(fmt).triton_decode), STATE=state, STEPS=steps,
        LEAD=lead, BLOCK=min(BLOCK, ends), num_warps=WARPS,
    )  # fmt: skip
    return out
