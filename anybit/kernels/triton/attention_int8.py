"""Decode attention over an int8 or int4 cache on the int8 matrix unit: no code is converted.

The query, and the probabilities with V's scales, become two int8 digits, hi + lo / 254, of 1 / 126
of their largest value: 15 bits, more than bf16 has. K and V are the left operands, whose tiles have
16 rows; the right one has 8 columns, and both digits of four query heads fill them.

Bytes of int4 are two operands, codes of both halves of heads; each group of channels is a part with
scales of its own. What code 0 stands for (`low`) is multiplied by sums of the query and of the
probabilities. A head in int8 is one part.
"""

import triton
import triton.language as tl

from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.triton.activation import after_previous, launch_next
from anybit.kernels.triton.lang import NO_PTX, settle, two

MOST_HEADS = 8  # query heads of a K head
MOST_COLUMNS = 16  # heads of all tokens of a program: registers hold no more
LEAST_DIM, MOST_DIM = 32, 512  # of a part of K, what the matrix unit multiplies; see `_both`
MOST_GROUPS = 2  # of half a head: parts of more take more registers than there are


def suits(group: int, cache: LayerCache) -> bool:
    """Whether `_attend_int8` takes so many query heads of a K head of such a cache."""
    kinds, dim = cache.kinds, cache.head_dim
    part = dim // (2 * cache.groups if kinds[0] == "int4" else 1)
    fits = group <= MOST_HEADS and LEAST_DIM <= part and dim <= MOST_DIM
    return fits and "model" not in kinds and cache.groups <= MOST_GROUPS


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
def nibbles(x):
    """The codes in the low and in the high bits of bytes, as int8."""
    if NO_PTX:
        low, high = (x & 15).to(tl.int8), (x >> 4).to(tl.int8)
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            and.b32 $0, $2, 0x0f0f0f0f;
            shr.u32 t, $2, 4;
            and.b32 $1, t, 0x0f0f0f0f; }""",
            "=&r,=r,r",
            [x],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def grid_of(words):
    """Scales and lows of int4, which are the fp16 halves of words."""
    scale, low = two(words)
    return scale.to(tl.float32), low.to(tl.float32)


@triton.jit
def share(
    owners,
    contexts,
    row,
    BATCH,
    SPLITS,
    PARTS,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    EACH: tl.constexpr,
):
    """What the programs of a row of single tokens do together: EACH rows of its text, or fewer.

    owners (BATCH,): the first row of each row's text, whose rows lie side by side; None: each is a
    text by itself, and EACH is 1. A row has SPLITS programs, and all of them share the keys.

    Returns:
        The first of these rows; how many they are; the context of the last; where the keys begin,
        at a whole tile; how many of them a program takes. No more than PARTS programs have any.
    """
    first, count = row, 1
    if owners is not None:
        own = tl.load(owners + row)
        first = row - (row - own) % EACH
        rows = first + tl.arange(0, EACH)
        same = tl.load(owners + rows, rows < BATCH, other=-1) == own
        count = tl.sum(same.to(tl.int32), 0)
    context = tl.load(contexts + first + count - 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - (count - 1) - WINDOW, 0) // TOKENS * TOKENS
    tiles = tl.cdiv(context - begin, TOKENS)
    each = tl.maximum(tl.cdiv(tiles, tl.minimum(count * SPLITS, PARTS)), 1) * TOKENS
    return first, count, context, begin, each


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
def lying(first, at, PART: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Codes (PART, TOKENS) of V, whose tokens lie side by side, from `at` on.

    first (blocks,): where the first of PART channels begins in each of `pages`. They are read block
    by block, as they lie in memory: a row of the tile has a few bytes of each block, and threads
    side by side should ask for whole lines.
    """
    SPAN: tl.constexpr = TOKENS // first.shape[0]
    i = tl.arange(0, PART * SPAN)
    if SPAN < BLOCK:  # a tile within a block
        i = i // SPAN * BLOCK + i % SPAN + at % BLOCK
    x = tl.reshape(tl.load(first[:, None] + i[None, :]), [first.shape[0], PART, SPAN])
    return tl.reshape(tl.permute(x, [1, 0, 2]), [PART, TOKENS])


