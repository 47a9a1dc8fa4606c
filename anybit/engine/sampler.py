"""Logits to tokens, for a whole batch at once."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.engine.fused import likeliest
from anybit.engine.sequence import Logprob, Sequence
from anybit.engine.structured import constrain

INVALID = -1
GREEDY = 1e-5  # temperatures below it choose the likeliest token


Sampled = tuple[list[int], list[Logprob | None]]


def sample(logits: Tensor, seqs: list[Sequence]) -> tuple[Tensor, Callable[[], Sampled]]:
    """Choose a token for each sequence from its row of logits (B, V).

    Returns the tokens (B,) int32 on the device and a function that waits for them. What a sequence
    gets depends on its own row, parameters and random numbers alone, not on the rest of the batch:
    every one draws a single uniform number from its own generator, and the token is where the
    cumulated probabilities pass it. INVALID stands for a row with NaN or inf.
    """
    tokens = first = likeliest(logits, INVALID)
    adjusted = constrain(penalize(logits, seqs), [seq.matcher for seq in seqs])
    if adjusted is not logits:
        tokens = adjusted.argmax(-1)
    if any(seq.params.temperature > GREEDY for seq in seqs):
        tokens = draw(adjusted.float(), seqs, tokens)
    if tokens is not first:
        tokens = torch.where(first == INVALID, first, tokens.int())
    asked = logprobs(logits, tokens, seqs)
    arrived = to_host(tokens)

    def wait() -> Sampled:
        chosen = arrived()
        return chosen, asked(chosen)

    return tokens, wait


def to_host(x: Tensor) -> Callable[[], list[Any]]:
    """Start to copy a tensor to the host; the function waits for that, and for nothing after it."""
    if not x.is_cuda:
        return x.tolist
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = copies(x.device)  # beside the next step, which does not wait for it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy.copy_(x, non_blocking=True)
        event = stream.record_event()
    x.record_stream(stream)

    def wait() -> list[Any]:
        event.synchronize()
        return copy.tolist()

    return wait


@cache
def copies(device: torch.device) -> torch.cuda.Stream:
    """The stream on which tokens come back from a GPU."""
    return torch.cuda.Stream(device)


def penalize(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Logits (B, V) after penalties and biases, and without ends that come too early."""
    out = logits
    rows = [i for i, seq in enumerate(seqs) if seq.params.repetition_penalty != 1]
    if rows:
        logits = logits.float()
        held = torch.zeros(len(rows), logits.shape[1], dtype=torch.bool)
        for at, i in enumerate(rows):
            held[at, seqs[i].tokens] = True
        index = tensor(rows, logits.device, torch.int64)
        row = logits[index]
        penalty = tensor([seqs[i].params.repetition_penalty for i in rows], row.device)[:, None]
        penalized = torch.where(row > 0, row / penalty, row * penalty)
        held = held.to(row.device, non_blocking=True)
        out = logits.index_copy(0, index, torch.where(held, penalized, row))
    added = [
        (i, token, bias)
        for i, seq in enumerate(seqs)
        for token, bias in additions(seq).items()
        if token < logits.shape[1]
    ]
    if added:
        index = tensor([entry[:2] for entry in added], logits.device, torch.int64)
        values = tensor([entry[2] for entry in added], logits.device)
        out = out.float().index_put((index[:, 0], index[:, 1]), values, accumulate=True)
    early = [
        (i, token)
        for i, seq in enumerate(seqs)
        if seq.generated < seq.params.min_tokens
        for token in seq.eos | frozenset(seq.params.stop_token_ids)
        if token < logits.shape[1]
    ]
    if early:
        index = tensor(early, logits.device, torch.int64)
        out = out.index_put((index[:, 0], index[:, 1]), out.new_tensor(float("-inf")))
    return out


def additions(seq: Sequence) -> dict[int, float]:
    """What is added to the logits of some tokens: biases and penalties."""
    params = seq.params
    out = dict(params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token, count in seq.counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            out[token] = out.get(token, 0.0) - penalty
    return out


def draw(logits: Tensor, seqs: list[Sequence], greedy: Tensor) -> Tensor:
    """Tokens (B,) by temperature, top-k, top-p and min-p; where the temperature is 0, `greedy`."""
    params, vocabulary = [seq.params for seq in seqs], logits.shape[1]
    top_k = [min(p.top_k, vocabulary) or vocabulary for p in params]
    numbers = [  # one copy to the device for all
        [max(p.temperature, GREEDY) for p in params],
        [seq.random.random() for seq in seqs],
        [p.temperature <= GREEDY for p in params],
        top_k,
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    temperature, uniform, cold, *filters = tensor(numbers, logits.device)[..., None]
    probs = (logits / temperature).softmax(-1)
    filtered = [p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params]
    if any(filtered):
        rows = tensor(filtered, logits.device, torch.bool)[:, None]
        probs = torch.where(rows, keep(probs, max(top_k), *filters), probs)
    return torch.where(cold[:, 0].bool(), greedy, pick(probs, uniform))


def keep(probs: Tensor, most: int, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities (B, V) of the tokens that top-k, top-p and min-p leave; zeros elsewhere.

    The three are (B, 1); most: the largest top_k.
    """
    likeliest, order = probs.topk(most, dim=-1)
    ranks = torch.arange(likeliest.shape[1], device=probs.device)
    likeliest = likeliest.masked_fill(ranks >= top_k, 0)
    # top_p sees what top_k has left.
    before = likeliest.cumsum(-1) - likeliest
    out = (before >= top_p * likeliest.sum(-1, keepdim=True)) | (
        likeliest < min_p * likeliest[:, :1]
    )
    likeliest = likeliest.masked_fill(out, 0)
    # Back in the order of the vocabulary, so that a draw does not depend on the rows beside it.
    return torch.zeros_like(probs).scatter_(1, order, likeliest)


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Where the cumulated weights (B, V) pass a uniform number (B, 1) of their sum."""
    total = probs.cumsum(-1)
    at = torch.searchsorted(total, uniform * total[:, -1:], right=True)[:, 0]
    # Rounding may carry the search past the last token that has any probability.
    last = (probs > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(at, last)


def logprobs(
    logits: Tensor, tokens: Tensor, seqs: list[Sequence]
) -> Callable[[list[int]], list[Logprob | None]]:
    """Log probabilities for the sequences that asked for them, once the tokens are known."""
    counts = [seq.params.logprobs for seq in seqs]
    rows = [i for i, count in enumerate(counts) if count is not None]
    if not rows:
        return lambda chosen: [None] * len(chosen)
    index = tensor(rows, logits.device, torch.int64)
    logp = logits[index].float().log_softmax(-1)
    own = to_host(logp.gather(1, tokens[index].long()[:, None].clamp_min(0))[:, 0])
    most = max(counts[i] or 0 for i in rows)
    values, ids = (to_host(t) for t in logp.topk(min(most, logp.shape[1])))

    def read(chosen: list[int]) -> list[Logprob | None]:
        out: list[Logprob | None] = [None] * len(chosen)
        for i, logprob, top, tops in zip(rows, own(), ids(), values(), strict=True):
            count = counts[i] or 0
            out[i] = Logprob(chosen[i], logprob, tuple(zip(top[:count], tops[:count], strict=True)))
        return out

    return read


def tensor(values: list[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers on a device, without waiting for it."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
