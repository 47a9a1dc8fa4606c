"""Speculative decoding: tokens that may come next run in one step with the last one of a text.

A drafter guesses tokens. The model runs them behind the text, the sampler chooses a token after
each, and the text takes its choices up to the first that differs from the guess. So it gets the
tokens that it would get one by one, and a step gives it several where guesses are right.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

from anybit.engine.sampler import Row
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Sequence

MEMORY = 0.98  # weight of what is known of a text's drafts when it has one more token
# What is thought of a text's drafts before anything is known: 3 of 4 tokens are right.
RIGHT, JUDGED = 1.5, 2.0
STEPS = 0.99  # weight of what is known of a step's time, with every further step
SPREAD = 0.05  # of tokens in a step, squared: below it, times of steps say nothing about tokens
PLAIN = 32  # steps after which one without drafts shows what those cost


class Drafter(Protocol):
    """Guesses how texts go on."""

    def reach(self, rows: list[Row], most: int) -> list[int]:
        """How many tokens it may guess for each text, `most` at most."""

    def read(self, rows: list[Row], counts: list[int]) -> list[int]:
        """Get ready to guess so many tokens; how many that now can be."""

    def draft(self, rows: list[Row], counts: list[int]) -> list[list[int]]:
        """Guesses: `counts` tokens for each text, or fewer."""

    def forget(self, seq: Sequence) -> None:
        """A text has ended."""


@dataclass
class Record:
    """How a text's drafts went: tokens right and judged, the later ones with more weight."""

    right: float = 0.0
    judged: float = 0.0
    guess: list[int] = field(default_factory=list)  # for the next tokens, run or not

    @property
    def chance(self) -> float:
        """Of a drafted token to be right if those before it are."""
        return (self.right + RIGHT) / (self.judged + JUDGED)


class Costs:
    """Seconds of a step by the tokens in it: a line through those measured, the last ones first.

    draft: of one token from the drafter, for all texts together.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # weights, tokens, seconds, tokens^2, tokens * seconds
        self.known: set[int] = set()
        self.plain = PLAIN  # steps since one without drafts
        self.draft: float | None = None
        self.base, self.token = 1.0, 0.0

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        if tokens not in self.known:  # the first step of its kind compiles
            self.known.add(tokens)
            return
        self.plain = self.plain + 1 if drafted else 0
        if self.sums[0]:  # what else the machine does is no reason to remember it
            seconds = min(seconds, 2 * (self.base + self.token * tokens))
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self.sums = [STEPS * old + x for old, x in zip(self.sums, new, strict=True)]
        weight, x, y, xx, xy = self.sums
        x, y, xx, xy = x / weight, y / weight, xx / weight, xy / weight
        slope = (xy - x * y) / (xx - x * x + SPREAD)
        self.token = min(max(slope, 0.0), y / x)
        self.base = y - self.token * x

    def add_draft(self, seconds: float) -> None:
        """Note what one token of the drafter's took; the first time says nothing, as in `add`."""
        if self.draft is None:
            self.draft = 0.0
        else:
            old = self.draft or seconds
            self.draft = 0.9 * old + 0.1 * min(seconds, 2 * old)

    def depths(self, chances: list[float], reach: list[int]) -> list[int]:
        """How many tokens to draft for each text, so that a second gives the most tokens."""
        depths = best = [0] * len(chances)
        tokens, seconds = float(len(chances)), self.base + self.token * len(chances)
        rate = tokens / seconds
        for depth in range(1, max(reach, default=0) + 1):
            # A token more is worth its time if it gives more than that time does otherwise.
            going = [
                depths[i] == depth - 1 < reach[i] and chances[i] ** depth > self.token * rate
                for i in range(len(chances))
            ]
            if not any(going):
                break
            tokens += sum(c**depth for c, goes in zip(chances, going, strict=True) if goes)
            seconds += (self.draft or 0.0) + self.token * sum(going)
            depths = [d + goes for d, goes in zip(depths, going, strict=True)]
            if tokens / seconds > rate:
                rate, best = tokens / seconds, depths
        return best


class Speculation:
    """Drafts for the steps of an engine, where they are worth their time.

    most: tokens in a draft.
    """

    def __init__(self, drafter: Drafter, most: int):
        self.drafter, self.most, self.costs = drafter, most, Costs()
        self.records: dict[Sequence, Record] = {}

    def drafted(self, scheduled: list[Scheduled], scheduler: Scheduler) -> list[Scheduled]:
        """A step with drafts behind the texts that are being written."""
        at = [i for i, s in enumerate(scheduled) if s.tokens == 1 and s.samples and s.seq.generated]
        seqs = [scheduled[i].seq for i in at]
        if not seqs or self.costs.plain >= PLAIN:
            return scheduled
        rows = [Row(seq, seq.generated) for seq in seqs]
        reach = [
            min(most, seq.limit - len(seq.tokens) - 1)
            for seq, most in zip(seqs, self.drafter.reach(rows, self.most), strict=True)
        ]
        records = [self.records.setdefault(seq, Record()) for seq in seqs]
        counts = self.costs.depths([record.chance for record in records], reach)
        budget = scheduler.max_tokens - sum(s.tokens for s in scheduled)
        for i, seq in enumerate(seqs):
            counts[i] = min(counts[i], budget)
            if not scheduler.blocks.grow(seq, len(seq.tokens) + counts[i]):
                counts[i] = 0
            budget -= counts[i]
        counts = self.drafter.read(rows, counts)
        start = time.perf_counter()
        drafts = self.drafter.draft(rows, counts)
        if deepest := max(counts):
            self.costs.add_draft((time.perf_counter() - start) / deepest)
        out = list(scheduled)
        for i, record, draft, count in zip(at, records, drafts, counts, strict=True):
            record.guess = draft
            s = scheduled[i]
            out[i] = Scheduled(s.seq, s.first, 1, True, tuple(draft[:count]))
        return out

    def rests(self, scheduled: list[Scheduled]) -> bool:
        """Whether the next step will have no drafts, by what is known before this one's end."""
        records = [self.records.get(s.seq, Record()) for s in scheduled]
        counts = self.costs.depths([r.chance for r in records], [self.most] * len(records))
        return not any(counts)

    def judge(self, seq: Sequence, before: int) -> None:
        """Compare a text's guess with the tokens that it has got since it had `before` of them."""
        record = self.records.get(seq)
        if record is None:
            return
        for i, token in enumerate(seq.tokens[len(seq.prompt) + before :]):
            record.right, record.judged = MEMORY * record.right, MEMORY * record.judged
            if i < len(record.guess):
                record.right += record.guess[i] == token
                record.judged += 1
        record.guess = []

    def timed(self, scheduled: list[Scheduled], seconds: float) -> None:
        """Note what a step took, if it had no prompts."""
        if all(s.tokens == 1 and s.samples for s in scheduled):
            drafted = any(s.draft for s in scheduled)
            self.costs.add(sum(s.sampled for s in scheduled), seconds, drafted)

    def forget(self, seq: Sequence) -> None:
        """A text has ended."""
        self.records.pop(seq, None)
        self.drafter.forget(seq)