@triton.jit
def rows_of(page, place, STEP: tl.constexpr, SIZE: tl.constexpr):
    """Numbers before a token's SIZE, at its place in a page of a head; pages lie STEP apart."""
    if STEP % SIZE == 0:  # one instruction; of 64 bits where `is_wide`
        out = (page * (STEP // SIZE) + place).to(tl.int64) * SIZE
    else:
        out = page.to(tl.int64) * STEP + place * SIZE
    return out


@triton.jit
def fetch(
    cache,
    blocks,
    at,
    kv_head,
    KV_HEADS: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Bring TOKENS tokens from `at` on into the L2, SIZE numbers each; blocks: their `pages`.

    What another kernel is writing among them is not lost: no core reads it from anywhere else.
    """
    if not NO_PTX:
        line: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
        page = of_tokens(blocks * KV_HEADS + kv_head, TOKENS)
        row = rows_of(page, (at + tl.arange(0, TOKENS)) % BLOCK, STEP, SIZE)
        for i in tl.static_range((SIZE + line - 1) // line):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [(cache + row + i * line).to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def sunk(sinks, head, most):
    """What the sinks of heads add to the sums of probabilities whose largest score is `most`."""
    base = tl.where(most == float("-inf"), 0.0, most)
    return tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - base)


@triton.jit
def place(column, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Where heads of a K head, GROUP of each token, lie among all heads, from the first on."""
    return column // GROUP * (KV_HEADS * GROUP) + column % GROUP


@triton.jit
def _alternating(x, largest):
    """Queries (SIZE, 2 * heads) to digits of 1 / 126 of the largest; hi in even columns."""
    hi, lo = _digits(x * (126.0 / largest)[None, :])
    return tl.where((tl.arange(0, x.shape[1]) % 2 == 0)[None, :], hi, lo)


@triton.jit
def _beside(p):
    """Both digits of weights (TOKENS, heads) side by side (TOKENS, 2 * heads)."""
    hi, lo = _digits(p)
    return tl.reshape(tl.join(hi, lo), [p.shape[0], 2 * p.shape[1]])


@triton.jit
def _scores(codes, x, whole, at_grid):
    """Products of codes (TOKENS, channels) in int4 with digits of queries, in their unit.

    whole: sums of the digits. at_grid: of each token.
    """
    scale, low = grid_of(tl.load(at_grid))
    return _both(tl.dot(codes, x)) * scale[:, None] + whole * low[:, None]


@triton.jit
def _add(acc, codes, p, fade):
    """Products of codes (channels, TOKENS) with weights p, of at most 126, added to others."""
    return acc * fade[None, :] + _both(tl.dot(codes, _beside(p)))


@triton.jit(do_not_specialize=["BATCH", "PARTS"])
def _attend_int8(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    tables,
    contexts,
    owners,
    out,
    sums,
    maxima,
    sinks,
    TABLE_STRIDE,
    BATCH,
    PARTS,
    SCALE,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    K_GRID: tl.constexpr,
    V_GRID: tl.constexpr,
    TOKENS: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The query heads of one K head of a text's tokens against a part of its context.

    Arguments are those of `attention._attend`; a row has one query.
    """
    launch_next(PDL)
    kv_head, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(2)
    row, count, context, begin, each = share(
        owners, contexts, row, BATCH, splits, PARTS, WINDOW, TOKENS, EACH
    )
    split = (tl.program_id(1) - row) * splits + tl.program_id(2)
    low = begin + split * each
    high = tl.minimum(low + each, context)
    if (sums is not None) & (low >= high):
        # What comes after this kernel waits for it alone. So some program must wait for the one
        # before; the others leave room for what has something to do.
        if tl.program_id(2) == 0:
            after_previous(PDL)
        return
    table = tables + row.to(tl.int64) * TABLE_STRIDE
    ahead = pages(table, low, high, BLOCK, TOKENS)
    K_PARTS: tl.constexpr = 2 * GROUPS if K_KIND == "int4" else 1
    V_PARTS: tl.constexpr = 2 * GROUPS if V_KIND == "int4" else 1
    K_PART: tl.constexpr = D // K_PARTS  # channels
    V_PART: tl.constexpr = D // V_PARTS
    K_SIZE: tl.constexpr = D // 2 if K_KIND == "int4" else D  # bytes of a token's head
    V_SIZE: tl.constexpr = D // 2 if V_KIND == "int4" else D
    if PDL:  # K and V come from memory while the previous kernel ends
        fetch(k_cache, ahead, low, kv_head, KV_HEADS, K_STEP, K_SIZE, BLOCK, TOKENS)
        fetch(v_cache, ahead, low, kv_head, KV_HEADS, V_STEP, V_SIZE, BLOCK, TOKENS)
        if K_KIND != "static":
            fetch(k_scale, ahead, low, kv_head, KV_HEADS, K_GRID, K_PARTS, BLOCK, TOKENS)
        if V_KIND != "static":
            fetch(v_scale, ahead, low, kv_head, KV_HEADS, V_GRID, V_PARTS, BLOCK, TOKENS)
    after_previous(PDL)

    ALL: tl.constexpr = GROUP * EACH  # heads of all tokens
    HEADS: tl.constexpr = 4 if ALL <= 4 else (8 if ALL <= 8 else 16)
    d, v_d = tl.arange(0, K_PART), tl.arange(0, V_PART)
    column = tl.arange(0, 2 * HEADS)  # both digits of a head side by side
    first = row.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    at_q = q + (first + place(column // 2, KV_HEADS, GROUP))[None, :] * D + d[:, None]
    queries = ()
    largest = tl.full([2 * HEADS], 1e-30, tl.float32)
    for i in tl.static_range(K_PARTS):
        x = tl.load(at_q + i * K_PART, (column // 2 < count * GROUP)[None, :], other=0).to(
            tl.float32
        )
        if K_KIND == "static":
            x *= tl.load(k_scale + kv_head * D + d)[:, None]
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        queries = queries + (x,)
    unit = tl.max(tl.reshape(largest, [HEADS, 2]), 1) * (SCALE / (126 * 254))
    digits, wholes = (), ()
    for i in tl.static_range(K_PARTS):
        x = _alternating(queries[i], largest)
        digits = digits + (x,)
        wholes = wholes + (_both(tl.sum(x.to(tl.int32), 0)[None, :]),)

    column = tl.arange(0, HEADS)
    live = column < count * GROUP
    ends = context - (count - 1) + column // GROUP  # contexts of tokens
    most = tl.full([HEADS], float("-inf"), tl.float32)
    # Added up over tokens after the loop, for sums across threads take a while.
    total = tl.zeros([TOKENS, HEADS], tl.float32)
    accs, lows = (), ()
    for _ in tl.static_range(V_PARTS):
        accs = accs + (tl.zeros([V_PART, HEADS], tl.float32),)
        lows = lows + (tl.zeros([TOKENS, HEADS], tl.float32),)
    for at in range(low, high, TOKENS):
        t = at + tl.arange(0, TOKENS)
        inside = t < context  # K and V are loaded whole: past the context, p is 0
        in_blocks = ahead * KV_HEADS + kv_head
        page = of_tokens(in_blocks, TOKENS)
        at_v = v_cache + in_blocks.to(tl.int64) * V_STEP
        ahead = pages(table, at + TOKENS, high, BLOCK, TOKENS)
        at_k = k_cache + rows_of(page, t % BLOCK, K_STEP, K_SIZE)[:, None] + d[None, :]
        if K_KIND != "static":
            k_grids = k_scale + rows_of(page, t % BLOCK, K_GRID, 1)
        if V_KIND != "static":
            v_grids = v_scale + rows_of(page, t % BLOCK, V_GRID, 1)
        if K_KIND == "int4":
            score = tl.zeros([TOKENS, HEADS], tl.float32)
            for g in tl.static_range(GROUPS):
                codes, codes_high = nibbles(tl.load(at_k + g * K_PART))
                at_grid = k_grids + g * BLOCK
                high_grid = at_grid + GROUPS * BLOCK
                score += _scores(codes, digits[g], wholes[g], at_grid)
                score += _scores(codes_high, digits[GROUPS + g], wholes[GROUPS + g], high_grid)
        else:
            score = _both(tl.dot(tl.load(at_k), digits[0]))  # type: ignore[misc]
            if K_KIND == "dynamic":
                score *= tl.load(k_grids)[:, None]
        score *= unit[None, :]
        seen = inside[:, None]
        if EACH > 1:
            seen = seen & (t[:, None] < ends[None, :])
        if WINDOW > 0:
            seen = seen & (t[:, None] >= ends[None, :] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        # Weights are p times V's scale. p is divided by a power of two that makes them at most 1
        # and the largest at least 1/2, so that one maximum does for p and for the scales.
        bound = score
        scales, offsets = (), ()
        if V_KIND != "static":
            largest_scale = tl.zeros([TOKENS], tl.float32)
            for i in tl.static_range(V_PARTS):
                if V_KIND == "int4":
                    scale, offset = grid_of(tl.load(v_grids + i * BLOCK, inside, other=0))
                    offsets = offsets + (offset,)
                else:
                    scale = tl.load(v_grids, inside, other=0)
                scales = scales + (scale * 126.0,)
                largest_scale = tl.maximum(largest_scale, scale)
            exponent = (largest_scale.to(tl.int32, bitcast=True) >> 23) - 126
            bound += exponent.to(tl.float32)[:, None]
        new = tl.maximum(most, tl.max(bound, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(most - base)
        p = tl.exp2(score - base[None, :])
        total = total * fade[None, :] + p
        if V_KIND == "int4":
            added, added_high, added_lows = (), (), ()
            for g in tl.static_range(GROUPS):
                codes = lying(at_v + g * (V_PART * BLOCK), at, V_PART, BLOCK, TOKENS)
                codes, codes_high = nibbles(codes)
                weights, weights_high = p * scales[g][:, None], p * scales[GROUPS + g][:, None]
                added = added + (_add(accs[g], codes, weights, fade),)
                added_high = added_high + (_add(accs[GROUPS + g], codes_high, weights_high, fade),)
            for i in tl.static_range(V_PARTS):
                added_lows = added_lows + (lows[i] * fade[None, :] + p * offsets[i][:, None],)
            accs, lows = added + added_high, added_lows
        else:
            weights = p * 126.0 if V_KIND == "static" else p * scales[0][:, None]  # type: ignore[misc]
            codes = lying(at_v, at, D, BLOCK, TOKENS)
            accs = (_add(accs[0], codes, weights, fade),)  # type: ignore[misc]
        most = new
    total = tl.sum(total, 0)
    to = first + place(column, KV_HEADS, GROUP)
    if sums is None:
        if sinks is not None:
            total += sunk(sinks, kv_head * GROUP + column % GROUP, most)
        divisor = tl.where(total == 0, 1.0, total)[None, :]
    else:
        to = to * PARTS + split
        divisor = tl.full([1, HEADS], 1.0, tl.float32)
        tl.store(sums + to, total, live)
        tl.store(maxima + to, most, live)
    worth: tl.constexpr = 1.0 / (126 * 254)
    at_out = out + to[None, :] * D + v_d[:, None]
    for i in tl.static_range(V_PARTS):
        acc = accs[i] * worth
        if V_KIND == "static":
            acc *= tl.load(v_scale + kv_head * D + v_d)[:, None]
        if V_KIND == "int4":
            acc += tl.sum(lows[i], 0)[None, :]
        acc = (acc / divisor).to(out.dtype.element_ty)
        tl.store(at_out + i * V_PART, acc, live[None, :])


settle(globals())
