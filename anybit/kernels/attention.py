"""What attention over the paged KV cache is given, and its definition in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.kernels.backend import Pairs
from anybit.kernels.scans import Ragged, Singles, Texts

if TYPE_CHECKING:
    from anybit.kernels.kv.cache import LayerCache

# Tokens of a prompt from which torch's attention takes half the time of our kernel (2 prompts of
# 1024 on an H200: 52 against 95 us), and what it takes to gather the pages is small.
LONG = 256


@dataclass(frozen=True)
class Batch:
    """One step's tokens (T of B sequences, those with a single token first), for attention.

    Of int32: positions (T,): of each token in its text. slots (T,): where its K and V go, as block
    * block_size + offset. tables (B, blocks): each sequence's blocks. contexts (B,): tokens of each
    sequence that the cache holds, with this step's. starts (B + 1,): where each sequence's tokens
    begin in T. rows (B,): where the states of each sequence lie, if layers keep any. stay (B,): how
    many tokens of each sequence no step can take back from it, of those before this step. On the
    host: queries and lengths: tokens of each sequence in this step, and contexts. decodes:
    sequences with one token. kept: of some sequences, rows that get the states behind so many of
    its tokens. owners (B,): of sequences with one token, the first with the same text, if some may
    be drafts, which lie behind it. wanted: as kept, on the device, as `Ragged` has it, where the
    host knows no texts.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    contexts: Tensor
    starts: Tensor
    queries: list[int]
    lengths: list[int]
    decodes: int
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    stay: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    kept: dict[int, dict[int, int]] = field(default_factory=dict)
    wanted: Tensor | None = None
    owners: Tensor | None = None

    def pairs(self, rows: int | None = None) -> Pairs | None:
        """Two rows of codes for sequences with one token, if any are; of `rows`, if given."""
        n, tokens = self.decodes, len(self.positions)
        if not n:
            return None
        return Pairs(self.starts[n : n + 1], tokens, tokens + n if rows is None else rows)

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
    def runs(self) -> list["Run"]:
        """What recurrences do: the sequences with one token, and the others."""
        n, out = self.decodes, []
        if self.wanted is not None:
            first = self.positions[self.starts[:-1].clamp_max(len(self.positions) - 1)]
            every = Ragged(self.starts, self.wanted)
            return [Run(every, self.rows, first, self.stay, slice(None), self.rows)]
        if n:
            rows = self.rows[:n]
            first, stay = self.positions[:n], self.stay[:n]
            out.append(Run(Singles(n), rows, first, stay, slice(0, n), rows))
        if n < len(self.queries):
            kept = {i - n: places for i, places in self.kept.items()}
            texts = Texts.cut(self.queries[n:], kept, self.rows.device)
            first = self.positions[self.starts[n:-1][texts.order]]
            rows = to = self.rows[n:][texts.order]
            if kept:
                own = [kept[i][passed] for i, passed in texts.saved]
                to = torch.cat([rows, torch.tensor(own, dtype=rows.dtype).to(rows.device)])
            out.append(Run(texts, rows, first, first, slice(n, None), to))
        return out

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


class Run(NamedTuple):
    """Sequences whose states advance together.

    rows: of states before. first: positions of first tokens. stay: as `Batch` has it. tokens: of
    the step. to: rows that get the states that a scan gives.
    """

    texts: Texts
    rows: Tensor
    first: Tensor
    stay: Tensor
    tokens: slice
    to: Tensor


# What a token sees, as transformers' masks say it: of batch, head, and the positions of queries and
# keys, tensors that are broadcast together.
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Scores(NamedTuple):
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (T, heads, head_dim), whose halves are the two coordinates."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def gathered(
    q: Tensor, cache: "LayerCache", batch: Batch, scores: Scores, out: Tensor | None = None
) -> Tensor:
    """Attention of queries (T, heads, head_dim) over what the cache holds of their sequences.

    The definition, in plain torch: pages are gathered, dequantized and given to torch's attention.
    """
    out = torch.empty_like(q) if out is None else out
    if batch.decodes:
        out[: batch.decodes] = decode(q[: batch.decodes], cache, batch, scores)
    prompts(q, cache, batch, scores, out)
    return out


def prompts(q: Tensor, cache: "LayerCache", batch: Batch, scores: Scores, out: Tensor) -> None:
    """Attention of the sequences with several queries, one after the other, into `out`."""
    start = batch.decodes
    for i in range(batch.decodes, len(batch.queries)):
        stop = start + batch.queries[i]
        out[start:stop] = prefill(q[start:stop], cache, batch, i, scores)
        start = stop


def decode(q: Tensor, cache: "LayerCache", batch: Batch, scores: Scores) -> Tensor:
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


def prefill(q: Tensor, cache: "LayerCache", batch: Batch, i: int, scores: Scores) -> Tensor:
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
        mask = q.new_ones(score.shape[2:], dtype=torch.bool).tril()
    score = score.masked_fill(~mask, float("-inf"))
    return score.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sinks as a key: 1 in a channel of its own, where queries hold sinks and other keys zero."""
    if mask is None:
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    own = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    k, v = (F.pad(x, (0, 1, 0, 1)) for x in (k, v))
    k[..., -1, -1] = 1
    return torch.cat([q, own], -1), k, v, F.pad(mask, (0, 1), value=True)
