"""Texts of the tokens that an engine writes, and the end of those that reach a stop string.

The engine knows tokens only. What reads them, in its process or in another, has a `Transcripts`.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from anybit.engine.detokenizer import Detokenizer
from anybit.engine.language import Language
from anybit.engine.output import Delta
from anybit.engine.sequence import SamplingParams

log = logging.getLogger("anybit.engine")

Decode = Callable[..., str]  # of tokens, and `shown`, the special ones among them to show


class Transcripts:
    """The texts of requests that have not ended.

    language: whose tokens they are. end: tells the engine to end a text, by its
    request and number, for a reason ("stop" or "error"), unless it has ended already.
    """

    def __init__(self, language: Language, end: Callable[[str, int, str], None]):
        self.decode: Decode | None = language.decode if language.tokenizer else None
        self.plain, self.end = language.plain, end
        self.open: dict[tuple[str, int], tuple[Detokenizer, int]] = {}  # with min_tokens left

    def add(self, request: str, prompt: Items[int], params: SamplingParams) -> None:
        """Begin the texts of a request. What the tokenizer raises at its prompt is raised here."""
        decode = None if self.decode is None else partial(self.decode, shown=params.shown)
        for index in range(params.n):
            text = Detokenizer(
                decode, prompt, params.stop, params.include_stop_str_in_output, self.plain
            )
            self.open[request, index] = text, params.min_tokens

    def drop(self, request: str, index: int) -> None:
        """Forget a text."""
        self.open.pop((request, index), None)

    def read(self, deltas: list[Delta]) -> list[Delta]:
        """Give deltas their texts; without those of texts that have ended by their text."""
        return [delta for delta in deltas if self._read(delta)]

    def _read(self, delta: Delta) -> bool:
        """Give a delta its text; whether its text had not ended before."""
        key = delta.request, delta.index
        found = self.open.get(key)
        if found is None:
            return False
        text, wait = found
        if delta.tokens:
            if wait > 0:
                wait -= len(delta.tokens)
                self.open[key] = text, wait
            try:
                delta.text, stopped = text.add(
                    [] if delta.silent else delta.tokens,
                    last=delta.finish is not None,
                    stop=wait <= 0,
                )
            except Exception as error:  # a tokenizer's decoder may fail on a token
                log.exception("request %s: cannot decode tokens %s", delta.request, delta.tokens)
                delta.finish = "error"
                delta.error = f"cannot decode token {delta.tokens[-1]}: {error}"
                delta.tokens, delta.logprobs = [], []
                self.end(*key, "error")
            else:
                if stopped is not None:
                    delta.finish, delta.stop_reason = "stop", stopped
                    self.end(*key, "stop")
        if delta.finish:
            del self.open[key]
        return True
