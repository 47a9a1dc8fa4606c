"""Logits after penalties, biases and bans: what a text holds is counted on the device."""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.engine.sequence import Sequence

if TYPE_CHECKING:
    from anybit.engine.sampler import Row

PROMPT = 1 << 30  # the bit of a token's count that says that the prompt holds it
# Penalties below TINY are one, and logits above HUGE are: so their quotients are finite in fp32.
TINY, HUGE = 1e-25, 1e30


class Tally:
    """How often a text holds each token, on the device: a step copies only what is new.

    places: where `tokens` and `counts` have a token. read: tokens of the text that are counted.
    """

    def __init__(self, seq: Sequence, device: torch.device):
        prompt = seq.prompt if seq.params.repetition_penalty != 1 else []
        self.places = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self.read = len(seq.prompt)
        self.tokens = numbers([*self.places], device)
        self.counts = torch.full_like(self.tokens, PROMPT)

    def take(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Make room for tokens that are not counted yet: these, and their places."""
        new = seq.tokens[self.read :]
        places = [self.places.setdefault(token, len(self.places)) for token in new]
        missing = len(self.places) - len(self.tokens)
        if missing > 0:
            more = (0, max(missing, len(self.tokens), 64))
            self.tokens, self.counts = pad(self.tokens, more), pad(self.counts, more)
        self.read = len(seq.tokens)
        return new, places


def penalize(logits: Tensor, rows: "list[Row]") -> Tensor:
    """Logits (B, V) after penalties and biases, and without ends that come too early."""
    out = logits
    index = [i for i, row in enumerate(rows) if row.seq.params.penalizes]
    if index:
        out = penalized(logits.float(), index, [rows[i] for i in index])
    biased = [i for i, row in enumerate(rows) if row.seq.params.logit_bias]
    if biased:
        changes = [fixed(rows[i].seq, "bias", logits) for i in biased]
        out = put(out.float(), biased, changes, accumulate=True)
    early = [i for i, row in enumerate(rows) if row.at < row.seq.params.min_tokens]
    if early:
        out = put(out, early, [fixed(rows[i].seq, "ends", logits) for i in early])
    return out


def penalized(logits: Tensor, index: list[int], rows: "list[Row]") -> Tensor:
    """Logits (B, V) in fp32 after the penalties of those rows."""
    params = [row.seq.params for row in rows]
    each = torch.tensor(
        [
            index,
            [max(p.repetition_penalty, TINY) for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
    ).to(logits.device, non_blocking=True)
    which, tokens, counts = counted(rows, logits.device)
    at, repetition, presence, frequency = each[:, which]
    at = at.long()
    x = logits[at, tokens]
    x = torch.where(x > 0, x / repetition, x * repetition).clamp_max_(HUGE)
    written = counts & (PROMPT - 1)
    x -= frequency * written + presence * (written > 0)
    return logits.index_put((at, tokens), x)


def counted(rows: "list[Row]", device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What the texts of rows hold, drafts included: rows, tokens and counts, (N,) each."""
    seqs = list(dict.fromkeys(row.seq for row in rows))
    try:
        count(seqs, device)
    except BaseException:  # they begin anew
        for seq in seqs:
            seq.tallies.pop(device, None)
        raise
    tallies = [row.seq.tallies[device] for row in rows]
    sizes = [len(tally.places) for tally in tallies]
    starts = [0, *accumulate(sizes)]
    tokens = torch.cat([t.tokens[:size] for t, size in zip(tallies, sizes, strict=True)])
    counts = torch.cat([t.counts[:size] for t, size in zip(tallies, sizes, strict=True)])
    which = numbers([*range(len(rows)), *sizes], device).view(2, -1)
    which = which[0].repeat_interleave(which[1], output_size=starts[-1])
    again, fresh = [], []
    for i, row in enumerate(rows):
        for token, times in Counter(row.draft).items():
            place = tallies[i].places.get(token)
            if place is None:
                fresh.append((i, token, times))
            else:
                again.append((starts[i] + place, times))
    if again:
        here, more = numbers(again, device).unbind(1)
        counts.index_put_((here,), more, accumulate=True)
    if fresh:
        pairs = zip((which, tokens, counts), numbers(fresh, device).unbind(1), strict=True)
        which, tokens, counts = (torch.cat(pair) for pair in pairs)
    return which, tokens, counts


def count(seqs: list[Sequence], device: torch.device) -> None:
    """Count the tokens that texts have got; one launch for those that have got one."""
    first: tuple[list[Tensor], list[int]] = [], []
    again: list[Tensor] = []
    for seq in seqs:
        if device not in seq.tallies:
            seq.tallies[device] = Tally(seq, device)
        tally = seq.tallies[device]
        known = len(tally.places)
        new, places = tally.take(seq)
        if len(new) == 1:
            here = slice(places[0], places[0] + 1)
            again.append(tally.counts[here])
            if places[0] == known:
                first[0].append(tally.tokens[here])
                first[1].append(new[0])
        elif new:
            at = numbers(places, device)
            tally.tokens[at] = numbers(new, device)
            tally.counts.index_put_((at,), tally.counts.new_ones(()), accumulate=True)
    if again:
        torch._foreach_add_(again, 1)
    if first[0]:
        torch._foreach_add_(*first)


def numbers(values: object, device: torch.device) -> Tensor:
    """Integers on a device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def fixed(seq: Sequence, kind: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and what their logits change by ("bias") or become ("ends"), kept on the device."""
    key = kind, logits.device, logits.shape[1]  # a model that drafts may be elsewhere
    if key not in seq.fixed:
        ends = seq.eos | frozenset(seq.params.stop_token_ids)
        changes: Mapping[int, float] = seq.params.logit_bias
        if kind == "ends":
            changes = dict.fromkeys(ends, float("-inf"))
        tokens = [token for token in changes if token < logits.shape[1]]
        values = torch.tensor([changes[token] for token in tokens])
        seq.fixed[key] = numbers(tokens, logits.device), values.to(logits.device)
    return seq.fixed[key]


def put(
    logits: Tensor, rows: list[int], changes: list[tuple[Tensor, Tensor]], accumulate: bool = False
) -> Tensor:
    """Logits (B, V) with some of these rows replaced, or with something added to them."""
    sizes = torch.tensor([len(tokens) for tokens, _ in changes])
    index = torch.tensor(rows).repeat_interleave(sizes).to(logits.device, non_blocking=True)
    tokens, values = (torch.cat(parts) for parts in zip(*changes, strict=True))
    return logits.index_put((index, tokens), values.to(logits.dtype), accumulate=accumulate)
