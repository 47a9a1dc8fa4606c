"""Decode attention over an int8 cache on the int8 matrix unit: no code of K or V is converted.

The query, and the probabilities with V's scales, become two int8 digits, hi + lo / 254, of 1 / 126
of their largest value: 15 bits, more than bf16 has. K and V are the left operands, whose tiles have
16 rows; the right one has 8 columns, and both digits of four query heads fill them.
"""

import triton
import triton.language as tl

from anybit.kernels.triton.activation import after_previous, launch_next
from anybit.kernels.triton.lang import NO_PTX

MOST_HEADS = 8  # query heads of a K head
LEAST_DIM, MOST_DIM = 32, 512  # bytes that the matrix unit multiplies at a time; see `_both`


def suits(group: int, dim: int) -> bool:
    """Whether `_attend_int8` takes so many query heads of a K head, of this dimension."""
    return group <= MOST_HEADS and LEAST_DIM <= dim <= MOST_DIM


@triton.jit
def _digits(x):
    """Bytes (hi, lo) with hi + lo / 254 nearest to x, which is at most 126; ties to even."""
    # 1.5 * 2**23: the nearest integer is in the lowest bits.
    hi = x + 12582912.0
    lo = (x - (hi - 12582912.0)) * 254 + 12582912.0
    return hi.to(tl.int32, bitcast=True).to(tl.int8), lo.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _both(x):
    """254 * hi + lo of sums (SIZE, 2 * heads) of a head's two digits, exact for 512 products."""
    SIZE: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    worth = tl.where(tl.arange(0, COLUMNS) % 2 == 0, 254, 1)
    return tl.sum(tl.reshape(x * worth[None, :], [SIZE, COLUMNS // 2, 2]), 2).to(tl.float32)


@triton.jit
def pages(table, at, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Blocks of the tokens from `at` on, each once; 0 from `end` on. TOKENS divides `at`.

    To be loaded an iteration ahead: where a loop's addresses wait for a load of its own, Triton
    keeps one tile less in flight, and of three stages none while it multiplies.
    """
    SPAN: tl.constexpr = BLOCK if BLOCK < TOKENS else TOKENS
    first = at + tl.arange(0, TOKENS // SPAN) * SPAN
    return tl.load(table + first // BLOCK, first < end, other=0)


@triton.jit
def of_tokens(x, TOKENS: tl.constexpr):
    """What belongs to each block (blocks,) for each of its tokens (TOKENS,)."""
    SPAN: tl.constexpr = TOKENS // x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], SPAN]), [TOKENS])


@triton.jit
def fetch(
    cache, blocks, at, kv_head, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Bring TOKENS tokens from `at` on into the L2, SIZE numbers each; blocks: their `pages`.

    What another kernel is writing among them is not lost: no core reads it from anywhere else.
    """
    if not NO_PTX:
        line: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
        row = of_tokens((blocks * KV_HEADS + kv_head) * BLOCK, TOKENS)
        row = (row + (at + tl.arange(0, TOKENS)) % BLOCK).to(tl.int64)
        for i in tl.static_range((SIZE + line - 1) // line):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                [(cache + row * SIZE + i * line).to(tl.int64)], dtype=tl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip


@triton.jit
def sunk(sinks, head, most):
    """What the sinks of heads add to the sums of probabilities whose largest score is `most`."""
    base = tl.where(most == float("-inf"), 0.0, most)
    return tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - base)


@triton.jit
def _attend_int8(
    q, k_cache, v_cache, k_scale, v_scale, tables, contexts, out, sums, maxima, sinks,
    TABLE_STRIDE, SCALE, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, STATIC: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query heads of one K head of a sequence against a part of its context.

    Arguments are those of `attention._attend`; a sequence has one query.
    """
    launch_next(PDL)
    kv_head = tl.program_id(0)
    seq, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    context = tl.load(contexts + seq)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0) // TOKENS * TOKENS
    each = tl.cdiv(tl.cdiv(context - begin, TOKENS), SPLITS) * TOKENS
    low = begin + split * each
    high = tl.minimum(low + each, context)
    table = tables + seq.to(tl.int64) * TABLE_STRIDE
    ahead = pages(table, low, high, BLOCK, TOKENS)
    if PDL:  # K and V come from memory while the previous kernel ends
        fetch(k_cache, ahead, low, kv_head, KV_HEADS, D, BLOCK, TOKENS)
        fetch(v_cache, ahead, low, kv_head, KV_HEADS, D, BLOCK, TOKENS)
        if not STATIC:
            fetch(k_scale, ahead, low, kv_head, KV_HEADS, 1, BLOCK, TOKENS)
            fetch(v_scale, ahead, low, kv_head, KV_HEADS, 1, BLOCK, TOKENS)
    after_previous(PDL)

    HEADS: tl.constexpr = 4 if GROUP <= 4 else 8
    SIDE: tl.constexpr = 16 if BLOCK % 16 == 0 else 1  # tokens side by side in a block of V
    d = tl.arange(0, D)
    column = tl.arange(0, 2 * HEADS)  # both digits of a head side by side
    first = seq.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    at_q = q + (first + column // 2)[None, :] * D + d[:, None]
    x = tl.load(at_q, (column // 2 < GROUP)[None, :], other=0).to(tl.float32)
    if STATIC:
        x *= tl.load(k_scale + kv_head * D + d)[:, None]
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    q_hi, q_lo = _digits(x * (126.0 / largest)[None, :])
    x = tl.where((column % 2 == 0)[None, :], q_hi, q_lo)
    unit = tl.max(tl.reshape(largest, [HEADS, 2]), 1) * (SCALE / (126 * 254))

    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([D, HEADS], tl.float32)
    for at in range(low, high, TOKENS):
        t = at + tl.arange(0, TOKENS)
        inside = t < context  # K and V are loaded whole: past the context, p is 0
        block = of_tokens((ahead * KV_HEADS + kv_head) * BLOCK, TOKENS)
        ahead = pages(table, at + TOKENS, high, BLOCK, TOKENS)
        row = block + t % BLOCK
        keys = tl.load(k_cache + row.to(tl.int64)[:, None] * D + d[None, :])
        score = _both(tl.dot(keys, x)) * unit[None, :]
        if not STATIC:
            score *= tl.load(k_scale + row)[:, None]
        seen = inside
        if WINDOW > 0:
            seen = seen & (t >= context - WINDOW)
        score = tl.where(seen[:, None], score, float("-inf"))
        new = tl.maximum(most, tl.max(score, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(score - base[None, :])
        fade = tl.exp2(most - base)
        total = total * fade + tl.sum(p, 0)
        worth = 1.0 / (126 * 254)
        p *= 126.0
        if not STATIC:
            scale = tl.load(v_scale + row, inside, other=0)
            most_scale = tl.maximum(tl.max(scale, 0), 1e-30)
            p *= (scale / most_scale)[:, None]
            worth *= most_scale
        p_hi, p_lo = _digits(p)
        digits = tl.reshape(tl.join(p_hi, p_lo), [TOKENS, 2 * HEADS])
        side = block.to(tl.int64) * D + t % BLOCK
        side = tl.max_contiguous(tl.multiple_of(side, SIDE), SIDE)
        values = tl.load(v_cache + d[:, None] * BLOCK + side[None, :])
        acc = acc * fade[None, :] + _both(tl.dot(values, digits)) * worth
        most = new
    if STATIC:
        acc *= tl.load(v_scale + kv_head * D + d)[:, None]
    live = tl.arange(0, HEADS) < GROUP
    to = first + tl.arange(0, HEADS)
    if SPLITS == 1:
        if sinks is not None:
            total += sunk(sinks, kv_head * GROUP + tl.arange(0, HEADS) % GROUP, most)
        acc = acc / tl.where(total == 0, 1.0, total)[None, :]
        tl.store(out + to[None, :] * D + d[:, None], acc.to(out.dtype.element_ty), live[None, :])
    else:
        to = to * SPLITS + split
        tl.store(out + to[None, :] * D + d[:, None], acc, live[None, :])
        tl.store(sums + to, total, live)
        tl.store(maxima + to, most, live)
