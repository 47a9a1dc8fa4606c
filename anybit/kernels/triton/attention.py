"""Attention over a paged KV cache, in the model's dtype or int8, for prompts and single tokens.

`write` puts a step's K and V where they belong: RoPE, the norms of heads, quantization and the
store in one pass over the projection's output. `attend` is flash attention over the pages, with
int8 dequantized in registers: a static scale of each K channel goes into the query and one of
each V channel into the output, while dynamic scales of each token multiply scores and
probabilities. The query heads that share a K head are rows of one tile, so the cache is read once
for all of them, and for a single token the context is split over programs whose parts `combine`
adds up (flash-decoding). Grids depend on sizes alone and nothing waits for the device, so a CUDA
graph can hold all of it.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.triton import attention_int8
from anybit.kernels.triton.activation import after_previous, launch_next, overlap
from anybit.kernels.triton.attention_int8 import fetch, of_tokens, pages, sunk
from anybit.kernels.triton.lang import NO_PTX

MOST_SPLITS = 32
# Programs that fill a GPU of 132 multiprocessors, by bytes of a number in the cache.
PROGRAMS = {1: 512, 2: 256, 4: 256}


class Tile(NamedTuple):
    """Keys that a program looks at together, its warps, and loads in flight."""

    tokens: int
    warps: int
    stages: int


# Measured on an H200: one query of 4 heads (of 8 K heads), 1280 tokens, 1 to 256 sequences.
DECODE = Tile(64, 4, 3)
DECODE_INT8 = Tile(64, 2, 2)  # at most two warps: Triton 3.9 does not compile it for four
PROMPT = Tile(64, 8, 2)


@triton.jit
def _write(
    qkv, q_out, k_cache, v_cache, k_scale, v_scale, cos, sin, positions, slots, q_weight, k_weight,
    STRIDE, EPS, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """TOGETHER heads of a token, all of Q, K or V: normed, rotated, and put where they belong."""
    launch_next(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER
    d = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, TOGETHER)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    c, s = tl.load(cos + position * HALF + d), tl.load(sin + position * HALF + d)
    after_previous(PDL)
    at = qkv + token * STRIDE + head * (2 * HALF) + d
    x = tl.load(at)
    dtype = x.dtype
    a, b = x.to(tl.float32), tl.load(at + HALF).to(tl.float32)
    if first < HEADS + KV_HEADS:
        if NORM:
            low, high = tl.load(q_weight + d), tl.load(q_weight + HALF + d)
            low = tl.where(first < HEADS, low, tl.load(k_weight + d))
            high = tl.where(first < HEADS, high, tl.load(k_weight + HALF + d))
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            inverse = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
            a = ((a * inverse).to(dtype) * low).to(dtype).to(tl.float32)
            b = ((b * inverse).to(dtype) * high).to(dtype).to(tl.float32)
        rotated = (a * c - b * s).to(dtype).to(tl.float32)
        b = (b * c + a * s).to(dtype).to(tl.float32)
        a = rotated
    if first < HEADS:
        out = q_out + (token * HEADS + head) * (2 * HALF) + d
        tl.store(out, a.to(dtype))
        tl.store(out + HALF, b.to(dtype))
    else:
        if slot >= 0:  # a padded row of a graph has nowhere to go
            block = slot // BLOCK * KV_HEADS + head
            if first < HEADS + KV_HEADS:
                block -= HEADS
                _store(a, b, k_cache, k_scale, block, slot, head - HEADS, BLOCK, KIND, False)
            else:
                block -= HEADS + KV_HEADS
                head -= HEADS + KV_HEADS
                TURNED: tl.constexpr = KIND != "model"
                _store(a, b, v_cache, v_scale, block, slot, head, BLOCK, KIND, TURNED)


@triton.jit
def _store(
    a, b, cache, scales, block, slot, head, BLOCK: tl.constexpr, KIND: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Both halves (heads, HALF) of a token's heads (heads, 1), quantized if the cache is int8.

    block (heads, 1): counted through all blocks and heads. TURNED: tokens of a block lie side by
    side for each channel.
    """
    HALF: tl.constexpr = a.shape[1]
    d = tl.arange(0, HALF)[None, :]
    row = block * BLOCK + slot % BLOCK
    if TURNED:
        at = cache + (block * (2 * HALF) + d) * BLOCK + slot % BLOCK
        other = at + HALF * BLOCK
    else:
        at = cache + row * (2 * HALF) + d
        other = at + HALF
    if KIND == "model":
        a, b = a.to(cache.dtype.element_ty), b.to(cache.dtype.element_ty)
    elif KIND == "static":
        channel = scales + head * (2 * HALF) + d
        a, b = _int8(a, tl.load(channel)), _int8(b, tl.load(channel + HALF))
    else:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))[:, None]
        scale = tl.maximum(tl.div_rn(largest, largest * 0 + 127.0), 1e-10)
        tl.store(scales + row, scale)
        a, b = _int8(a, scale + a * 0), _int8(b, scale + b * 0)
    tl.store(at, a)
    tl.store(other, b)


