"""Drafts by a smaller model. It has a cache of its own, and reads texts before it guesses."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.checkpoint.foreign.gguf_file import is_gguf
from anybit.engine.block_manager import BlockManager
from anybit.engine.generator import Generator
from anybit.engine.loader import Loaded, load
from anybit.engine.model_runner import ModelRunner
from anybit.engine.models.eagle import head_in
from anybit.engine.sampler import INVALID, choose
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Row, SamplingParams, Sequence
from anybit.errors import InvalidInput
from anybit.files.hub import located, name_of
from anybit.nn.multiplier import Keep

BEHIND = 4  # tokens that a text's first guess may have to run before it


class DraftModel:
    """Guesses by what a smaller model would say with the same parameters and random numbers.

    vocabulary: tokens of the large model. blocks: of the runner's cache. chunk: tokens of prompts
    in a step.

    Attributes:
        skips: Tokens at the beginning of a text that the model does not read.
        keeps: Whether tokens that were guessed right need not run again.
    """

    skips, keeps = 0, True

    def __init__(self, runner: ModelRunner, vocabulary: int, blocks: BlockManager, chunk: int):
        self.runner, self.vocabulary, self.blocks, self.chunk = runner, vocabulary, blocks, chunk
        self.known = len(runner.model.embed_tokens)  # tokens that it can read
        self.texts: dict[Sequence, Sequence] = {}  # as they are in its cache

    def reach(self, rows: list[Row], most: int) -> list[int]:
        """How many tokens fit into its length."""
        room = [self.runner.model.length - len(row.seq.tokens) for row in rows]
        return [max(min(most, r), 0) for r in room]

    @torch.inference_mode()
    def read(self, rows: list[Row], counts: list[int]) -> list[int]:
        """Read what is new in texts; how many tokens can be guessed for each now."""
        budget, scheduled = self.chunk, []
        out = [0] * len(rows)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if not count:
                continue
            text = self._caught_up(row.seq)
            new = text.tokens[text.computed :]
            if not self.blocks.grow(text, len(text.tokens) + count) or max(new) >= self.known:
                continue
            chunk = min(len(new) - 1, budget) if len(new) > BEHIND else 0
            if chunk:
                scheduled.append(Scheduled(text, text.computed, chunk, False))
            budget -= chunk
            if len(new) - chunk <= BEHIND:
                out[i] = count
        if scheduled:
            with torch.accelerator.device_index(self.runner.device.index):
                self._run(sorted(scheduled, key=lambda s: s.tokens))
        for s in scheduled:
            self.blocks.computed(s.seq, s.first + s.tokens)
        for row, count in zip(rows, out, strict=True):
            if not count and row.seq in self.texts:  # the rest is for another step
                del self.texts[row.seq].tokens[self.texts[row.seq].computed :]
        return out

    @torch.inference_mode()
    def draft(self, rows: list[Row], counts: list[int]) -> list[list[int]]:
        """What the sampler chooses by this model's logits, token by token."""
        guesses: list[list[int]] = [[] for _ in rows]
        ends = list(rows)
        active = list(range(len(rows)))
        with torch.accelerator.device_index(self.runner.device.index):
            for depth in range(max(counts)):
                active = [i for i in active if counts[i] > depth]
                if not active:
                    break
                scheduled = [self._step(rows[i].seq, guesses[i]) for i in active]
                given = [guesses[i][-1] for i in active] if depth else None
                logits = self._logits(scheduled, given)
                tokens = choose(logits, [ends[i] for i in active]).tolist()
                for i, token in zip(list(active), tokens, strict=True):
                    if token == INVALID:
                        active.remove(i)
                        continue
                    guesses[i].append(token)
                    ends[i] = ends[i].after(token)
                    matcher = ends[i].matcher
                    if (
                        token in rows[i].seq.ends
                        or token >= self.known
                        or (matcher and (matcher.ended or matcher.error))
                    ):
                        active.remove(i)
        for row, guess in zip(rows, guesses, strict=True):
            if guess:
                text = self.texts[row.seq]
                self.blocks.computed(text, len(text.tokens))
                if self.keeps:
                    text.tokens += guess[:-1]  # the last one has not run
        return guesses

    def forget(self, seq: Sequence) -> None:
        """A text has ended."""
        text = self.texts.pop(seq, None)
        if text is not None:
            self.blocks.release(text)

    def _step(self, seq: Sequence, guess: list[int]) -> Scheduled:
        """The step that chooses what comes behind a guess."""
        text = self.texts[seq]
        if guess:
            last = len(text.tokens) + len(guess) - 1
            return Scheduled(text, last, 1, True, guessed=last - text.computed)
        return Scheduled(text, text.computed, 1, True, tuple(text.tokens[text.computed + 1 :]))

    def _logits(self, scheduled: list[Scheduled], given: list[int] | None) -> Tensor:
        """Logits (B, vocabulary) at the end of each text of a step."""
        runner = self.runner
        logits = self._run(scheduled, None if given is None else runner.tensor(given))
        assert logits is not None
        if any(s.draft for s in scheduled):
            ends = accumulate(s.sampled for s in scheduled)
            logits = logits[runner.tensor([end - 1 for end in ends])]
        logits = logits[:, : self.vocabulary]
        missing = self.vocabulary - logits.shape[1]
        return pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _run(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> Tensor | None:
        """`ModelRunner.logits` of a step of its own texts."""
        return self.runner.logits(scheduled, tokens)

    def _caught_up(self, seq: Sequence) -> Sequence:
        """A text with the tokens that it has by now; those that were guessed right have run."""
        text, tokens = self.texts.get(seq), seq.tokens[self.skips :]
        if text is None:
            # Prefixes are those of texts whose skipped tokens are the same, too.
            first = " ".join(map(str, seq.tokens[: self.skips]))
            params = SamplingParams(adapter=f"{seq.params.adapter or ''} {first}".strip() or None)
            text = Sequence(seq.request, seq.index, tokens, params, seq.limit)
            self.texts[seq] = text
            self.blocks.match(text)
            return text
        right = text.computed
        while right < min(len(text.tokens), len(tokens) - 1):
            if text.tokens[right] != tokens[right]:
                break
            right += 1
        text.tokens[right:] = tokens[right:]
        self.blocks.computed(text, right)
        self.blocks.shrink(text)
        return text


def check_draft(draft: str | Path | Loaded | None, tokens: int, deterministic: bool) -> None:
    """InvalidInput for what cannot be drafted, before anything is loaded."""
    if tokens < 1:
        raise InvalidInput(f"draft_tokens={tokens}; give 1 or more")
    if draft is None:
        return
    if deterministic:
        raise InvalidInput(
            "deterministic and draft exclude each other: the shape of a step would depend on what "
            "was guessed; leave out one"
        )
    if isinstance(draft, Loaded) or draft in ("ngram", "mtp"):
        return
    there = (Path(draft) / "config.json").is_file() or is_gguf(Path(draft))
    if not there and name_of(draft) is None:
        raise InvalidInput(
            f"draft={str(draft)!r} is neither ngram nor mtp, nor the directory of a model or an "
            "EAGLE-3 head, nor org/name of the hub"
        )


def load_draft(
    draft: str | Path | Loaded | None,
    loaded: Loaded,
    device: torch.device,
    length: int | None,
    keep: Keep,
) -> Loaded | None:
    """The model that guesses for another; None where none does (None, "ngram").

    Args:
        draft: A directory of a model or an EAGLE-3 head, a GGUF file, org/name of the hub, "mtp"
            or "ngram".
        loaded: The other model.
        length: As for the other model.

    Raises:
        InvalidInput: It has other tokens, or this model has none.
    """
    if draft is None:
        return None
    if isinstance(loaded.model, Generator):
        raise InvalidInput("transformers' generate runs this model; leave out draft")
    if draft == "ngram":
        return None
    if draft == "mtp":
        return further(loaded)
    if isinstance(draft, Loaded):
        own = draft
        model = own.model
        weights = None if isinstance(model, Generator) else next(model.parameters(), None)
        if weights is not None and weights.device.type != device.type:
            raise InvalidInput(
                f"the draft model is on {weights.device}, and the model on {device}; load both "
                "there"
            )
    elif (head := eagle(located(draft), loaded, keep)) is not None:
        return head
    else:
        own = load(Path(draft), device, loaded.dtype, None, length, keep=keep)
    if isinstance(own.model, Generator):
        raise InvalidInput(
            f"draft={str(draft)!r}: transformers' generate runs it, which is no faster; give "
            "another model, or 'ngram'"
        )
    words, others = (x.tokenizer and x.tokenizer.get_vocab() for x in (loaded, own))
    sizes = [x.config.get_text_config().vocab_size for x in (loaded, own)]
    if words != others if words and others else sizes[0] != sizes[1]:
        raise InvalidInput(
            f"draft={str(draft)!r} has other tokens than the model ({sizes[1]} and {sizes[0]}); "
            "give one with the same tokenizer"
        )
    return own


def further(loaded: Loaded) -> Loaded:
    """A model's head for further tokens as a model that guesses for it."""
    assert not isinstance(loaded.model, Generator)
    if loaded.head is None:
        raise InvalidInput("draft='mtp' reads the model's directory; give that instead of a Loaded")
    loaded.head.borrow(loaded.model)
    return replace(loaded, model=loaded.head, tokenizer=None)


def eagle(path: Path, loaded: Loaded, keep: Keep) -> Loaded | None:
    """An EAGLE-3 head as a model that guesses for another; None where a path has none."""
    model = loaded.model
    assert not isinstance(model, Generator)
    if is_gguf(path):
        return None
    vocabulary = loaded.config.get_text_config().vocab_size
    head = head_in(path, model, vocabulary, loaded.dtype, keep)
    if head is None:
        return None
    return replace(loaded, model=head, config=head.config, tokenizer=None)
