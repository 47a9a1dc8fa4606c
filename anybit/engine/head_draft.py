"""Drafts by a head: the model's own for further tokens (MTP), or one for EAGLE-3."""

from torch import Tensor

from anybit.engine.block_manager import BlockManager
from anybit.engine.draft_model import DraftModel
from anybit.engine.model_runner import ModelRunner
from anybit.engine.models.mtp import Head
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Sequence
from anybit.kernels.state import HiddenStates


class HeadDraft(DraftModel):
    """Guesses by what the model keeps for the head beside K and V of all its tokens.

    So they are there whatever became of a text: its prompt was cached, its guesses were wrong. A
    text of the head begins with its second token; place i reads the model's state i. Places of
    guesses read the head's own state, and run again once the model has run them.

    large: runs the model.
    """

    skips, keeps = 1, False

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary: int,
        blocks: BlockManager,
        chunk: int,
        large: ModelRunner,
    ):
        super().__init__(runner, vocabulary, blocks, chunk)
        assert isinstance(runner.model, Head)
        self.large, self.head = large, runner.model

    def _run(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> Tensor | None:
        theirs = {text: seq for seq, text in self.texts.items()}
        known: list[tuple[int, int]] = []  # slots of states that are read, and of where they are
        guessed: list[tuple[int, int]] = []
        for s in scheduled:
            text, seq = s.seq, theirs[s.seq]
            for at in range(s.first, s.first + s.tokens + len(s.draft)):
                if at < len(text.tokens):
                    known.append((self.slot(text, at), self.slot(seq, at)))
                else:
                    guessed.append((self.slot(text, at), self.slot(text, at - 1)))
        mine, source = self.runner.states[-1], self.large.states[-1]
        assert isinstance(mine, HiddenStates)
        assert isinstance(source, HiddenStates)
        for pairs, values in ((known, source.values), (guessed, mine.values)):
            if pairs:
                to, where = self.runner.tensor(pairs).T
                mine.write(to, values.index_select(0, where))
        return super()._run(scheduled, tokens)

    def slot(self, seq: Sequence, at: int) -> int:
        """Where a cache has the token `at` of a text."""
        size = self.runner.block_size
        return seq.blocks[at // size] * size + at % size
