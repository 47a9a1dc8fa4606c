"""The paged KV cache, and attention over it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.engine import int4
from anybit.engine.fused import compiled, rms_norm
from anybit.kernels.backend import has_triton

INT8_LARGEST = 127.0
# Tokens of a prompt from which torch's attention takes half the time of our kernel (2 prompts of
# 1024 on an H200: 52 against 95 us), and what it takes to gather the pages is small.
LONG = 256
ALIGNED = 64  # bytes, as torch has it


@dataclass(frozen=True)
class Batch:
    """One step's tokens (T of B sequences, those with a single token first), for attention.

    Of int32: positions (T,): of each token in its text. slots (T,): where its K and V go, as block
    * block_size + offset. tables (B, blocks): each sequence's blocks. contexts (B,): tokens of each
    sequence that the cache holds, with this step's. starts (B + 1,): where each sequence's tokens
    begin in T. On the host: queries and lengths: tokens of each sequence in this step, and
    contexts. decodes: sequences with one token.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    contexts: Tensor
    starts: Tensor
    queries: list[int]
    lengths: list[int]
    decodes: int

    # What layers ask for, once for all of them.

    @cached_property
    def single(self) -> "Part":
        """The sequences with one token."""
        n = self.decodes
        return Part(self.tables[:n], self.contexts[:n], self.starts[: n + 1], 1)

    @cached_property
    def several(self) -> "Part":
        """The others."""
        n = self.decodes
        longest = max(self.queries[n:], default=0)
        return Part(self.tables[n:], self.contexts[n:], self.starts[n:], longest)

    @cached_property
    def whole(self) -> bool:
        """Whether the others are prompts that begin in this step, all of them long."""
        pairs = zip(self.queries[self.decodes :], self.lengths[self.decodes :], strict=False)
        return all(q == length and q >= LONG for q, length in pairs)


class Part(NamedTuple):
    """Some of a step's sequences; see `Batch`. longest: the most tokens of one in this step."""

    tables: Tensor
    contexts: Tensor
    starts: Tensor
    longest: int


