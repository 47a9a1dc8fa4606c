"""How a step's K and V get into the paged cache, in one pass over the projection's output.

RoPE, the norms of heads, quantization and the store. `anybit.kernels.kv.int4` says what int4 is.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.core.rotation import block as rotated_block
from anybit.kernels.between import Unturned, finished
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.triton.activation import (
    after_previous,
    launch_next,
    of_columns,
    overlap,
    read,
    turned,
)
from anybit.kernels.triton.lang import settle


@triton.jit
def _write(
    qkv,
    k,
    v,
    turn,
    bias,
    q_out,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    cos,
    sin,
    positions,
    slots,
    q_weight,
    k_weight,
    STRIDE,
    K_STRIDE,
    V_STRIDE,
    EPS,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    K_GRID: tl.constexpr,
    V_GRID: tl.constexpr,
    TOGETHER: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOGETHER heads of a token, all of Q, K or V: normed, rotated, and put where they belong.

    turn, bias: of `Unturned` projections, in blocks of TURN columns.
    """
    launch_next(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER
    d = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, TOGETHER)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    if cos is not None:
        position = tl.load(positions + token).to(tl.int64)
        c, s = tl.load(cos + position * HALF + d), tl.load(sin + position * HALF + d)
    column = head * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    of_head = of_columns(turn, bias, column, column >= 0)
    after_previous(PDL)
    if turn is None:
        heads = qkv + token * STRIDE + first * (2 * HALF)
        if k is not None:  # they lie elsewhere
            if first >= HEADS + KV_HEADS:
                heads = v + token * V_STRIDE + (first - HEADS - KV_HEADS) * (2 * HALF)
            elif first >= HEADS:
                heads = k + token * K_STRIDE + (first - HEADS) * (2 * HALF)
        at = heads + tl.arange(0, TOGETHER)[:, None] * (2 * HALF) + d
        a, b = tl.load(at), tl.load(at + HALF)
    else:
        x = turned(tl.load(qkv + token * STRIDE + column), turn, bias, of_head, TURN)
        a, b = tl.split(tl.permute(tl.reshape(x, [TOGETHER, 2, HALF]), [0, 2, 1]))
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if first < HEADS + KV_HEADS:
        if q_weight is not None:
            low, high = tl.load(q_weight + d), tl.load(q_weight + HALF + d)
            low = tl.where(first < HEADS, low, tl.load(k_weight + d))
            high = tl.where(first < HEADS, high, tl.load(k_weight + HALF + d))
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            inverse = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
            a = ((a * inverse).to(dtype) * low).to(dtype).to(tl.float32)
            b = ((b * inverse).to(dtype) * high).to(dtype).to(tl.float32)
        if cos is not None:
            rotated = (a * c - b * s).to(dtype).to(tl.float32)
            b = (b * c + a * s).to(dtype).to(tl.float32)
            a = rotated
        if K_KIND == "int4":
            a, b = _spread(a, b)
    if first < HEADS:
        out = q_out + (token * HEADS + head) * (2 * HALF) + d
        tl.store(out, a.to(dtype))
        tl.store(out + HALF, b.to(dtype))
    else:
        if slot >= 0:  # a padded row of a graph has nowhere to go
            if first < HEADS + KV_HEADS:
                _put(
                    a, b, k_cache, k_scale, slot, head - HEADS, KV_HEADS, BLOCK, K_KIND, GROUPS,
                    K_STEP, K_GRID, False,
                )  # fmt: skip
            else:
                _put(
                    a, b, v_cache, v_scale, slot, head - HEADS - KV_HEADS, KV_HEADS, BLOCK, V_KIND,
                    GROUPS, V_STEP, V_GRID, V_KIND != "model",
                )  # fmt: skip


