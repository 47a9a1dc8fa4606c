"""Which sequences run in the next step, and with how many tokens each."""

import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain

from anybit.engine.block_manager import BlockManager
from anybit.engine.pace import Budget, Pace
from anybit.engine.sequence import Sequence

MOST_PROMPTS = 64  # that one step begins to read


@dataclass  # not frozen, which would take three times as long to make
class Scheduled:
    """A sequence, and which of its tokens run in a step: so many `tokens` from `first` on.

    samples: whether the step reaches the end of the sequence, so that a token is sampled.
    draft: tokens that may come next. They run behind the one token of the step, and a token is
    sampled after each of them, too. begin: the row of states that it begins with; 0: its own. kept:
    numbers of tokens and rows, which get the states behind so many tokens of the text. guessed: how
    many tokens before `first` may be taken back.
    """

    seq: Sequence
    first: int
    tokens: int
    samples: bool
    draft: tuple[int, ...] = ()
    begin: int = 0
    kept: tuple[tuple[int, int], ...] = ()
    guessed: int = 0

    @property
    def sampled(self) -> int:
        """Tokens that are sampled."""
        return self.samples + len(self.draft)

    @property
    def writes(self) -> bool:
        """Whether the tokens are those of a text that is being written."""
        return self.tokens == 1 and self.samples and self.seq.generated > 0

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer needs what the model says to tokens of this step."""
        return self.seq.params.reads_prompt and self.first < len(self.seq.prompt)


class Scheduler:
    """Continuous batching, first come first served.

    A step runs at most `max_tokens` tokens: one for each text being written, and the rest of the
    budget for prompts, in chunks (so a long prompt delays others by one step at most). While
    sequences are being written, a step takes no more than `pace` says, if there is one, so that the
    time between their tokens stays short. When blocks run out, the latest arrival gives its blocks
    back and starts over later; what it has written is kept and run through the model again.

    each: what the only token of a sequence in a step takes of the budget.
    """

    def __init__(self, blocks: BlockManager, max_running: int, max_tokens: int, each: int = 1):
        self.each = each
        self.blocks, self.max_running, self.max_tokens = blocks, max_running, max_tokens
        self.pace: Pace | None = None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.full = False  # whether what waits has found too few free blocks
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up and found

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> list[Scheduled]:
        """The next step: texts being written first, then prompts."""
        out: list[Scheduled] = []
        room, preempted = self._room(), False
        at = prompts = 0
        while at < len(self.running) and room.tokens >= self.each:
            seq = self.running[at]
            if seq.held:
                at += 1
                continue
            tokens = room.take(seq)
            while not self.blocks.grow(seq, seq.computed + tokens):
                preempted = True
                if self._preempt() is seq:
                    break
            else:
                if tokens:
                    out.append(self._part(seq, tokens))
                at += 1
        while self.waiting and len(self.running) < self.max_running and not preempted:
            prompts += 1
            if prompts > MOST_PROMPTS or room.left < self.each:
                break
            seq, begin = self.waiting[0], 0
            if seq.held:
                self.waiting.rotate(-1)
                continue
            if not seq.blocks and not seq.params.reads_prompt:  # cached tokens run no more
                begin = self.blocks.match(seq)
            tokens = room.take(seq)
            if not tokens or not self.blocks.grow(seq, seq.computed + tokens):
                self.blocks.release(seq)
                self.full = tokens > 0
                break
            if seq.started is None:
                seq.started, seq.cached = time.monotonic(), seq.computed
                self.prefix_queries += len(seq.tokens)
                self.prefix_hits += seq.cached
            self.running.append(self.waiting.popleft())
            out.append(self._part(seq, tokens, begin))
        return sorted(out, key=lambda s: s.tokens)  # decodes first

    def _part(self, seq: Sequence, tokens: int, begin: int = 0) -> Scheduled:
        """The next tokens of a sequence."""
        kept = self.blocks.keep(seq, tokens)
        ends = tokens == seq.remaining
        return Scheduled(seq, seq.computed, tokens, ends, begin=begin, kept=kept)

    def _room(self) -> Budget:
        """What the next step may take."""
        texts = sum(seq.writes for seq in self.running)
        first = next((seq for seq in chain(self.running, self.waiting) if not seq.writes), None)
        if self.pace is None or first is None or not texts:
            return Budget(self.max_tokens, texts, self.each)
        as_captured = all(map(captured, [first, *self.running]))
        room = self.pace.room(texts, first.computed, as_captured)
        room.tokens = min(room.tokens, self.max_tokens)
        return room

    def timed(self, scheduled: list[Scheduled], seconds: float) -> None:
        """Note what a step has taken."""
        if self.pace is not None and all(captured(s.seq) for s in scheduled):
            texts = sum(1 + len(s.draft) for s in scheduled if s.writes)
            self.pace.timed(
                texts, [(s.tokens, s.first) for s in scheduled if not s.writes], seconds
            )

    def ahead(self, scheduled: list[Scheduled]) -> list[Scheduled]:
        """The step after one that still runs, if the host needs no token of it for that; else [].

        So it is while all that runs is being written, nothing that waits could begin, and blocks
        suffice. A text that turns out to have ended runs for nothing once, in blocks of its own.
        One whose mask is computed beside the steps waits for that meanwhile.
        """
        if self.waiting and len(self.running) < self.max_running and not self.full:
            return []
        if any(s.draft for s in scheduled):  # how many tokens these give is not known
            return []
        beside = {s.seq for s in scheduled if s.seq.matcher and s.seq.matcher.beside}
        going = [s for s in scheduled if not (s.seq.finish or s.seq in beside)]
        if len(going) < len(self.running):
            sitting = sum(seq in beside or seq.held for seq in self.running)
            if len(going) + sitting < len(self.running):
                return []
        if not all(s.samples for s in going):
            return []
        going = [s for s in going if s.first + s.tokens + 1 < s.seq.limit]
        ends = [s.first + s.tokens + 1 for s in going]
        need = sum(self.blocks.missing(s.seq, end) for s, end in zip(going, ends, strict=True))
        if need > len(self.blocks.free):
            return []
        for s, end in zip(going, ends, strict=True):
            self.blocks.grow(s.seq, end)
        return [Scheduled(s.seq, end - 1, 1, True) for s, end in zip(going, ends, strict=True)]

    def again(self, scheduled: Scheduled) -> Scheduled:
        """A sequence's part of a step that failed, once more.

        From the beginning where layers keep states, since the step may have changed some of them,
        and without a draft.
        """
        if not self.blocks.recurrent:
            return scheduled
        tokens = scheduled.first + scheduled.tokens
        return replace(scheduled, first=0, tokens=tokens, draft=(), begin=0)

    def done(self, scheduled: Scheduled, accepted: int = 0) -> None:
        """Note that a scheduled sequence's tokens have run; accepted: of its draft."""
        self.blocks.computed(scheduled.seq, scheduled.first + scheduled.tokens + accepted)
        if scheduled.draft:
            self.blocks.shrink(scheduled.seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, running or waiting, and free its blocks."""
        for queue in (self.running, self.waiting):
            if seq in queue:  # an interrupt may have left it in neither
                queue.remove(seq)
        self.blocks.release(seq)
        self.full = False

    def _preempt(self) -> Sequence:
        seq = self.running.pop()
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        self.preemptions += 1
        return seq


def captured(seq: Sequence) -> bool:
    """Whether graphs hold the steps of a sequence."""
    reads = seq.params.reads_prompt and not seq.generated
    return seq.params.adapter is None and not reads
