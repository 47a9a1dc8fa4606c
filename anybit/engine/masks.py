"""Which tokens may come next, for all texts of a step that have a grammar."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.engine.structured import MASK, THREADS, Matcher

TURNS = itertools.count()


def begin(logits: Tensor, matchers: list[Matcher | None]) -> Callable[[Tensor], Tensor]:
    """Start to compute the masks of rows of logits (B, V) that have a matcher.

    Returns a function of logits on the same device that waits for them, and gives -inf to tokens
    that a row's matcher does not allow. Until then no token may be taken.
    """
    rows = [i for i, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return lambda logits: logits
    # Of other memory, a copy of this size waits for the model's step.
    words = -(-logits.shape[1] // 32)
    bits = torch.empty(len(rows), words, dtype=torch.int32, pin_memory=logits.is_cuda)
    filled = fill([matcher for matcher in matchers if matcher is not None], bits)

    def constrain(logits: Tensor) -> Tensor:
        filled()
        allowed = unpacked(bits.to(logits.device, non_blocking=True))[:, : logits.shape[1]].bool()
        index = torch.tensor(rows).to(logits.device, non_blocking=True)
        masked = logits[index].masked_fill(~allowed, float("-inf"))
        return logits.index_copy(0, index, masked)

    return constrain


def unpacked(bits: Tensor) -> Tensor:
    """The bits (B, 32 * words) of words (B, words)."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits[:, :, None] >> shifts).bitwise_and_(1).flatten(1)


def fill(matchers: list[Matcher], bits: Tensor) -> Callable[[], None]:
    """Start to set the bits (B, words) int32 of tokens that may come next, and to clear the others.

    Returns a function that waits for that. Masks are computed side by side, which leaves open how
    long each has taken. So one in turn is computed by itself, and all of a grammar of which no mask
    is known, or whose last one took long.
    """
    turn = next(TURNS) % len(matchers)
    alone: list[int] = []
    together: list[tuple[int, int]] = []  # sorted, so that threads begin with lanes of their own
    for at, matcher in enumerate(matchers):
        if matcher.thinking:
            bits[at].fill_(-1)
        elif at == turn or matcher.found.last > MASK:
            alone.append(at)
        elif not matcher.found.error:
            together.append((id(matcher.lane), at))
    jobs = [(matchers[at].grammar, at) for _, at in sorted(together)]
    words, started = bits.shape[1] * bits.element_size(), threading.Event()
    thread, executor = threads(os.getpid())

    def work() -> None:
        started.set()
        if jobs:
            executor.unsafe_compute_mask_ptr(jobs, bits.data_ptr(), words, len(bits))
        for at in alone:
            matchers[at].fill(bits[at], 1 / len(matchers))

    job = thread.submit(work)  # also what has failed is done before the next
    started.wait()  # Python's lock is free only when the masks are on their way

    def wait() -> None:
        job.result()
        for at, matcher in enumerate(matchers):
            if not matcher.thinking:
                matcher.filled(bits[at])

    return wait


@cache
def threads(process: int) -> tuple[ThreadPoolExecutor, Any]:
    """A thread that waits for masks, and those that compute them, which no fork has."""
    from llguidance import LLExecutor

    return ThreadPoolExecutor(1, "anybit-masks"), LLExecutor(THREADS)