@triton.jit
def _put(
    a, b, cache, scales, slot, head, KV_HEADS, BLOCK: tl.constexpr, KIND: tl.constexpr,
    GROUPS: tl.constexpr, STEP: tl.constexpr, GRID: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Both halves (heads, HALF) of a token's heads (heads, 1) to its slot of K or V.

    TURNED: tokens of a block lie side by side for each channel.
    """
    page = slot // BLOCK * KV_HEADS + head
    to = cache + page * STEP
    if KIND == "int4" or KIND == "dynamic":
        scales += page * GRID + slot % BLOCK
    if KIND == "int4":
        _store_int4(a, b, to, scales, slot, BLOCK, GROUPS, TURNED)
    else:
        _store(a, b, to, scales, slot, head, BLOCK, KIND, TURNED)


@triton.jit
def _spread(a, b):
    """Heads of two halves (heads, HALF), rotated as `anybit.kernels.kv.int4` has it."""
    HALF: tl.constexpr = a.shape[1]
    for i in tl.static_range(16):
        if 2**i < HALF:
            a, b = _butterfly(a, 2**i), _butterfly(b, 2**i)
    scale: tl.constexpr = (2 * HALF) ** -0.5
    return (a + b) * scale, (a - b) * scale


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr):
    """Sums of channels that lie STRIDE apart, and their differences."""
    HEADS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, [HEADS, SIZE // (2 * STRIDE), 2, STRIDE])
    a, b = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2]), [HEADS, SIZE])


@triton.jit
def _store_int4(
    a, b, to, grids, slot, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TURNED: tl.constexpr
):
    """Both halves of a token's heads in int4, with GROUPS grids each; see `_put`."""
    HALF: tl.constexpr = a.shape[1]
    d = tl.arange(0, HALF)[None, :]
    at = to + d * BLOCK + slot % BLOCK if TURNED else to + slot % BLOCK * HALF + d
    at_grid = grids + tl.arange(0, GROUPS)[None, :] * BLOCK
    code, word = _int4(a, GROUPS)
    code_b, word_b = _int4(b, GROUPS)
    tl.store(at_grid, word)
    tl.store(at_grid + GROUPS * BLOCK, word_b)
    tl.store(at, (code | (code_b << 4)).to(tl.uint8))


@triton.jit
def _int4(x, GROUPS: tl.constexpr):
    """Codes of x (heads, HALF) as 32-bit numbers; scales and lows (heads, GROUPS) as words."""
    HEADS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1]
    y = tl.reshape(x, [HEADS, GROUPS, HALF // GROUPS])
    low, most = tl.min(y, 2), tl.max(y, 2)
    scale = tl.div_rn(most - low, most * 0 + 15.0)
    scale = tl.maximum(scale, 5.9604644775390625e-08).to(tl.float16)  # fp16's least
    low = low.to(tl.float16)
    word = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    word |= low.to(tl.int16, bitcast=True).to(tl.int32) << 16
    y -= low.to(tl.float32)[:, :, None]
    code = tl.div_rn(y, scale.to(tl.float32)[:, :, None] + y * 0)
    code = code + 12582912.0 - 12582912.0
    code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
    return tl.reshape(code, [HEADS, HALF]), word


@triton.jit
def _store(
    a, b, to, scales, slot, head, BLOCK: tl.constexpr, KIND: tl.constexpr, TURNED: tl.constexpr
):
    """`_put`, quantized if the cache is int8.

    to (heads, 1): where the heads' block begins. scales: of the token, or static ones.
    """
    HALF: tl.constexpr = a.shape[1]
    d = tl.arange(0, HALF)[None, :]
    if TURNED:
        at = to + d * BLOCK + slot % BLOCK
        other = at + HALF * BLOCK
    else:
        at = to + slot % BLOCK * (2 * HALF) + d
        other = at + HALF
    if KIND == "model":
        a, b = a.to(to.dtype.element_ty), b.to(to.dtype.element_ty)
    elif KIND == "static":
        channel = scales + head * (2 * HALF) + d
        a, b = _int8(a, tl.load(channel)), _int8(b, tl.load(channel + HALF))
    else:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))[:, None]
        scale = tl.maximum(tl.div_rn(largest, largest * 0 + 127.0), 1e-10)
        tl.store(scales, scale)
        a, b = _int8(a, scale + a * 0), _int8(b, scale + b * 0)
    tl.store(at, a)
    tl.store(other, b)


@triton.jit
def _int8(x, scale):
    # 1.5 * 2**23 rounds to the nearest integer, ties to even, as torch.round does.
    q = tl.div_rn(x, scale) + 12582912.0 - 12582912.0
    return tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)


def write(
    qkv: Tensor | Unturned,
    cache: LayerCache,
    rope: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
    kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`Family.write`."""
    (_, kv_heads, block, _), dim = cache.k.shape, cache.head_dim
    together, n = math.gcd(heads, kv_heads, 4), (heads + 2 * kv_heads) * dim
    if kv is not None or together * dim % (size := rotated_block(n)):
        qkv, size = finished(qkv), 0
    qkv, *turn = read(qkv)
    tokens = len(qkv)
    q = qkv.new_empty(tokens, heads, dim)
    if tokens:
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        k, v = kv or (None, None)
        strides = [0 if x is None else x.stride(0) for x in (qkv, k, v)]
        _write[(tokens, (heads + 2 * kv_heads) // together)](
            qkv,
            k,
            v,
            *turn,
            q,
            *planes(cache),
            *(rope or (None, None)),
            positions,
            slots,
            q_norm,
            k_norm,
            *strides,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            BLOCK=block,
            **kinds(cache),
            TOGETHER=together,
            TURN=size,
            num_warps=together,
            **overlap(q.device),
        )
    return q


def planes(cache: LayerCache) -> tuple[Tensor | None, ...]:
    """A cache as kernels get it: K, V, and their scales, a scale and a low of int4 as one word."""
    k_scale, v_scale = (
        scale if scale is None or scale.dtype != torch.float16 else scale.view(torch.int32)
        for scale in (cache.k_scale, cache.v_scale)
    )
    return cache.k, cache.v, k_scale, v_scale


def kinds(cache: LayerCache) -> dict[str, Any]:
    """What else kernels know of a cache: STEP and GRID lie between one head's block and the next,
    in numbers of K and V and of their scales.
    """
    k, v = cache.kinds
    names = "K_STEP", "V_STEP", "K_GRID", "V_GRID"
    steps = {
        n: t.stride(1) if t is not None else 0 for n, t in zip(names, planes(cache), strict=True)
    }
    return {"K_KIND": k, "V_KIND": v, "GROUPS": cache.groups, **steps}


settle(globals())
