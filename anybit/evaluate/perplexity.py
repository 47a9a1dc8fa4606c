"""Perplexity, and how far a quantized model strays from the dense one: KL divergence, agreement.

Everything here is a function of token tensors and models. A model is anything that maps token ids
(1, T) to logits (1, T, V), or to an object that has them as `.logits`, as transformers models do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Model = Callable[[Tensor], Any]

ROWS = 256  # positions whose log-probabilities are held in fp32 at a time


@dataclass(frozen=True)
class Score:
    """What `score` measures. Means are over tokens; nll and kl are in nats per token.

    tokens: tokens that were scored. nll: mean negative log-likelihood.
    nll_error: its standard error, from the spread between windows.
    kl: mean KL(dense || model) over the whole vocabulary. agreement: the part of positions where
    both models find the same token most likely. Both are None without a dense model.
    """

    tokens: int
    nll: float
    nll_error: float
    kl: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity, to first order."""
        return self.perplexity * self.nll_error


@torch.inference_mode()
def score(
    model: Model,
    documents: Sequence[Tensor],
    *,
    window: int,
    stride: int | None = None,
    dense: Model | None = None,
    step: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Score a model on documents, and compare it with a dense one in the same pass.

    documents: token ids, each (T,). Every token but the first of each document is scored exactly
        once, with at least `window - stride` tokens of context, or all that precede it.
    window: tokens that the model sees at once. stride: tokens scored in a window after a
        document's first; half a window by default. A smaller one gives more context for more time.
    dense: the model to compare with; wrap it in `Remembered` to compare several with it.
    step: called with the number of tokens scored, after each window.

    Raises ValueError when there is nothing to score. Memory: one window's logits, and 256 rows in
    fp32.
    """
    sums: list[tuple[int, float, float, int]] = []
    for ids, first in windows(documents, window, stride):
        # The logits at a position predict the next token.
        target = ids[first:]
        logits = logits_of(model, ids)[first - 1 : -1]
        other = None if dense is None else logits_of(dense, ids)[first - 1 : -1]
        sums.append((len(target), *compare(logits, target, other)))
        step(len(target))
    if not sums:
        raise ValueError("nothing to score: every document is shorter than two tokens")
    counts, nll, kl, same = (torch.tensor(x, dtype=torch.float64) for x in zip(*sums, strict=True))
    tokens = counts.sum().item()
    mean = nll.sum().item() / tokens
    # Windows are the independent samples, weighted by their tokens (a ratio estimate).
    spread = (nll - mean * counts).square().sum().item()
    error = math.sqrt(spread * len(sums) / (len(sums) - 1)) / tokens if len(sums) > 1 else math.nan
    if dense is None:
        return Score(int(tokens), mean, error)
    return Score(int(tokens), mean, error, kl.sum().item() / tokens, same.sum().item() / tokens)


def windows(
    documents: Sequence[Tensor], window: int, stride: int | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Token ids of each window, and the index in it of the first token that it scores.

    The first window of a document scores all its tokens but the first, every later one the `stride`
    tokens at its end. The last window ends with the document.
    """
    stride = max(window // 2, 1) if stride is None else stride
    if not 1 <= stride < window:
        raise ValueError(f"stride={stride} is not in 1..{window - 1} (window={window})")
    for ids in documents:
        done = 1
        while done < len(ids):
            stop = min(window if done == 1 else done + stride, len(ids))
            start = max(0, stop - window)
            yield ids[start:stop], done - start
            done = stop


def compare(logits: Tensor, target: Tensor, dense: Tensor | None) -> tuple[float, float, int]:
    """Sums over positions of the NLL, of KL(dense || model), and of equal top tokens.

    logits, dense: (T, V) of any float dtype; target: (T,). Sums are fp64 over fp32 terms.
    """
    nll = kl = 0.0
    same = 0
    for at in range(0, len(target), ROWS):
        part = slice(at, at + ROWS)
        log_q = logits[part].float().log_softmax(-1)
        nll -= log_q.gather(1, target[part, None].to(log_q.device)).sum(dtype=torch.float64).item()
        if dense is not None:
            log_p = dense[part].to(log_q.device).float().log_softmax(-1)
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            # A row's sum is no less than zero but for rounding.
            terms = (log_p.exp() * (log_p - log_q)).sum(-1)
            kl += terms.clamp_min_(0).sum(dtype=torch.float64).item()
    return nll, kl, same


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """Logits (T, V) for token ids (T,)."""
    out = model(ids[None])
    return (out if isinstance(out, Tensor) else out.logits)[0]


class Remembered:
    """A model that keeps the logits of every window it has seen, to compare several with it.

    Keeps them in the model's own dtype, up to `limit` bytes, and runs the model again beyond that.
    """

    def __init__(self, model: Model, limit: int = 2 << 30):
        self.model, self.room = model, limit
        self.seen: dict[bytes, Tensor] = {}

    def __call__(self, ids: Tensor) -> Tensor:
        key = ids.cpu().numpy().tobytes()
        if key in self.seen:
            return self.seen[key]
        logits = logits_of(self.model, ids[0])[None]
        if logits.nbytes <= self.room:
            self.room -= logits.nbytes
            self.seen[key] = logits
        return logits


def excerpts(documents: Sequence[Tensor], tokens: int | None) -> list[Tensor]:
    """The middle of every document, so that all together have at most `tokens` tokens.

    One length for all; documents that are shorter come whole. The middle, because beginnings
    (licences, imports) are harder to predict than the rest. None takes everything.
    """
    if tokens is None or sum(map(len, documents)) <= tokens:
        return list(documents)
    if tokens < 2 * len(documents):
        raise ValueError(f"{tokens} tokens are too few for {len(documents)} documents")
    room, length = tokens, 0
    for left, size in zip(range(len(documents), 0, -1), sorted(map(len, documents)), strict=True):
        length = room // left
        if size >= length:
            break
        room -= size
    starts = [max(0, len(ids) - length) // 2 for ids in documents]
    return [ids[at : at + length] for ids, at in zip(documents, starts, strict=True)]