# What a token sees, as transformers' masks say it: of batch, head, and the positions of queries and
# keys, tensors that are broadcast together.
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Scores:
    """How a layer's queries weigh keys.

    scale: of the products. window: tokens that a token sees, itself included; None: all before it.
    softcap: scores become softcap * tanh(score / softcap). sinks (heads,): scores of one more key
    of each head, whose value is zero. mask: what tokens see, where that is no window.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    mask: Mask | None = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`; on a CPU, memory that the system gives when it is first written.

    torch writes its zeros: a GiB of cache would take up to two seconds, and a GiB, before anything
    is kept in it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + ALIGNED, np.uint8))
    first = -memory.data_ptr() % ALIGNED
    return memory[first : first + size].view(dtype).view(shape)


@dataclass
class LayerCache:
    """K and V of one layer, (blocks, kv_heads, block_size, head_dim), in a dtype, int8 or int4.

    int8 has scales: static ones of each channel (kv_heads, head_dim), or dynamic ones of each
    token and head (blocks, kv_heads, block_size). int4 has two codes in a byte, and scales and
    lows (blocks, kv_heads, groups, block_size, 2); K is rotated (`anybit.engine.int4`). V in int8
    or int4 on a GPU is (blocks, kv_heads, head_dim, block_size): a matrix unit sums over tokens,
    and wants bytes that it sums side by side.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        self.fused = usable(self.k)  # Triton's kernels take it
        self.native = usable_on_cpu(self.k)

    @property
    def turned(self) -> bool:
        """Whether V's tokens lie side by side."""
        return self.v_scale is not None and not self.native

    @classmethod
    def empty(
        cls,
        blocks: int,
        heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> "LayerCache":
        """A cache of zeros. dtype: the model's, int8 or INT4. scales: static ones, for int8."""
        if dtype == int4.INT4:
            int4.check_head_dim(head_dim)
            head_dim //= 2
        shape = (blocks, heads, block_size, head_dim)
        k, v = (zeros(shape, dtype, device) for _ in range(2))
        if dtype not in (torch.int8, int4.INT4):
            return cls(k, v)
        if not usable_on_cpu(k):
            v = v.view(blocks, heads, head_dim, block_size)
        if dtype == int4.INT4:
            k_scale, v_scale = (
                zeros((blocks, heads, groups, block_size, 2), torch.half, device)
                for groups in (int4.K_GROUPS, int4.V_GROUPS)
            )
        elif scales is not None:
            k_scale, v_scale = (s.to(device, torch.float32) for s in scales)
        else:
            k_scale, v_scale = (torch.ones(shape[:3], device=device) for _ in range(2))
        return cls(k, v, k_scale, v_scale)

    @property
    def packed(self) -> bool:
        """Whether it is in int4."""
        return self.k.dtype == int4.INT4

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.packed else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, and of scales that belong to tokens."""
        planes = (self.k, self.v) if self.static else (self.k, self.v, self.k_scale, self.v_scale)
        return sum(t.nbytes for t in planes if t is not None)

    @property
    def static(self) -> bool:
        """Whether the scales belong to channels and were known before."""
        return self.k_scale is not None and self.k_scale.ndim == 2

    @property
    def values(self) -> Tensor:
        """V as (blocks, kv_heads, block_size, head_dim)."""
        return self.v.transpose(2, 3) if self.turned else self.v

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write K and V (T, kv_heads, head_dim) of tokens to their slots."""
        block_size = self.k.shape[2]
        block, offset = slots // block_size, slots % block_size
        k = int4.spread(k) if self.packed else k
        for cache, scale, x in ((self.k, self.k_scale, k), (self.values, self.v_scale, v)):
            if scale is None:
                cache[block, :, offset] = x
            elif self.static:
                cache[block, :, offset] = round_int8(x.float() / scale)
            elif self.packed:
                codes, grid = int4.encode(x, scale.shape[2])
                cache[block, :, offset] = codes
                scale[block, :, :, offset] = grid
            else:
                # Scales of zeros would divide by zero; any other scale keeps zeros as they are.
                token = (x.float().abs().amax(-1) / INT8_LARGEST).clamp_min(1e-10)
                cache[block, :, offset] = round_int8(x.float() / token[..., None])
                scale[block, :, offset] = token

    def load(self, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of the blocks in `table` (..., blocks): (..., kv_heads, tokens, head_dim).

        K in int4 is rotated, and for queries that are, too.
        """
        out = []
        for cache, scale in ((self.k, self.k_scale), (self.values, self.v_scale)):
            x = cache[table]
            if scale is not None and self.packed:
                x = int4.decode(x, scale[table].transpose(-3, -2)).to(dtype)
            elif scale is not None:
                s = scale[:, None, :] if self.static else scale[table][..., None]
                x = x.to(dtype) * s.to(dtype)
            out.append(x.transpose(-4, -3).flatten(-3, -2))
        return out[0], out[1]


def usable(cache: Tensor) -> bool:
    """Whether Triton's kernels can work on a cache."""
    if cache.device.type != "cuda" or not has_triton():
        return False
    from anybit.kernels.triton.attention import refuse

    return refuse(cache) is None


def usable_on_cpu(cache: Tensor) -> bool:
    """Whether kernels that LLVM compiles can work on a cache."""
    if not compiled(cache):
        return False
    from anybit.kernels.native.attention import refuse

    return refuse(cache) is None


def round_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)


def attention(
    qkv: Tensor,
    heads: int,
    cache: LayerCache,
    batch: Batch,
    rope: tuple[Tensor, Tensor] | None,
    scores: Scores,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """From projections (T, (heads + 2 kv_heads) * head_dim) to the output (T, heads, head_dim).

    rope: cosines and sines of all positions; None: Q and K are rotated already, and no kernel is
    to be used. norms: RMSNorm weights of Q's and K's heads, and the epsilon.

    Always attends to what went into the cache and never to K and V before that, so that neither
    chunks of a prompt nor cached prefixes nor preemption change a result.
    """
    if cache.fused and rope is not None:
        from anybit.kernels.triton import attention as kernels

        planes = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        q = kernels.write(qkv, planes, rope, batch.positions, batch.slots, heads, norms)
        if scores.softcap is not None or scores.mask is not None:  # the kernels have none
            return gathered(q, cache, batch, scores)
        how, sinks = (scores.scale, scores.window), scores.sinks
        out, n = torch.empty_like(q), batch.decodes
        if n:
            kernels.attend(q[:n], planes, *batch.single, *how, out=out[:n], sinks=sinks)
        # Torch's kernels are faster for whole prompts. A graph does not know its prompts' lengths.
        if batch.whole and scores.window is None and scores.sinks is None:
            prompts(q, cache, batch, scores, out)
        elif len(batch.queries) > n:
            kernels.attend(q, planes, *batch.several, *how, out=out, sinks=sinks)
        return out
    if cache.native and rope is not None:
        return on_cpu(qkv, heads, cache, batch, rope, scores, norms)
    kv_heads = cache.k.shape[1]
    q, k, v = qkv.unflatten(1, (-1, cache.head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    if rope is not None:
        cos, sin = (table[batch.positions, None] for table in rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    cache.store(k, v, batch.slots)
    q = int4.spread(q).to(q.dtype) if cache.packed else q
    return gathered(q, cache, batch, scores)


def on_cpu(
    qkv: Tensor,
    heads: int,
    cache: LayerCache,
    batch: Batch,
    rope: tuple[Tensor, Tensor],
    scores: Scores,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """`attention` by the kernels that LLVM compiles; by torch's for prompts."""
    from anybit.kernels.native import attention as kernels

    planes = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    q = kernels.write(qkv, planes, rope, batch.positions, batch.slots, heads, norms)
    n, how = batch.decodes, (scores.scale, scores.window, scores.softcap, scores.sinks)
    longest = batch.tables.shape[1] * cache.k.shape[2]
    first = kernels.attend(q[:n], planes, batch.single.tables, batch.single.contexts, longest, *how)
    if n == len(batch.queries):
        return first
    out = torch.empty_like(q)
    out[:n] = first
    prompts(q, cache, batch, scores, out)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (T, heads, head_dim), whose halves are the two coordinates."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def gathered(q: Tensor, cache: LayerCache, batch: Batch, scores: Scores) -> Tensor:
    """Attention of queries (T, heads, head_dim) over what the cache holds of their sequences.

    The definition, in plain torch: pages are gathered, dequantized and given to torch's attention.
    """
    out = torch.empty_like(q)
    if batch.decodes:
        out[: batch.decodes] = decode(q[: batch.decodes], cache, batch, scores)
    prompts(q, cache, batch, scores, out)
    return out


def prompts(q: Tensor, cache: LayerCache, batch: Batch, scores: Scores, out: Tensor) -> None:
    """Attention of the sequences with several queries, one after the other, into `out`."""
    start = batch.decodes
    for i in range(batch.decodes, len(batch.queries)):
        stop = start + batch.queries[i]
        out[start:stop] = prefill(q[start:stop], cache, batch, i, scores)
        start = stop


def decode(q: Tensor, cache: LayerCache, batch: Batch, scores: Scores) -> Tensor:
    """One query for each of the first sequences, padded to the longest context."""
    longest = max(batch.lengths[: len(q)])
    blocks = -(-longest // cache.k.shape[2])
    k, v = cache.load(batch.tables[: len(q), :blocks], q.dtype)
    context = batch.contexts[: len(q), None]
    at = torch.arange(k.shape[2], device=q.device)
    mask = at < context
    if scores.window is not None:
        mask &= at >= context - scores.window
    if scores.mask is not None:
        mask &= seen(scores.mask, context - 1, at[None])
    return sdpa(q[:, :, None], k, v, mask[:, None, None], scores)[:, :, 0]


def prefill(q: Tensor, cache: LayerCache, batch: Batch, i: int, scores: Scores) -> Tensor:
    """The queries of sequence i: the last tokens of its context."""
    length, count = batch.lengths[i], len(q)
    blocks = -(-length // cache.k.shape[2])
    k, v = (x[:, :length] for x in cache.load(batch.tables[i, :blocks], q.dtype))
    mask, window = None, scores.window
    short = window is not None and window < length
    if count != length or short or scores.mask is not None:
        at = torch.arange(length, device=q.device)
        own = at[length - count :, None]
        mask = at <= own
        if window is not None:
            mask &= at > own - window
        if scores.mask is not None:
            mask &= seen(scores.mask, own, at[None])
    return sdpa(q.transpose(0, 1)[None], k[None], v[None], mask, scores)[0].transpose(0, 1)


def seen(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """What tokens at positions `queries` see of `keys`, broadcast together."""
    zero = keys.new_zeros(())
    return torch.as_tensor(mask(zero, zero, queries, keys), device=keys.device)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Grouped-query attention (B, heads, T, head_dim); without a mask, a causal one."""
    scale, cap = scores.scale, scores.softcap
    if scores.sinks is not None:
        q, k, v, mask = with_sinks(q, k, v, mask, scores.sinks / scale)
        out = sdpa(q, k, v, mask, Scores(scale, softcap=cap))
        return out[..., :-1]
    if cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = (q @ k.transpose(2, 3) * scale / cap).tanh() * cap
    if mask is None:
        mask = torch.ones(score.shape[2:], dtype=torch.bool, device=q.device).tril()
    score = score.masked_fill(~mask, float("-inf"))
    return score.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sinks as a key: 1 in a channel of its own, where queries hold sinks and other keys zero."""
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    own = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    k, v = (F.pad(x, (0, 1, 0, 1)) for x in (k, v))
    k[..., -1, -1] = 1
    return torch.cat([q, own], -1), k, v, F.pad(mask, (0, 1), value=True)
