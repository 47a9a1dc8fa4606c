"""The best closed path through a trellis, for many sequences at once; see `native/viterbi.py`.

A program takes one sequence. Costs of paths stay in registers, as a tile of

    (low bits, top bits, middle) of a state

A step adds what each state errs to the cost of the path before it, which is the same for all low
bits, and takes the least over the top bits, which the next state no longer has. What is left, read
as (top bits, middle), is what the next step begins with. A thread holds all low and top bits of
some middles. The lowest bits of a cost say which top
bits it has, so a minimum finds both. The top bits go to memory, and a second kernel walks back
through them for all sequences at once, since each of its steps waits for memory.

Values of states are computed by the format's own `triton_decode`. Where several weights a step have
few different vectors, each step computes the error of every vector once, and states look theirs up.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from anybit.core.format import Format
from anybit.kernels.triton import lang
from anybit.kernels.triton.lang import settle
from anybit.kernels.triton.layout import Layout

FAR = tl.constexpr(1e30)
MOST = 60000.0  # a number that fp16 holds, and beyond the values of all codes
MOST_BACK = 2 << 30  # bytes of top bits in memory at a time
LOOKED_UP_WARPS = 16  # which hold 128 states a thread
MOST_VECTORS = 1 << 12  # whose errors are computed one by one: 16 KB of shared memory


@triton.jit(do_not_specialize=["FIRST", "COUNT", "KEPT", "ZERO"])
def _forward(
    x,
    ends,
    back,
    FIRST,
    COUNT,
    KEPT,
    ZERO,
    PINNED: tl.constexpr,
    LAYOUT: tl.constexpr,
    DECODE: tl.constexpr,
    STATE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """COUNT steps of each sequence x (n, STEPS, V) fp32, from step FIRST on.

    ends: (n,) int32; where paths begin if PINNED, else becomes the end of the state of least cost.
    back: (n, KEPT, low bits / 2, middle) int16, the top bits of the last steps for pairs of low
    bits. ZERO: 0, which the compiler must not know, lest it move what is computed in each step out
    of the loop, and exchange numbers among threads for wider stores.
    """
    BITS: tl.constexpr = LAYOUT.fmt.bits
    WIDTH: tl.constexpr = LAYOUT.fmt.width
    TOPS: tl.constexpr = 1 << BITS
    MIDDLE: tl.constexpr = 1 << (STATE - 2 * BITS)
    ENDS: tl.constexpr = 1 << (STATE - BITS)
    mine = tl.program_id(0)
    x += mine * (STEPS * WIDTH)
    back += mine.to(tl.int64) * KEPT * (ENDS // 2)
    pair = tl.arange(0, TOPS // 2)[:, None, None] * 2
    top = tl.arange(0, TOPS)[None, :, None]
    middle = tl.arange(0, MIDDLE)[None, None, :]
    even = (top * MIDDLE + middle) * TOPS + pair
    own = tl.arange(0, TOPS // 2)[:, None] * MIDDLE + tl.arange(0, MIDDLE)[None, :] + ZERO
    cost = tl.zeros((1, TOPS, MIDDLE), tl.float32)
    if PINNED:
        cost = tl.where(top * MIDDLE + middle == tl.load(ends + mine), 0.0, FAR)
    held = _held(even, LAYOUT, DECODE)
    for t in range(COUNT):
        if WIDTH == 2:  # too many to be held: decoded anew in each step
            held = _held(even + ((t + ZERO) >> 31), LAYOUT, DECODE)
        at = x + (t + FIRST) % STEPS * WIDTH
        even_cost, odd_cost = cost, cost
        for v in tl.static_range(WIDTH):
            first, second = _differences(held[v], tl.load(at + v))
            even_cost += first * first
            odd_cost += second * second
        least, other = _least(even_cost, top, 1), _least(odd_cost, top, 1)
        if t >= COUNT - KEPT:
            which = (least & (TOPS - 1)) | (other & (TOPS - 1)) << 8
            tl.store(back + (t - COUNT + KEPT) * (ENDS // 2) + own, which.to(tl.int16))
        least = tl.permute(tl.join(least, other), (1, 0, 2))
        cost = tl.reshape(least, (1, TOPS, MIDDLE))
        cost = cost.to(tl.float32, bitcast=True)
    if not PINNED:
        tl.store(ends + mine, tl.argmin(tl.reshape(cost, (ENDS,)), 0))


@triton.jit(do_not_specialize=["FIRST", "COUNT", "KEPT"])
def _forward_looked_up(
    x,
    vectors,
    which,
    ends,
    back,
    FIRST,
    COUNT,
    KEPT,
    PINNED: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    STATE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """`_forward` as a tile (top bits, half of what is left of a state), for steps of many bits.

    vectors: (WIDTH, VECTORS) fp32, what states may stand for; VECTORS is a power of two. which:
    (2**STATE,) int16, the vector of each state.
    """
    TOPS: tl.constexpr = 1 << BITS
    MIDDLE: tl.constexpr = 1 << (STATE - 2 * BITS)
    HALF: tl.constexpr = 1 << (STATE - BITS - 1)
    mine = tl.program_id(0)
    x += mine * (STEPS * WIDTH)
    back += mine.to(tl.int64) * KEPT * HALF
    top = tl.arange(0, TOPS)[:, None]
    rest = tl.arange(0, HALF)
    own = rest % (TOPS // 2) * MIDDLE + rest // (TOPS // 2)
    held = tl.load(which.to(tl.pointer_type(tl.int32)) + top * HALF + rest[None, :])
    cost = tl.zeros((TOPS, MIDDLE), tl.float32)
    if PINNED:
        end = top * MIDDLE + tl.arange(0, MIDDLE)[None, :]
        cost = tl.where(end == tl.load(ends + mine), 0.0, FAR)
    for t in range(COUNT):
        at = x + (t + FIRST) % STEPS * WIDTH
        error = tl.zeros((VECTORS,), tl.float32)
        for v in tl.static_range(WIDTH):
            d = tl.load(vectors + v * VECTORS + tl.arange(0, VECTORS)) - tl.load(at + v)
            error += d * d
        before = tl.reshape(
            tl.broadcast_to(cost[:, :, None], (TOPS, MIDDLE, TOPS // 2)), (TOPS, HALF)
        )
        least = _least(before + _looked_up(error, held & 0xFFFF), top, 0)
        other = _least(before + _looked_up(error, held >> 16), top, 0)
        if t >= COUNT - KEPT:
            tops = (least & (TOPS - 1)) | (other & (TOPS - 1)) << 8
            tl.store(back + (t - COUNT + KEPT) * HALF + own, tops.to(tl.int16))
        cost = tl.reshape(tl.join(least, other), (TOPS, MIDDLE)).to(tl.float32, bitcast=True)
    if not PINNED:
        tl.store(ends + mine, tl.argmin(tl.reshape(cost, (2 * HALF,)), 0))


@triton.jit
def _looked_up(error, at):
    """Numbers of a vector at places (A, B)."""
    COUNT: tl.constexpr = at.shape[0] * at.shape[1]
    return tl.reshape(tl.gather(error, tl.reshape(at, (COUNT,)), 0), at.shape)


@triton.jit
def _held(even, LAYOUT: tl.constexpr, DECODE: tl.constexpr):
    """Values of these states and those that follow them, of each pair in 32 bits: a tuple of V."""
    first, second = _values(even, LAYOUT, DECODE), _values(even + 1, LAYOUT, DECODE)
    if LAYOUT.fmt.width == 1:
        return (_packed(first, second),)
    else:
        a, b = tl.split(first)
        c, d = tl.split(second)
        return _packed(a, c), _packed(b, d)


@triton.jit
def _values(state, LAYOUT: tl.constexpr, DECODE: tl.constexpr):
    """fp16 numbers of states, of the same shape; for two a state, in a last dimension."""
    FORMAT: tl.constexpr = LAYOUT.fmt
    A: tl.constexpr = state.shape[0]
    B: tl.constexpr = state.shape[1]
    C: tl.constexpr = state.shape[2]
    window = tl.reshape(state, (A * B, C)).to(tl.uint32, bitcast=True)
    DTYPE: tl.constexpr = tl.float32  # Triton 3.7 takes no dtype in a tuple that is no constexpr
    values = DECODE(FORMAT, ((window,), 0, LAYOUT, DTYPE, ())).to(tl.float16)
    if LAYOUT.fmt.width == 1:
        return tl.reshape(values, (A, B, C))
    else:
        return tl.reshape(values, (A, B, C, 2))


@triton.jit
def _packed(low, high):
    """Two numbers of fp16 in 32 bits."""
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
        high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    )


@triton.jit
def _differences(held, x):
    """Two numbers of fp16 each, less x in fp16: two tensors of fp32."""
    if lang.NO_PTX:
        low, high = lang.two(held)
        x = x.to(tl.float16)
        return (low - x).to(tl.float32), (high - x).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 x, d; .reg .b16 h, l; cvt.rn.f16x2.f32 x, $3, $3; sub.f16x2 d, $2, x;"
            "mov.b32 {l, h}, d; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
            "=f,=f,r,f",
            [held, x],
            (tl.float32, tl.float32),
            True,
            1,
        )


@triton.jit
def _least(cost, top, AXIS: tl.constexpr):
    """The least costs over the top bits, an axis, which are in their lowest bits: int32."""
    cost = cost.to(tl.int32, bitcast=True)
    TOPS: tl.constexpr = top.shape[AXIS]
    if lang.NO_PTX:
        marked = (cost & -TOPS) | top
    else:  # compilers make two instructions of it
        marked = tl.inline_asm_elementwise(
            _marked_asm(TOPS), "=r,r,r", [cost, top], tl.int32, True, 1
        )
    return tl.min(marked, AXIS)


@triton.constexpr_function
def _marked_asm(tops):
    return f"lop3.b32 $0, $1, {-int(tops)}, $2, 0xea;"


@triton.jit(do_not_specialize=["COUNT"])
def _walk(
    back,
    ends,
    out,
    COUNT,
    WRITES: tl.constexpr,
    STATE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Walk back COUNT steps from each sequence's end, which becomes the one before them.

    out: (n, COUNT) int32, the states on the way if WRITES.
    """
    mine = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + mine)
    for i in range(COUNT):
        at = mine * COUNT + COUNT - 1 - i
        pair, middle = (end & (1 << BITS) - 1) >> 1, end >> BITS
        place = at * (1 << (STATE - BITS - 1)) + (pair << (STATE - 2 * BITS)) + middle
        top = (tl.load(back + place).to(tl.int32) >> (end & 1) * 8) & ((1 << BITS) - 1)
        state = end | top << (STATE - BITS)
        if WRITES:
            tl.store(out + at, state)
        end = state >> BITS
    tl.store(ends + mine, end)


