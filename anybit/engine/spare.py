"""What a CPU does between requests: it records steps, until somebody asks for something."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anybit.engine.graphs import StepGraphs
from anybit.engine.pace import NEXT, Pace

log = logging.getLogger("anybit.engine")
TOGETHER = 8  # tokens for which what is before them is read once


class Wanted(BaseException):
    """Somebody waits. Not an Exception, which a model might handle."""


class Until(TorchDispatchMode):
    """Ends what runs inside at its next operator once somebody waits."""

    def __init__(self, wanted: Callable[[], bool]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted = wanted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for that

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), given: Any = None
    ) -> Any:
        if self.wanted():
            raise Wanted
        return function(*args, **(given or {}))


def record(every: Iterable[StepGraphs], wanted: Callable[[], bool]) -> bool:
    """Record the steps that no request has recorded; what is half done is dropped.

    Nothing of any text changes: recorded steps have no tokens here.

    Args:
        wanted: Says whether a request waits, which is then held for one operator at most.

    Returns:
        Whether nothing is left to do.
    """
    try:
        with torch.inference_mode():
            for graphs in every:
                for step in graphs.unrecorded():
                    with Until(wanted):
                        step()
    except Wanted:
        return False
    except Exception:  # a request that needs such a step will say so
        log.exception("a step cannot be recorded")
    return True


class Learned(Pace):
    """Follows steps that were replayed: one that was recorded meanwhile took longer."""

    def __init__(self, graphs: StepGraphs, *args: Any, **given: Any):
        super().__init__(*args, **given)
        self.graphs, self.captures = graphs, graphs.captures

    def timed(self, texts: int, prompts: list[tuple[int, int]], seconds: float) -> None:
        """See `Pace`."""
        before, self.captures = self.captures, self.graphs.captures
        if before == self.captures:
            super().timed(texts, prompts, seconds)


def learned(graphs: StepGraphs, limit: float | None, each: int) -> Pace:
    """A pace that begins with how steps usually compare, and learns how long they take.

    A layer's products of a token take about 12 * hidden^2 multiplications, and attention
    2 * hidden for each token before it.
    """
    assert graphs.prompts is not None
    longer = {n: 1 + NEXT * (n - 1) for n in {*graphs.sizes, *graphs.prompts.sizes}}
    seconds = {n: longer[n] for n in graphs.prompts.sizes}
    plain = {n: longer[n] for n in graphs.sizes}
    pair = NEXT / (6 * graphs.model.config.hidden_size)
    return Learned(graphs, seconds, limit, plain, pair, TOGETHER, each=each, guessed=True)
