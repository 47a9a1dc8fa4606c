"""Tokens to text, one at a time: whole characters only, and never a piece of a stop string."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from anybit.errors import InvalidInput

Decode = Callable[[list[int]], str]

UNKNOWN = "\ufffd"  # what decoders write for bytes that are no character, or not yet
CONTEXT = 8  # tokens that are decoded again with a new one, for the spaces and characters between


class Detokenizer:
    """The text of one growing list of tokens.

    text: all that is certain. released: how much of it may be shown; the rest could be the
    beginning of a stop string.
    """

    def __init__(self, decode: Decode | None, prompt: Sequence[int], stop: Sequence[str] = ()):
        if stop and decode is None:
            raise InvalidInput(f"stop={list(stop)!r} needs a tokenizer, and this model has none")
        self.decode, self.stop = decode, stop
        self.text = ""
        self.released = 0
        self._window = list(prompt[-CONTEXT:])
        self._prompt = decode(self._window) if decode else ""  # "" once the text has begun
        self._seen = len(certain(self._prompt))

    def add(self, tokens: list[int], last: bool = False, stop: bool = True) -> str | None:
        """Append tokens; return the stop string that ended the text, if one did.

        last: no tokens follow, so incomplete characters are released as they are.
        stop: whether stop strings end the text already (they are held back either way).
        """
        if self.decode is None:
            return None
        before = len(self.text)
        self._window += tokens
        decoded = self.decode(self._window)
        now = decoded if last else certain(decoded)
        if self._prompt and len(now) > self._seen:
            # What looked like the beginning of a character at the prompt's end may be U+FFFD.
            same = takewhile(lambda pair: pair[0] == pair[1], zip(now, self._prompt, strict=False))
            self._seen = len(list(same))
        if len(now) > self._seen:
            self.text += now[self._seen :]
            self._seen, self._prompt = len(now), ""
        if len(self._window) > 2 * CONTEXT:
            self._shorten(decoded)
        found = self._find(before) if stop else None
        if found:
            self.text = self.text[: found[0]]
        held = 0 if found or last else self._held()
        self.released = max(self.released, len(self.text) - held)
        return found[1] if found else None

    def _shorten(self, decoded: str) -> None:
        """Drop old tokens from the window, where that leaves the end of the text as it is."""
        tail = self.decode(self._window[-CONTEXT:])  # type: ignore[misc]
        if tail and UNKNOWN not in tail and decoded.endswith(tail):
            self._window = self._window[-CONTEXT:]
            self._seen = len(tail)

    def _find(self, before: int) -> tuple[int, str] | None:
        """The first stop string that ends after the first `before` characters, and where."""
        found = []
        for stop in self.stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        return min(found, key=lambda f: f[0]) if found else None

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(max((len(s) for s in self.stop), default=1) - 1, len(self.text))
        for length in range(longest, 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.stop):
                return length
        return 0


def certain(text: str) -> str:
    """Text without an end that further bytes may turn into a character (three bytes at most)."""
    unknown = len(text) - len(text.rstrip(UNKNOWN))
    return text[: len(text) - min(unknown, 3)]
