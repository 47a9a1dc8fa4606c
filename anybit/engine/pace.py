"""How many tokens of prompts a step takes beside texts that are being written.

On a GPU, steps of some sizes are timed before the first request. A step with prompts takes as long
as one without, and what its size and the tokens before its own add to that. On a CPU all of this is
learned from the steps that run, since other work there changes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from anybit.engine.sequence import Sequence

FACTOR = 1.5  # of a step without prompts, that one with prompts may take
REST = 16  # steps with prompts, after which one without shows what that takes
SLOWEST = 6  # times as long as in the largest step beside texts that a prompt may take
LEAST = 1 / 32  # of a step without prompts, that any prompt is taken to add
NEXT = 1 / 8  # of a step of one token, that another is taken to add until steps have shown it


def mixed(old: float, new: float) -> float:
    """A time with a new one; what else the machine does is no reason to remember it."""
    return old + 0.2 * (min(new, 2 * old) - old)


@dataclass
class Budget:
    """What a step has left.

    tokens: in all. texts: texts being written that will still take some of them, `each` for their
    own one, as does a prompt's only one. pairs: of prompts' tokens and those before them, which a
    prompt's are read as often as for so many `extra` tokens. least: tokens of the next prompt in
    any case.
    """

    tokens: int
    texts: int = 0
    each: int = 1
    pairs: float = math.inf
    extra: float = 0.0
    least: int = 0

    @property
    def left(self) -> int:
        """Tokens for prompts."""
        return self.tokens - self.texts * self.each

    def take(self, seq: Sequence) -> int:
        """Tokens that a sequence gets; 0: none in this step."""
        if seq.writes:
            self.texts, self.tokens = self.texts - 1, self.tokens - self.each
            return 1
        tokens = min(seq.remaining, self.left) if self.left >= self.each else 0
        before = seq.computed
        if pairs(tokens, before, self.extra) > self.pairs:
            left = max(self.pairs - self.extra * before, 0.0)
            fitting = int(math.sqrt(before * before + 2 * left) - before)
            tokens = min(tokens, max(fitting, self.least))
        if tokens:
            self.pairs, self.least = self.pairs - pairs(tokens, before, self.extra), 0
            self.tokens -= max(tokens, self.each)
        return tokens


def pairs(tokens: int, before: int, extra: float) -> float:
    """Of a prompt's tokens in a step and those before them; see `Budget`."""
    return (tokens + extra) * before + tokens * tokens / 2


class Pace:
    """Chooses how much of prompts goes in a step beside texts.

    Args:
        seconds: Of a step that reads a prompt from its beginning, by its size.
        limit: Seconds that a step may take; None: FACTOR times one without prompts.
        plain: Seconds of a step without prompts by its texts, where steps go on being timed.
        guessed: Whether all seconds are multiples of an unknown time, which a step will show.
        pair: Seconds of a token for each one before it.
        extra: Tokens that take as long as to read what is before the first one in a step.
        least: Tokens of prompts that a step takes in any case.
        each: What the only token of a sequence takes of a step.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        limit: float | None,
        plain: Mapping[int, float] | None = None,
        pair: float = 0.0,
        extra: float = 0.0,
        least: int = 1,
        each: int = 1,
        guessed: bool = False,
    ):
        self.seconds, self.limit = dict(sorted(seconds.items())), limit
        self.pair, self.extra, self.least, self.each = pair, extra, max(least, each), each
        self.first = dict(plain or {0: 0.0})
        self.plain = dict(self.first)
        self.follows, self.guessed = plain is not None, guessed
        self.factor = 1.0  # of what prompts add, by what steps have taken lately
        self.rest = 0  # steps with prompts since one without

    def room(self, texts: int, computed: int, captured: bool = True) -> Budget:
        """What a step may take.

        computed: tokens of the first prompt that it would read. captured: whether such a step was
        timed. On a CPU others run from Python, which takes about as long for few tokens as for
        many, and so do those with more texts.
        """
        each, taken = self.each, texts * self.each
        if self.follows and (not captured or texts > max(self.first)):
            return Budget(taken + max(self.seconds), texts, each)
        if self.rest >= REST or (self.guessed and self.limit is not None):
            return Budget(taken, texts, each)
        sizes = [size for size in self.seconds if size >= taken + self.least]
        if not sizes:
            return Budget(taken + self.least, texts, each)
        plain = near(self.plain, texts)
        left = (FACTOR * plain if self.limit is None else self.limit) - plain
        costs = [
            self._cost(size, texts, pairs(size - taken, computed, self.extra)) for size in sizes
        ]
        at = max((i for i, cost in enumerate(costs) if cost <= left), default=0)
        if self.limit is None:
            fastest = costs[-1] / (sizes[-1] - taken)
            while at + 1 < len(sizes) and (
                (plain + costs[at]) / (sizes[at] - taken) > SLOWEST * fastest
            ):
                at += 1
        if not self.pair:
            return Budget(sizes[at], texts, each)
        spare = max(left, costs[at]) - self._cost(sizes[at], texts, 0)
        spare /= self.pair * self.factor
        return Budget(sizes[at], texts, each, spare, self.extra, self.least)

    def timed(self, texts: int, prompts: list[tuple[int, int]], seconds: float) -> None:
        """Note what a step has taken.

        prompts: tokens of each, and those before them.
        """
        if self.guessed:
            if not prompts:
                self._scale(seconds / near(self.plain, texts))
        elif not prompts:
            self.plain[texts] = mixed(near(self.plain, texts), seconds)
            self.rest = 0
        elif 0 < texts <= max(self.first):
            self.rest += 1
            rows = texts * self.each + sum(max(tokens, self.each) for tokens, _ in prompts)
            size = next((size for size in self.seconds if size >= rows), None)
            if size is not None:
                reads = sum(pairs(*prompt, self.extra) for prompt in prompts)
                more = self._cost(size, texts, reads) / self.factor
                ratio = (seconds - near(self.plain, texts)) / more
                self.factor = mixed(self.factor, max(ratio, 0.25))

    def _scale(self, by: float) -> None:
        """Take what was guessed for so many seconds."""
        self.guessed, self.rest, self.pair = False, 0, self.pair * by
        for times in (self.seconds, self.first, self.plain):
            times.update({n: by * time for n, time in times.items()})

    def _cost(self, size: int, texts: int, reads: float) -> float:
        """Seconds that prompts add to a step that becomes so large."""
        first = near(self.first, texts)
        more = max(self.seconds[size] - first, LEAST * first)
        return self.factor * (more + self.pair * reads)


def near(times: Mapping[int, float], count: int) -> float:
    """The time of the next smaller count that is known, or of the smallest."""
    return times[max((n for n in times if n <= count), default=min(times))]
