"""Speculative decoding: tokens that may come next run in one step with the last one of a text.

A drafter guesses tokens. The model runs them behind the text, the sampler chooses a token after
each, and the text takes its choices up to the first that differs from the guess. So it gets the
tokens that it would get one by one, and a step gives it several where guesses are right.
"""

import logging
import time
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Protocol

from anybit.engine.pace import mixed
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Row, Sequence

log = logging.getLogger("anybit.engine")

MEMORY = 0.98  # weight of what is known of a text's drafts when it has one more token
# What is thought of a text's drafts before anything is known: 3 of 4 tokens are right.
RIGHT, JUDGED = 1.5, 2.0
STALE = 512  # steps after which a time is tried again
PLAIN = 32  # steps after which one without drafts shows what those cost
TEXTS = 64  # of a step with drafts; for more, looking for them takes the host too long
CONSIDERED = 256  # drafted tokens of a step, at most
FOUND = 0.1  # of `Record.found`, which takes 22 steps without a guess
AHEAD = 16  # steps started ahead of their tokens, after which guesses are looked for again


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
    """How a text's drafts went: tokens right and judged, the later ones with more weight.

    found: near 1 if there was something to guess lately.
    """

    right: float = 0.0
    judged: float = 0.0
    found: float = 1.0
    guess: list[int] = field(default_factory=list)  # for the next tokens, run or not

    @property
    def chance(self) -> float:
        """Of a drafted token to be right if those before it are."""
        return (self.right + RIGHT) / (self.judged + JUDGED)


class Costs:
    """Seconds that steps of so many tokens take, as measured.

    draft: of one token from the drafter, for all texts together; None: not known yet.
    """

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, int]] = {}  # seconds, and the last step that took them
        self.known: set[int] = set()
        self.steps = 0
        self.plain = PLAIN  # steps since one without drafts
        self.draft: float | None = None

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Note what a step has taken."""
        size = alike(tokens)
        if size not in self.known:  # the first step of its kind compiles
            self.known.add(size)
            return
        self.steps += 1
        self.plain = self.plain + 1 if drafted else 0
        self.times[size] = mixed(self.times.get(size, (seconds, 0))[0], seconds), self.steps

    def add_draft(self, seconds: float) -> None:
        """Note what one token of the drafter's has taken; the first time says nothing."""
        self.draft = 0.0 if self.draft is None else mixed(self.draft or seconds, seconds)

    def depths(self, chances: list[float], reach: list[int]) -> list[int]:
        """How many tokens to draft for each text, so that a second gives the most tokens."""
        fresh = {n: s for n, (s, at) in self.times.items() if self.steps - at <= STALE}
        sizes = sorted(fresh)

        def step(tokens: int) -> float:
            # What was not measured is taken to cost nothing, and so is tried.
            at = bisect_right(sizes, alike(tokens)) - 1
            return fresh[sizes[max(at, 0)]] if sizes else 1.0

        drafts = [
            (chance**depth, -depth, i)
            for i, (chance, most) in enumerate(zip(chances, reach, strict=True))
            for depth in range(1, most + 1)
        ]
        drafts = sorted(drafts, reverse=True)[:CONSIDERED]  # the likeliest tokens first
        tokens, deepest, count = float(len(chances)), 0, 0
        best = tokens / step(len(chances))
        for n, (chance, depth, _) in enumerate(drafts, 1):
            tokens, deepest = tokens + chance, max(deepest, -depth)
            rate = tokens / (step(len(chances) + n) + deepest * (self.draft or 0.0))
            if rate > best:
                best, count = rate, n
        out = [0] * len(chances)
        for _, _, i in drafts[:count]:
            out[i] += 1
        return out


def alike(tokens: int) -> int:
    """The size of steps that take as long as one of so many tokens, more or less."""
    return tokens if tokens <= 16 else -(-tokens // 16) * 16


def may_draft(s: Scheduled) -> bool:
    """Whether tokens may be guessed behind a text in a step; not where masks take long."""
    slow = s.seq.matcher is not None and s.seq.matcher.beside
    return s.tokens == 1 and s.samples and s.seq.generated > 0 and not slow


class Speculation:
    """Drafts for the steps of an engine, where they are worth their time.

    most: tokens in a draft.
    """

    def __init__(self, drafter: Drafter, most: int):
        self.drafter, self.most, self.costs = drafter, most, Costs()
        self.records: dict[Sequence, Record] = {}
        self.ahead = 0  # steps that were started without looking for guesses
        self.failed = False  # the drafter; then there are no more drafts

    def renew(self) -> None:
        """Weights are others: steps are captured anew, and a drafter that failed may work."""
        self.costs, self.failed = Costs(), False

    def drafted(self, scheduled: list[Scheduled], scheduler: Scheduler) -> list[Scheduled]:
        """A step with drafts behind the texts that are being written, while the drafter works."""
        if self.failed:
            return scheduled
        try:
            return self._drafted(scheduled, scheduler)
        except Exception:  # texts do not need it
            self.failed = True
            log.exception("guessing has failed; texts go on without drafts until a restart")
            return scheduled

    def _drafted(self, scheduled: list[Scheduled], scheduler: Scheduler) -> list[Scheduled]:
        at = [i for i, s in enumerate(scheduled) if may_draft(s)]
        seqs = [scheduled[i].seq for i in at]
        if not 0 < len(seqs) <= TEXTS or self.costs.plain >= PLAIN:
            return scheduled
        if scheduler.pace is not None and not all(s.writes for s in scheduled):
            return scheduled  # with prompts, a step takes what it may without drafts
        rows = [Row(seq, seq.generated) for seq in seqs]
        reach = [
            min(most, seq.limit - len(seq.tokens) - 1)
            for seq, most in zip(seqs, self.drafter.reach(rows, self.most), strict=True)
        ]
        records = [self.records.setdefault(seq, Record()) for seq in seqs]
        for record, most in zip(records, reach, strict=True):
            record.found = 1.0 if most > 0 else 0.9 * record.found
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
            out[i] = replace(out[i], draft=tuple(draft[:count]))
        return out

    def rests(self, scheduled: list[Scheduled]) -> bool:
        """Whether the next step will have no drafts, by what is known before this one's end."""
        if self.failed or len(scheduled) > TEXTS:
            return True
        records = [self.records.get(s.seq, Record()) for s in scheduled]
        reach = [self.most if record.found > FOUND else 0 for record in records]
        counts = self.costs.depths([record.chance for record in records], reach)
        self.ahead = 0 if any(counts) or self.ahead == AHEAD else self.ahead + 1
        return self.ahead > 0

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
