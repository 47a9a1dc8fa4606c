"""Steps whose shapes depend on no other text, so that an answer is the same whatever the load."""

import time

from anybit.engine.block_manager import BlockManager
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Sequence


class SteadyScheduler(Scheduler):
    """Batching of texts that do not change each other's numbers.

    Kernels add up in an order that depends on the shape of a step. So a prompt runs alone, in
    chunks that begin at multiples of `max_tokens`, and cached prefixes are whole chunks. Texts
    being written run up to `rows` at a time, in steps that the runner pads to `rows`. And a text
    begins only when all the blocks that it may need are free, since one that gave its blocks back
    would run as a prompt later.
    """

    def __init__(self, blocks: BlockManager, max_running: int, max_tokens: int, rows: int):
        chunk = max(max_tokens // blocks.block_size, 1) * blocks.block_size
        super().__init__(blocks, max_running, chunk)
        self.rows = rows
        self.prompts_turn = True  # prompts and texts take turns

    def schedule(self) -> list[Scheduled]:
        """The next step: a chunk of one prompt, or a token of several texts."""
        self._admit()
        return self._next(self.running)

    def ahead(self, scheduled: list[Scheduled]) -> list[Scheduled]:
        """A step of sequences that the running one does not hold; else its own, a token on.

        States that a layer keeps would be a step too far if the running one failed.
        """
        if not self.blocks.recurrent:
            self._admit()
            held = {id(s.seq) for s in scheduled}
            if others := self._next([seq for seq in self.running if id(seq) not in held]):
                return others
        return super().ahead(scheduled)

    def _next(self, running: list[Sequence]) -> list[Scheduled]:
        prompts = [seq for seq in running if not seq.generated]
        texts = [seq for seq in running if seq.generated]
        turn, self.prompts_turn = self.prompts_turn, not self.prompts_turn
        if prompts and (turn or not texts):
            seq = prompts[0]
            tokens = min(seq.remaining, self.max_tokens - seq.computed % self.max_tokens)
            return [Scheduled(seq, seq.computed, tokens, tokens == seq.remaining)]
        chosen = texts[: self.rows]
        for seq in chosen:  # those that wait for their turn come first in the next step
            self.running.remove(seq)
            self.running.append(seq)
        return [Scheduled(seq, seq.computed, 1, True) for seq in chosen]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            if not seq.params.reads_prompt:  # cached tokens run no more
                self.blocks.match(seq, self.max_tokens)
            if not self.blocks.grow(seq, seq.limit):
                self.blocks.release(seq)
                self.full = True
                return
            seq.started, seq.cached = time.monotonic(), seq.computed
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += seq.cached
            self.running.append(self.waiting.popleft())
