"""Logits to tokens, for a whole batch at once."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.engine.masks import begin
from anybit.engine.penalties import penalize
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Logprob, Row, SamplingParams
from anybit.kernels.between import of
from anybit.kernels.races import race

INVALID = -1
GREEDY = 1e-5  # temperatures below it choose the likeliest token


Sampled = tuple[list[int], list[Logprob | None]]
Masks = Callable[[Tensor], Tensor]


def rows_of(scheduled: list[Scheduled]) -> list[Row]:
    """What a step samples."""
    rows: list[Row] = []
    for s in scheduled:
        if s.samples:
            rows.append(Row(s.seq, s.first + s.tokens - len(s.seq.prompt)))
        for token in s.draft:
            rows.append(rows[-1].after(token))
    return rows


def masks_of(logits: Tensor, rows: list[Row]) -> Masks:
    """Start to compute what grammars allow; a function of the logits (B, V) that applies it."""
    # A text may have ended while its step began: nobody will read what comes of that.
    return begin(logits, [None if row.seq.finish else row.matcher for row in rows])


def sample(
    logits: Tensor, rows: list[Row], adjusted: Tensor | None = None, masks: Masks | None = None
) -> tuple[Tensor, Callable[[], Sampled]]:
    """Choose a token for each row of logits (B, V).

    adjusted (B, V): of `penalize`, and masks: of `masks_of`, if that was begun.

    Returns the tokens (B,) int32 on the device and a function that waits for them and for their log
    probabilities.
    """
    tokens = choose(logits, rows, adjusted, masks)
    asked = logprobs(logits, tokens, rows)
    arrived = to_host(tokens)

    def wait() -> Sampled:
        chosen = arrived()
        return chosen, asked(chosen)

    return tokens, wait


def choose(
    logits: Tensor, rows: list[Row], adjusted: Tensor | None = None, masks: Masks | None = None
) -> Tensor:
    """Tokens (B,) int32 by logits (B, V). adjusted, masks: as `sample` has them.

    INVALID stands for a row with NaN or inf, and for one of which nothing is left to choose.

    A token depends on its own row's logits, parameters and key alone, not on the rest of the batch.
    """
    tokens = of(logits).likeliest(logits, INVALID)
    masks = masks or masks_of(logits, rows)
    adjusted = masks(penalize(logits, rows) if adjusted is None else adjusted)
    if adjusted is not logits:
        tokens = torch.where(tokens == INVALID, tokens, of(adjusted).likeliest(adjusted, INVALID))
    if any(row.seq.params.temperature > GREEDY for row in rows):
        drawn = draw(adjusted, rows, tokens)
        tokens = torch.where(tokens == INVALID, tokens, drawn)
    return tokens


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


def draw(logits: Tensor, rows: list[Row], greedy: Tensor) -> Tensor:
    """Tokens (B,) int32 by temperature, top-k, top-p and min-p; `greedy` at temperature 0."""
    params, device = [row.seq.params for row in rows], logits.device
    warm = [i for i, p in enumerate(params) if p.temperature > GREEDY]
    ranked = [i for i in warm if params[i].top_k or params[i].top_p < 1]
    tokens = greedy
    for some in filter(None, (ranked, sorted({*warm} - {*ranked}))):
        every = len(some) == len(rows)
        at = tensor(some, device, torch.int64)
        keys = tensor([rows[i].seq.key(rows[i].at) for i in some], device, torch.int32)
        x, best = (logits, greedy) if every else (logits[at], greedy[at])
        drawn = among([params[i] for i in some], x, best, keys, some is ranked).int()
        tokens = drawn if every else tokens.index_copy(0, at, drawn)
    return tokens


def among(
    params: list[SamplingParams], logits: Tensor, greedy: Tensor, keys: Tensor, ranked: bool
) -> Tensor:
    """Tokens (B,) of rows of logits (B, V), whose likeliest are `greedy` (B,).

    ranked: all have top-k or top-p; behind top-k, only the likeliest tokens are looked at. Else
    none has.
    """
    vocabulary = logits.shape[1]
    top_k = [min(p.top_k, vocabulary) or vocabulary for p in params]
    numbers = [[p.temperature for p in params], top_k, [p.top_p for p in params]]
    numbers.append([p.min_p for p in params])
    temperature, *filters = tensor(numbers, logits.device)[..., None]
    if not ranked:
        return of(logits).drawn(logits, greedy, temperature, filters[2].log(), keys)
    likeliest, order = logits.topk(max(top_k), dim=-1)
    likeliest = likeliest.float()
    weights = ((likeliest - likeliest[:, :1]) / temperature).exp()
    return order.gather(1, race(keep(weights, *filters), keys, order)[:, None])[:, 0]


def keep(likeliest: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights (B, K) of the likeliest tokens, or zeros where top-k, top-p and min-p leave them out.

    The three are (B, 1); the first weight is 1.
    """
    ranks = torch.arange(likeliest.shape[1], device=likeliest.device)
    likeliest = likeliest.masked_fill(ranks >= top_k, 0)
    # top_p sees what top_k has left.
    before = likeliest.cumsum(-1) - likeliest
    out = (before >= top_p * likeliest.sum(-1, keepdim=True)) | (likeliest < min_p)
    out[:, 0] = False  # the likeliest token stays, also for a top_p that is 0 in fp32
    return likeliest.masked_fill(out, 0)


def logprobs(
    logits: Tensor, tokens: Tensor, texts: list[Row]
) -> Callable[[list[int]], list[Logprob | None]]:
    """Log probabilities for the sequences that asked for them, once the tokens are known."""
    counts = [text.seq.params.logprobs for text in texts]
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
