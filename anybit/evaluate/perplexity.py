"""Perplexity, and how far a quantized model strays from the dense one: KL divergence, agreement.

Everything here is a function of token tensors and models. A model is anything that maps token ids
(B, T) to logits (B, T, V), or to an object that has them as `.logits`, as transformers models do,
or to the likeliest tokens alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from anybit.errors import InvalidInput

Model = Callable[[Tensor], Any]

ROWS = 256  # positions whose log-probabilities are held in fp32 at a time
CACHED = 1 << 18  # of these numbers on a CPU at a time, so that they stay in its cache
DOCUMENTS = 12  # from so many on, documents are the samples that a standard error is taken from
COLUMNS = ("nll", "loss", "kl", "agreement", "kl_reverse", "top5")


@dataclass(frozen=True)
class Score:
    """What `score` measures. Means are over tokens; nll, kl and loss are in nats per token.

    tokens: tokens that were scored. nll: mean negative log-likelihood.
    nll_error: its standard error, from the spread between documents; between windows where there
        are fewer than `DOCUMENTS` of them.
    kl: mean KL(dense || model) over the whole vocabulary. agreement: the part of positions where
    both models find the same token most likely. loss: by how much nll exceeds the dense model's;
    loss_error: its standard error, from the differences of the same documents or windows, which
    is far smaller than nll_error. All four are None without a dense model.
    """

    tokens: int
    nll: float
    nll_error: float
    kl: float | None = None
    agreement: float | None = None
    loss: float | None = None
    loss_error: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity, to first order."""
        return self.perplexity * self.nll_error


@runtime_checkable
class Rows(Protocol):
    """A model that has run already: its logits at the tokens that `measure` scores, in order."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Logits (stop - start, V) that predict the scored tokens start..stop-1."""


@dataclass(frozen=True)
class Likeliest:
    """All that some engines tell of what follows each token: a few tokens of the vocabulary.

    Attributes:
        tokens: (..., K) ids; first that which does follow in the text, then the likeliest of the
            others in order; -1 where fewer are told.
        logp: (..., K) fp32, their log-probabilities; -inf at -1.
    """

    tokens: Tensor
    logp: Tensor

    def __getitem__(self, at: Any) -> "Likeliest":
        return Likeliest(self.tokens[at], self.logp[at])