@triton.jit
def _int8(x, scale):
    # 1.5 * 2**23 rounds to the nearest integer, ties to even, as torch.round does.
    q = tl.div_rn(x, scale) + 12582912.0 - 12582912.0
    return tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)


@triton.jit
def _float(codes, DTYPE: tl.constexpr):
    """int8 codes in a float dtype; to fp16 in 1.25 instructions a code."""
    PLAIN: tl.constexpr = NO_PTX or DTYPE != tl.float16
    if PLAIN:
        out = codes.to(DTYPE)
    else:  # a byte u below the bits of 1024 is 1024 + u; u is the code plus 128
        out = tl.inline_asm_elementwise(
            """{ .reg .b32 u, c;
            mov.b32 c, 0x64806480;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    q, k_cache, v_cache, k_scale, v_scale, tables, contexts, starts, out, sums, maxima, sinks,
    TABLE_STRIDE, SCALE, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of queries (tokens x the heads of one K head) against its part of the context."""
    launch_next(PDL)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    first = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first
    context = tl.load(contexts + seq)
    if tile * ROWS < count * GROUP:
        last = tl.minimum(context, context - count + (tile * ROWS + ROWS - 1) // GROUP + 1)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context - count + tile * ROWS // GROUP - WINDOW + 1, 0)
            begin = begin // TOKENS * TOKENS
        each = tl.cdiv(tl.cdiv(last - begin, TOKENS), SPLITS) * TOKENS
        low = begin + split * each
        high = tl.minimum(low + each, last)
        table = tables + seq.to(tl.int64) * TABLE_STRIDE
        ahead = pages(table, low, high, BLOCK, TOKENS)
        if PDL:  # K and V come from memory while the previous kernel ends
            fetch(k_cache, ahead, low, kv_head, KV_HEADS, D, BLOCK, TOKENS)
            fetch(v_cache, ahead, low, kv_head, KV_HEADS, D, BLOCK, TOKENS)
        after_previous(PDL)
        rows = tile * ROWS + tl.arange(0, ROWS)
        token = rows // GROUP
        live = token < count
        position = context - count + token
        d = tl.arange(0, D)
        head = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
        x = tl.load(q + head[:, None] * D + d[None, :], mask=live[:, None], other=0)
        # Codes become fp16, which holds them and takes fewer instructions than bf16; so the largest
        # of a query and of a tile's V scales are taken out, or fp16 might overflow.
        DTYPE: tl.constexpr = x.dtype if KIND == "model" or x.dtype == tl.float32 else tl.float16
        SIDE: tl.constexpr = 16 if BLOCK % 16 == 0 else 1  # tokens side by side in a block of V
        unit = tl.full([ROWS], SCALE, tl.float32)
        if KIND != "model":
            x32 = x.to(tl.float32)
            if KIND == "static":
                x32 *= tl.load(k_scale + kv_head * D + d)[None, :]
            largest = tl.maximum(tl.max(tl.abs(x32), 1), 1e-30)
            x, unit = (x32 / largest[:, None]).to(DTYPE), unit * largest

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for at in range(low, high, TOKENS):
            t = at + tl.arange(0, TOKENS)
            inside = t < last
            block = of_tokens((ahead * KV_HEADS + kv_head) * BLOCK, TOKENS)
            ahead = pages(table, at + TOKENS, high, BLOCK, TOKENS)
            row = (block + t % BLOCK).to(tl.int64)
            keys = tl.load(k_cache + row[:, None] * D + d[None, :], inside[:, None], other=0)
            if KIND != "model":
                keys = _float(keys, DTYPE)
            score = tl.dot(x, tl.trans(keys), input_precision="ieee") * unit[:, None]
            if KIND == "dynamic":
                score *= tl.load(k_scale + row, inside, other=0)[None, :]
            seen = t[None, :] <= position[:, None]  # position < last
            if WINDOW > 0:
                seen = seen & (t[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(most, tl.max(score, 1))
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(score - base[:, None])
            fade = tl.exp2(most - base)
            total = total * fade + tl.sum(p, 1)
            if KIND == "model":
                values = tl.load(v_cache + row[:, None] * D + d[None, :], inside[:, None], other=0)
                acc = acc * fade[:, None]
                acc += tl.dot(p.to(DTYPE), values, input_precision="ieee")
            else:
                side = block.to(tl.int64) * D + t % BLOCK
                side = tl.max_contiguous(tl.multiple_of(side, SIDE), SIDE)
                at_v = v_cache + d[:, None] * BLOCK + side[None, :]
                whole = t // SIDE * SIDE < last  # all that lies side by side, and p is 0 past last
                values = _float(tl.load(at_v, whole[None, :], other=0), DTYPE)
                acc = acc * fade[:, None]
                if KIND == "dynamic":
                    scale = tl.load(v_scale + row, inside, other=0)
                    most_scale = tl.maximum(tl.max(scale, 0), 1e-30)
                    p = (p * (scale / most_scale)[None, :]).to(DTYPE)
                    acc += tl.dot(p, tl.trans(values), input_precision="ieee") * most_scale
                else:
                    acc += tl.dot(p.to(DTYPE), tl.trans(values), input_precision="ieee")
            most = new
        if KIND == "static":
            acc *= tl.load(v_scale + kv_head * D + d)[None, :]
        if SPLITS == 1:
            if sinks is not None:
                total += sunk(sinks, kv_head * GROUP + rows % GROUP, most)
            acc = acc / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out + head[:, None] * D + d[None, :], acc, mask=live[:, None])
        else:
            part = head * SPLITS + split
            tl.store(out + part[:, None] * D + d[None, :], acc, mask=live[:, None])
            tl.store(sums + part, total, mask=live)
            tl.store(maxima + part, most, mask=live)


@triton.jit
def _combine(
    parts, sums, maxima, sinks, out, HEADS, D: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: the sum of its parts, each by its share of the probabilities."""
    launch_next(PDL)
    after_previous(PDL)
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    most = tl.load(maxima + head * SPLITS + s)
    base = tl.max(most, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(most - base)
    total = tl.sum(weight * tl.load(sums + head * SPLITS + s), 0)
    if sinks is not None:
        total += sunk(sinks, head % HEADS, base)
    part = tl.load(parts + (head * SPLITS + s)[:, None] * D + d[None, :])
    acc = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * D + d, acc)


def write(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotate Q and K of qkv (T, (heads + 2 kv_heads) * D), store K and V; Q (T, heads, D).

    cache: K and V (blocks, kv_heads, block_size, D) and their scales, as `LayerCache` has them:
    V in int8 is (blocks, kv_heads, D, block_size).
    rope: cosines and sines (positions, D / 2) fp32. slots (T,): block * block_size + offset, or -1
    for a token that is not stored. norms: RMSNorm weights (D,) of Q and K, and the epsilon.
    """
    k, v, k_scale, v_scale = cache
    tokens, (_, kv_heads, block, dim) = len(qkv), k.shape
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        together = math.gcd(heads, kv_heads, 4)
        _write[(tokens, (heads + 2 * kv_heads) // together)](
            qkv, q, k, v, k_scale, v_scale, *rope, positions, slots, q_norm, k_norm, qkv.stride(0),
            eps, HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=block,
            KIND=kind(k_scale), NORM=norms is not None, TOGETHER=together, num_warps=together,
            **overlap(q.device),
        )  # fmt: skip
    return q


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    tables: Tensor,
    contexts: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries (T, heads, D) over the cache; `out` (T, heads, D), if given.

    tables (B, blocks) and contexts (B,): int32, each sequence's blocks, and tokens in them.
    starts (B + 1,) int32: where each sequence's queries begin in T; they are the last tokens of its
    context. longest: the most queries of one sequence. splits: programs that share a context; by
    default as many as fill the GPU when every sequence has a single query, else one. sinks
    (heads,): scores of one more key of each head, whose value is zero.
    """
    k, v, k_scale, v_scale = cache
    _, kv_heads, block, dim = k.shape
    heads, batch = q.shape[1], len(tables)
    group = heads // kv_heads
    rows = max(16, min(128, triton.next_power_of_2(longest * group)))
    tile = tile or (PROMPT if rows == 128 else DECODE if k_scale is None else DECODE_INT8)
    if q.element_size() > 2:  # within the shared memory of every GPU from sm_80 on
        tile = tile._replace(stages=2)
    single = k_scale is not None and longest == 1 and attention_int8.suits(group, dim)
    if splits is None:
        enough = PROGRAMS[k.element_size()]
        splits = choose_splits(batch * kv_heads, enough) if longest == 1 else 1
    out = torch.empty_like(q) if out is None else out
    shape = (*q.shape[:2], splits)
    parts, sums, maxima = out, None, None
    if splits > 1:
        parts = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
        sums, maxima = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    if single:
        attention_int8._attend_int8[(kv_heads, batch * splits)](
            q, k, v, k_scale, v_scale, tables, contexts, parts, sums, maxima,
            sinks if splits == 1 else None, tables.stride(0), scale * 1.4426950408889634,
            KV_HEADS=kv_heads, GROUP=group, D=dim, BLOCK=block, WINDOW=window or 0,
            STATIC=kind(k_scale) == "static", SPLITS=splits, TOKENS=tile.tokens,
            num_warps=tile.warps, num_stages=tile.stages, **overlap(q.device),
        )  # fmt: skip
    else:
        _attend[(triton.cdiv(longest * group, rows), kv_heads, batch * splits)](
            q, k, v, k_scale, v_scale, tables, contexts, starts, parts, sums, maxima,
            sinks if splits == 1 else None, tables.stride(0), scale * 1.4426950408889634,
            KV_HEADS=kv_heads, GROUP=group, D=dim, BLOCK=block, WINDOW=window or 0,
            KIND=kind(k_scale), SPLITS=splits, ROWS=rows, TOKENS=tile.tokens,
            num_warps=tile.warps, num_stages=tile.stages, **overlap(q.device),
        )  # fmt: skip
    if splits > 1:
        _combine[(q.shape[0] * heads,)](
            parts, sums, maxima, sinks, out, heads, D=dim, SPLITS=splits, num_warps=4,
            **overlap(q.device),
        )  # fmt: skip
    return out


def kind(scale: Tensor | None) -> str:
    """How a cache is stored: "model" (its dtype), or int8 with "static" or "dynamic" scales."""
    if scale is None:
        return "model"
    return "static" if scale.ndim == 2 else "dynamic"


def choose_splits(programs: int, enough: int) -> int:
    """The power of two by which so many programs become enough for the GPU."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits < enough:
        splits *= 2
    return splits


def refuse(cache: Tensor) -> str | None:
    """None when these kernels can be used on K (blocks, kv_heads, block_size, D), or why not."""
    _, _, block, dim = cache.shape
    if cache.dtype == torch.uint8:
        return "the cache is in int4"
    if dim < 16 or dim & (dim - 1):
        return f"the head dimension is {dim}, not a power of two of at least 16"
    if block & (block - 1):
        return f"the block size is {block}, not a power of two"
    if cache.numel() // dim >= 2**31:
        return f"{cache.numel() // dim} heads of tokens in a layer's cache are more than 2**31 - 1"
    return None
