"""Which tokens may come next, for all texts of a step that have a grammar."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.engine.structured import THREADS, Mask, Matcher

TURNS = itertools.count()
# Seconds that a step waits for masks that are computed beside it, and for those of grammars that
# have been quick so far: there may be many of them, on a busy machine.
PATIENCE, USUAL = 0.01, 0.05


def begin(logits: Tensor, matchers: list[Matcher | None]) -> Callable[[Tensor], Tensor]:
    """Start to compute the masks of rows of logits (B, V) that have a matcher.

    Returns a function of logits on the same device that waits for them, and gives -inf to tokens
    that a row's matcher does not allow; to all of a row whose mask is late. Until then no token may
    be taken.
    """
    rows = [i for i, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return lambda logits: logits
    # Of other memory, a copy of this size waits for the model's step.
    words = -(-logits.shape[1] // 32)
    bits = torch.empty(len(rows), words, dtype=torch.int32, pin_memory=logits.is_cuda)
    filled = fill([matcher for matcher in matchers if matcher is not None], bits)

    def constrain(logits: Tensor) -> Tensor:
        late = filled()
        known = bits.index_fill(0, torch.tensor(late), 0) if late else bits
        allowed = unpacked(known.to(logits.device, non_blocking=True))[:, : logits.shape[1]].bool()
        index = torch.tensor(rows).to(logits.device, non_blocking=True)
        masked = logits[index].masked_fill(~allowed, float("-inf"))
        return logits.index_copy(0, index, masked)

    return constrain


def unpacked(bits: Tensor) -> Tensor:
    """The bits (B, 32 * words) of words (B, words)."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits[:, :, None] >> shifts).bitwise_and_(1).flatten(1)


def fill(matchers: list[Matcher], bits: Tensor) -> Callable[[], list[int]]:
    """Start to set the bits (B, words) int32 of tokens that may come next, and to clear the others.

    Returns a function that waits for that, but not long, and returns the rows that are late: those
    matchers keep their masks for a later step. Masks are computed side by side, which leaves open
    how long each has taken. So one in turn is computed by itself, and beside the steps all of a
    grammar of which no mask is known, or of which one has taken long.
    """
    now, turn, rows = time.monotonic(), next(TURNS) % len(matchers), bits.unbind()
    alone: list[int] = []
    together: list[tuple[int, int]] = []  # sorted, so that threads begin with lanes of their own
    for at, matcher in enumerate(matchers):
        start(matcher)
        if matcher.thinking:
            rows[at].fill_(-1)
        elif matcher.mask is None and at == turn:
            alone.append(at)
        elif matcher.mask is None:
            together.append((id(matcher.lane), at))
    side_by_side = [(matchers[at].grammar, at) for _, at in sorted(together)]
    words, started = bits.shape[1] * bits.element_size(), threading.Event()
    thread, executor, _ = threads(os.getpid())

    def work() -> None:
        started.set()
        if side_by_side:
            executor.unsafe_compute_mask_ptr(side_by_side, bits.data_ptr(), words, len(bits))
        for at in alone:
            matchers[at].fill(rows[at])

    job = thread.submit(work)  # also what has failed is done before the next
    started.wait(PATIENCE)  # Python's lock is free only when the masks are on their way
    begun = [
        (at, matcher, matcher.mask or Mask(job, rows[at]))
        for at, matcher in enumerate(matchers)
        if not matcher.thinking
    ]

    def wait() -> list[int]:
        jobs = {mask.job for _, _, mask in begun}
        for some, most in ((jobs & {job}, USUAL), (jobs - {job}, PATIENCE)):
            left = max(now + most - time.monotonic(), 0)
            futures.wait(some, None if any(m.punctual for m in matchers) else left)
        late = [at for at, _, mask in begun if not mask.job.done()]
        for at, matcher, mask in begun:
            matcher.mask = mask if at in late else None
            if matcher.mask:
                matcher.found.slow = max(matcher.found.slow, 1)  # to find out whose fault it is
                continue
            mask.job.result()
            if mask.bits is not rows[at]:  # it was computed beside the steps
                rows[at].copy_(mask.bits)
            matcher.filled(rows[at])
        return late

    return wait


def start(matcher: Matcher) -> None:
    """Begin a text's next mask beside the steps, where it may take long."""
    if matcher.mask is None and matcher.beside and not matcher.ended:
        bits = torch.empty(matcher.words, dtype=torch.int32)
        matcher.mask = Mask(threads(os.getpid())[2].submit(matcher.fill, bits), bits)


def first_of(matchers: Iterable[Matcher | None]) -> None:
    """Wait a moment for the first mask that is computed beside the steps."""
    jobs = [matcher.mask.job for matcher in matchers if matcher and matcher.mask]
    futures.wait(jobs, PATIENCE, futures.FIRST_COMPLETED)


@cache
def threads(process: int) -> tuple[futures.ThreadPoolExecutor, Any, futures.ThreadPoolExecutor]:
    """A thread that waits for masks, those that compute them, and those beside the steps.

    No fork has them. Beside the steps there is time left only when these leave some.
    """
    from llguidance import LLExecutor

    beside = futures.ThreadPoolExecutor(max(THREADS // 4, 1), "anybit-slow-masks", yielding)
    return futures.ThreadPoolExecutor(1, "anybit-masks"), LLExecutor(THREADS), beside


def yielding() -> None:
    """Let the thread that calls it give way to others, where threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