@dataclass(frozen=True)
class Tokens:
    """What `measure` finds, one row for each of N scored tokens.

    values: (N, 6) fp32, the columns of `COLUMNS`; (N, 1) without a dense model. "loss" is by how
        much the NLL exceeds the dense model's, "kl" KL(dense || model), "kl_reverse"
        KL(model || dense), "agreement" 1 where both find the same token most likely, and "top5"
        how large a part of the five likeliest tokens they share.
    document, window: (N,) their numbers. context: (N,) tokens that the model saw before.
    """

    values: Tensor
    document: Tensor
    window: Tensor
    context: Tensor

    def samples(self) -> Tensor:
        """(N,) numbers from 0 on of what errors are taken from: documents, or windows where there
        are fewer than `DOCUMENTS` of them."""
        of = self.document.unique(return_inverse=True)[1]
        return of if int(of.max()) + 1 >= DOCUMENTS else self.window

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums (S, C) in fp64 over each sample of values (N, C), and tokens (S,) in it."""
        of = self.samples()
        total = torch.zeros(int(of.max()) + 1, values.shape[1], dtype=torch.float64)
        return total.index_add_(0, of, values.double()), of.bincount().double()

    def score(self) -> Score:
        sums, counts = self.sums(self.values)
        tokens = len(self.values)
        mean, error = mean_and_error(sums[:, 0], counts)
        if sums.shape[1] == 1:
            return Score(tokens, mean, error)
        divergence, agreement = (sums[:, i].sum().item() / tokens for i in (2, 3))
        return Score(
            tokens, mean, error, divergence, agreement, *mean_and_error(sums[:, 1], counts)
        )


def score(model: Model, documents: Sequence[Tensor], **options: Any) -> Score:
    """Means of what `measure` finds, which has the same arguments."""
    return measure(model, documents, **options).score()


@torch.inference_mode()
def measure(
    model: Model,
    documents: Sequence[Tensor],
    *,
    window: int,
    stride: int | None = None,
    batch: int = 1,
    dense: Model | Rows | None = None,
    counted: Sequence[Tensor] | None = None,
    begin: Sequence[int] = (),
    most: int | None = None,
    step: Callable[[int], None] = lambda tokens: None,
) -> Tokens:
    """Score a model on documents, and compare it with a dense one in the same pass.

    documents: token ids, each (T,). Every token but the first of each document is scored exactly
        once, with at least `window - stride` tokens of context, or all that precede it.
    counted: for each document which of its tokens count, (T,) bool; all by default. The others are
        context alone.
    begin: token ids that documents begin with (BOS). Every window of a document that does begins
        with them, too, in place of its first tokens.
    window: tokens that the model sees at once. stride: tokens scored in a window after a
        document's first; half a window by default. A smaller one gives more context for more time.
    batch: windows in one call of the models; shorter ones are padded at their end, which a causal
        model does not see.
    dense: the model to compare with; wrap it in `Remembered` to compare several with it. Or what
        it has said about the same windows.
    most: windows to score; all by default.
    step: called with the number of tokens scored, after each window.

    Raises ValueError when there is nothing to score, when the models have different vocabularies,
    and for logits that are not finite. Memory: the logits of a batch of windows, and 256 rows in
    fp32.
    """
    values, places, done = list[Tensor](), list[Tensor](), 0
    parts = itertools.islice(all_windows(documents, counted, window, stride, begin), most)
    while some := list(itertools.islice(parts, batch)):
        ids = torch.nn.utils.rnn.pad_sequence([part for _, part, _ in some], batch_first=True)
        logits = logits_of(model, ids)
        others = logits_of(dense, ids) if callable(dense) else None
        for row, (number, part, at) in enumerate(some):
            # The logits at a position predict the next token.
            target = part[1:][at]
            other = None if others is None else others[row, :-1][at]
            if isinstance(dense, Rows):
                other = dense.rows(done, done + len(target))
            own = logits[row, :-1][at]
            tell = told if isinstance(own, Likeliest) else compare
            values.append(tell(own, target, other).cpu())
            context = torch.arange(1, len(part))[at.cpu() if isinstance(at, Tensor) else at]
            place = torch.tensor((number, len(places))).expand(len(target), 2)
            places.append(torch.cat((place, context[:, None]), 1))
            done += len(target)
            step(len(target))
    if not values:
        what = "is shorter than two tokens" if counted is None else "has no answer"
        raise InvalidInput(f"nothing to score: every document {what}")
    return Tokens(torch.cat(values), *torch.cat(places).T)


def all_windows(
    documents: Sequence[Tensor],
    counted: Sequence[Tensor] | None,
    window: int,
    stride: int | None = None,
    begin: Sequence[int] = (),
) -> Iterator[tuple[int, Tensor, slice | Tensor]]:
    """The number of its document, and what `scored_windows` says, of each window to score."""
    masks: Sequence[Tensor | None] = counted or [None] * len(documents)
    for number, (document, mask) in enumerate(zip(documents, masks, strict=True)):
        for ids, at in scored_windows(document, mask, window, stride, begin):
            yield number, ids, at


def mean_and_error(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """The mean per token of sums over samples, and its standard error (of a ratio estimate).

    The error is nan when there is one sample only.
    """
    mean = sums.sum().item() / counts.sum().item()
    spread = (sums - mean * counts).square().sum().item()
    if len(sums) < 2:
        return mean, math.nan
    return mean, math.sqrt(spread * len(sums) / (len(sums) - 1)) / counts.sum().item()


def windows(
    ids: Tensor, window: int, stride: int | None = None, begin: Sequence[int] = ()
) -> Iterator[tuple[Tensor, int]]:
    """Token ids of each window of a document, and the index in it of the first token it scores.

    The first window scores all its tokens but the first, every later one the `stride` tokens at its
    end. The last window ends with the document. If the document begins with `begin`, later windows
    do so as well, in place of as many of the tokens that they do not score.
    """
    stride = max(window // 2, 1) if stride is None else stride
    if not 1 <= stride < window:
        raise InvalidInput(f"stride={stride} is not in 1..{window - 1} (window={window})")
    done = 1
    while done < len(ids):
        stop = min(window if done == 1 else done + stride, len(ids))
        start = max(0, stop - window)
        yield begun(ids[start:stop], ids, begin[: done - start]), done - start
        done = stop


def scored_windows(
    document: Tensor,
    mask: Tensor | None,
    window: int,
    stride: int | None,
    begin: Sequence[int] = (),
) -> Iterator[tuple[Tensor, slice | Tensor]]:
    """Token ids of each window with something to score, and which of its tokens but the first."""
    if mask is None:
        for ids, first in windows(document, window, stride, begin):
            yield ids, slice(first - 1, len(ids) - 1)
        return
    parts = zip(
        windows(document, window, stride, begin), windows(mask, window, stride), strict=True
    )
    for (ids, first), (own, _) in parts:
        at = own[first:].nonzero()[:, 0] + first - 1
        if len(at):
            yield ids, at


def compare(logits: Tensor, target: Tensor, dense: Tensor | None) -> Tensor:
    """The columns of `COLUMNS` at each position, (T, 6) fp32 on the logits' device.

    logits, dense: (T, V) of any float dtype; target: (T,). Without dense, the NLL alone: (T, 1).

    Raises InvalidInput for two sizes of a vocabulary, and for what is not finite.
    """
    vocabulary = logits.shape[1]
    if dense is not None and dense.shape[1] != vocabulary:
        raise InvalidInput(
            f"the models have different vocabularies: {vocabulary} logits, and {dense.shape[1]} of "
            "the dense model; no KL to compute"
        )
    step = ROWS if logits.is_cuda else max(1, min(ROWS, CACHED // vocabulary))
    out = []
    for at in range(0, len(target), step):
        part = slice(at, at + step)
        log_q = logits[part].float().log_softmax(-1)
        right = target[part, None].to(log_q.device)
        nll = -log_q.gather(1, right)[:, 0]
        columns = [nll]
        if dense is not None:
            log_p = dense[part].to(log_q.device).float().log_softmax(-1)
            loss = nll + log_p.gather(1, right)[:, 0]
            same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
            best = (x.topk(min(5, vocabulary), sorted=False).indices for x in (log_p, log_q))
            shared = (next(best)[:, :, None] == next(best)[:, None]).any(2).float().mean(1)
            ratio = log_p - log_q
            # In place: new memory costs more than the arithmetic. A row's sum is no less than zero
            # but for rounding.
            kl = log_p.exp_().mul_(ratio).sum(-1).clamp_min_(0)
            reverse = log_q.exp_().mul_(ratio).sum(-1).neg_().clamp_min_(0)
            columns += [loss, kl, same, reverse, shared]
        out.append(torch.stack(columns, 1))
    found = torch.cat(out)
    if not found.isfinite().all():
        raise InvalidInput(
            "a model's logits are not finite, so that its loss or KL is not: its weights are "
            "damaged, or overflow in this dtype"
        )
    return found


def told(likeliest: Likeliest, target: Tensor, dense: Tensor | None) -> Tensor:
    """As `compare`, of T positions whose likeliest tokens are known.

    Both divergences are of the tokens that are told and all others as one: lower bounds. The others
    have a millionth at least, which is what rounding leaves of their share.
    """
    tokens, log_q = likeliest.tokens, likeliest.logp.double()
    nll = -log_q[:, 0]
    if dense is None:
        return nll[:, None].float()
    if int(tokens.max()) >= dense.shape[1]:
        raise InvalidInput(
            f"the models have different vocabularies: token {int(tokens.max())}, and "
            f"{dense.shape[1]} logits of the dense model; no KL to compute"
        )
    full = dense.to(tokens.device).float().log_softmax(-1)
    log_p = full.gather(1, tokens.clamp_min(0)).double()
    log_p = log_p.masked_fill(tokens < 0, -torch.inf)
    loss = nll + log_p[:, 0]
    log_p, log_q = (torch.cat((x, others(x)), 1) for x in (log_p, log_q))
    ratio = (log_p - log_q).nan_to_num_(0.0)  # of two that are not told
    kl = (log_p.exp() * ratio).sum(1).clamp_min_(0)
    reverse = (log_q.exp() * ratio).sum(1).neg_().clamp_min_(0)
    count = min(5, dense.shape[1])
    own = tokens.gather(1, log_q[:, :-1].topk(min(count, tokens.shape[1])).indices)
    best = full.topk(count).indices
    shared = (best[:, :, None] == own[:, None]).any(2).double().mean(1)
    same = (best[:, 0] == own[:, 0]).double()
    return torch.stack((nll, loss, kl, same, reverse, shared), 1).float()


def others(logp: Tensor) -> Tensor:
    """The logarithm (T, 1) of what log-probabilities (T, K) leave to all other tokens."""
    return (1 - logp.exp().sum(1, keepdim=True)).clamp_min(1e-6).log()


def logits_of(model: Model, ids: Tensor) -> Any:
    """Logits (B, T, V) for token ids (B, T), or `Likeliest` tokens."""
    out = model(ids)
    return out if isinstance(out, Tensor | Likeliest) else out.logits


class Remembered:
    """A model that keeps the logits of all that it has seen, to compare several with it.

    Keeps them in the model's own dtype, up to `limit` bytes, and runs the model again beyond that.
    """

    def __init__(self, model: Model, limit: int = 2 << 30):
        self.model, self.room = model, limit
        self.seen: dict[tuple[int, bytes], Tensor] = {}

    def __call__(self, ids: Tensor) -> Tensor:
        key = len(ids), ids.cpu().numpy().tobytes()
        if key in self.seen:
            return self.seen[key]
        logits = logits_of(self.model, ids)
        if logits.nbytes <= self.room:
            self.room -= logits.nbytes
            self.seen[key] = logits
        return logits


def begun(part: Tensor, document: Tensor, begin: Sequence[int]) -> Tensor:
    """A part of a document, which begins with `begin` in place of its first tokens if the whole
    document begins so."""
    kept = document[: len(begin)]
    same = kept.tolist() == list(begin)
    return torch.cat((kept[: len(part)], part[len(kept) :])) if begin and same else part


def excerpts(
    documents: Sequence[Tensor], tokens: int | None, begin: Sequence[int] = ()
) -> list[Tensor]:
    """The middle of every document, so that all together have at most `tokens` tokens.

    One length for all; documents that are shorter come whole. The middle, because beginnings
    (licences, imports) are harder to predict than the rest. None takes everything. A document that
    begins with `begin` (BOS) keeps that before its excerpt.
    """
    if tokens is None or sum(map(len, documents)) <= tokens:
        return list(documents)
    if tokens < 2 * len(documents):
        raise InvalidInput(f"{tokens} tokens are too few for {len(documents)} documents")
    room, length = tokens, 0
    for left, size in zip(range(len(documents), 0, -1), sorted(map(len, documents)), strict=True):
        length = room // left
        if size >= length:
            break
        room -= size
    starts = [max(0, len(ids) - length) // 2 for ids in documents]
    return [
        begun(ids[at : at + length], ids, begin) for ids, at in zip(documents, starts, strict=True)
    ]