def paths(x: Tensor, table: Tensor, fmt: Format, lead: int) -> Tensor:
    """`anybit.kernels.viterbi.paths`, of steps of 1 or 2 weights, or of few different vectors."""
    vectors, which = distinct(table.to(x.device)) if fmt.width > 1 else (None, None)
    if vectors is None:
        kernel, options = _forward, {"ZERO": 0, "LAYOUT": Layout(fmt), "num_warps": warps(fmt)}
        options["DECODE"] = lang.jit(type(fmt).triton_decode)
    else:
        kernel, options = _forward_looked_up, {"vectors": vectors, "which": which}
        options |= {"VECTORS": vectors.shape[1], "WIDTH": fmt.width, "BITS": fmt.bits}
        options["num_warps"] = LOOKED_UP_WARPS
    x = x.clamp(-MOST, MOST)
    n, steps, _ = x.shape
    state = (len(table) - 1).bit_length()
    size = steps << (state - fmt.bits)
    most = max(1, MOST_BACK // size)
    out = x.new_empty(n, steps, dtype=torch.int32)
    ends = x.new_empty(n, dtype=torch.int32)
    back = x.new_empty(min(n, most) * size // 2, dtype=torch.int16)
    for begin in range(0, n, most):
        at = slice(begin, min(n, begin + most))
        given, own, found = x[at].contiguous(), ends[at], out[at]
        grid = (len(own),)
        for pinned, first, count, kept in (
            (False, steps - lead, 2 * lead, lead),
            (True, 0, steps, steps),
        ):
            kernel[grid](
                given, ends=own, back=back, FIRST=first, COUNT=count, KEPT=kept, PINNED=pinned,
                STATE=state, STEPS=steps, **options,
            )  # fmt: skip
            _walk[grid](
                back, own, found, kept, WRITES=pinned, STATE=state, BITS=fmt.bits, num_warps=1
            )
    return out


@lru_cache(8)
def distinct(table: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`_forward_looked_up`'s vectors and which of a table (states, V); None if they are many."""
    found, which = table.unique(dim=0, return_inverse=True)
    if len(found) > MOST_VECTORS:
        return None, None
    size = 1 << (len(found) - 1).bit_length()
    return pad(found, (0, 0, 0, size - len(found))).T.contiguous(), which.to(torch.int16)


def warps(fmt: Format) -> int:
    """Of a program: at most as many as there are middles for. Few exchange costs in more turns."""
    return 32 if fmt.bits <= 3 else 8


settle(globals())
