"""Logits to tokens, for a whole batch at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.engine.sequence import Logprob, SamplingParams, Sequence

INVALID = -1
GREEDY = 1e-5  # temperatures below it choose the likeliest token


Sampled = tuple[list[int], list[Logprob | None]]


def sample(logits: Tensor, seqs: list[Sequence]) -> Callable[[], Sampled]:
    """Choose a token for each sequence from its row of logits (B, V).

    Returns a function that waits for the tokens. What a sequence gets depends on its own row,
    parameters and random numbers alone, not on the rest of the batch: every one draws a single
    uniform number from its own generator, and the token is where the cumulated probabilities pass
    it. INVALID stands for a row with NaN or inf.
    """
    logits = logits.float()
    adjusted = penalize(logits, seqs)
    tokens = adjusted.argmax(-1)
    if any(seq.params.temperature > GREEDY for seq in seqs):
        greedy = tensor([seq.params.temperature <= GREEDY for seq in seqs], logits)
        tokens = torch.where(greedy.bool(), tokens, draw(adjusted, seqs))
    tokens = torch.where(logits.amax(-1).isfinite(), tokens, INVALID)

    def wait() -> Sampled:
        chosen = tokens.tolist()  # the step's one wait for the device
        return chosen, logprobs(logits, tokens, chosen, seqs)

    return wait


def penalize(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Logits (B, V) after repetition penalties, and without ends that come too early."""
    out = logits
    rows = [i for i, seq in enumerate(seqs) if seq.params.repetition_penalty != 1]
    if rows:
        held = torch.zeros(len(rows), logits.shape[1], dtype=torch.bool)
        for at, i in enumerate(rows):
            held[at, seqs[i].tokens] = True
        index = torch.tensor(rows, device=logits.device)
        row = logits[index]
        penalty = tensor([seqs[i].params.repetition_penalty for i in rows], logits)[:, None]
        penalized = torch.where(row > 0, row / penalty, row * penalty)
        out = logits.index_copy(0, index, torch.where(held.to(row.device), penalized, row))
    early = [
        (i, token)
        for i, seq in enumerate(seqs)
        if seq.generated < seq.params.min_tokens
        for token in seq.eos | frozenset(seq.params.stop_token_ids)
        if token < logits.shape[1]
    ]
    if early:
        index = torch.tensor(early, device=logits.device)
        out = out.index_put((index[:, 0], index[:, 1]), out.new_tensor(float("-inf")))
    return out


def draw(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Sampled tokens (B,), by temperature, top-k, top-p and min-p."""
    params = [seq.params for seq in seqs]
    temperature = tensor([max(p.temperature, GREEDY) for p in params], logits)[:, None]
    probs = (logits / temperature).softmax(-1)
    uniform = tensor([seq.random.random() for seq in seqs], logits)[:, None]
    filtered = [p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params]
    if any(filtered):
        rows = tensor(filtered, logits).bool()[:, None]
        probs = torch.where(rows, keep(probs, params), probs)
    return pick(probs, uniform)


def keep(probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities (B, V) of the tokens that top-k, top-p and min-p leave; zeros elsewhere."""
    vocabulary = probs.shape[1]
    top_k = [min(p.top_k, vocabulary) or vocabulary for p in params]
    likeliest, order = probs.topk(max(top_k), dim=-1)
    ranks = torch.arange(likeliest.shape[1], device=probs.device)
    likeliest = likeliest.masked_fill(ranks >= tensor(top_k, probs)[:, None], 0)
    # top_p sees what top_k has left.
    before = likeliest.cumsum(-1) - likeliest
    reach = tensor([p.top_p for p in params], probs)[:, None] * likeliest.sum(-1, keepdim=True)
    min_p = tensor([p.min_p for p in params], probs)[:, None] * likeliest[:, :1]
    likeliest = likeliest.masked_fill((before >= reach) | (likeliest < min_p), 0)
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
    logits: Tensor, tokens: Tensor, chosen: list[int], seqs: list[Sequence]
) -> list[Logprob | None]:
    """Log probabilities for the sequences that asked for them."""
    out: list[Logprob | None] = [None] * len(seqs)
    rows = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
    if not rows:
        return out
    index = torch.tensor(rows, device=logits.device)
    logp = logits[index].log_softmax(-1)
    own = logp.gather(1, tokens[index][:, None].clamp_min(0))[:, 0].tolist()
    most = max(seqs[i].params.logprobs or 0 for i in rows)
    values, ids = (t.tolist() for t in logp.topk(min(most, logp.shape[1])))
    for at, i in enumerate(rows):
        count = seqs[i].params.logprobs or 0
        top = tuple(zip(ids[at][:count], values[at][:count], strict=True))
        out[i] = Logprob(chosen[i], own[at], top)
    return out


def tensor(values: list, like: Tensor) -> Tensor:
    """Numbers as a tensor of the dtype and on the device of another."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)
