"""Tokens to text, one at a time: whole characters only, and never a piece of a stop string."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import takewhile

from anybit.engine.plain import UNKNOWN, Plain
from anybit.errors import InvalidInput

Decode = Callable[[list[int]], str]

CONTEXT = 4  # tokens that are decoded again with a new one, for the spaces and characters between
BYTES = 4  # of a character
LONGEST = 32  # tokens that are decoded again where no place to begin is found


class Detokenizer:
    """The text of one growing list of tokens.

    plain: texts of tokens that need no decoding behind whole characters, if there are any.
    held: the end of the text that is not shown yet, since it could begin a stop string.
    """

    def __init__(
        self,
        decode: Decode | None,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        plain: Plain | None = None,
    ):
        if stop and decode is None:
            raise InvalidInput(f"stop={list(stop)!r} needs a tokenizer, and this model has none")
        self.decode, self.include_stop = decode, include_stop
        self.held = ""
        self._stops = Stops(stop) if stop else None
        self._window = list(prompt[-2 * CONTEXT :])
        self._prompt = decode(self._window) if decode else ""  # "" once the text has begun
        self._done = certain(self._prompt)  # the part of the window's text that was returned
        self._waited = 0  # tokens in a row with which the decoder has changed that part
        self._plain = plain
        self._whole = False  # whether all of the text is returned, up to a whole character
        self._behind = False  # whether `_done` lacks tokens of the window

    def add(
        self, tokens: list[int], last: bool = False, stop: bool = True
    ) -> tuple[str, str | None]:
        """Append tokens: the text that may be shown now, and the stop string that has ended it.

        last: no tokens follow, so incomplete characters are released as they are.
        stop: whether stop strings end the text already (they are held back either way).
        """
        if self.decode is None:
            return "", None
        new = self._decoded(tokens, last)
        if self._stops is None:
            return new, None
        found = self._stops.read(new)
        self.held += new
        if stop and found is not None:
            string, before = found
            end = len(self.held) - before + (len(string) if self.include_stop else 0)
            text, self.held = self.held[:end], ""
            return text, string
        shown = len(self.held) - (0 if last else self._stops.begun)
        text, self.held = self.held[:shown], self.held[shown:]
        return text, None

    def follows(self, token: int) -> bool:
        """Append a token of `plain` that has a text, if just that text is what may be shown now."""
        if not self._whole or self._plain is None:
            return False
        if self._stops is not None and self._stops.touched(self._plain[token] or ""):
            return False
        self._follow([token])
        return True

    def _decoded(self, tokens: list[int], last: bool) -> str:
        """The characters that tokens complete."""
        assert self.decode is not None
        if self._whole and self._plain is not None:
            texts = [self._plain[token] for token in tokens]
            if None not in texts:
                self._follow(tokens)
                return "".join(texts)  # type: ignore[arg-type]
        if self._behind:
            self._done, self._behind = self.decode(self._window), False
        self._window += tokens
        decoded = self.decode(self._window)
        now = decoded if last else certain(decoded)
        if self._prompt and len(now) > len(self._done):
            # What looked like the beginning of a character at the prompt's end may be U+FFFD.
            same = takewhile(lambda pair: pair[0] == pair[1], zip(now, self._prompt, strict=False))
            self._done = now[: len(list(same))]
        # Byte fallback writes all bytes in a row as U+FFFD while the last character lacks some.
        self._waited = 0 if now.startswith(self._done) else self._waited + 1
        if 0 < self._waited < BYTES and not last:
            return ""
        new = now[len(self._done) :]
        if new:
            self._done, self._prompt = now, ""
        begun = not self._prompt and decoded[-1:] not in ("", UNKNOWN)
        self._whole = begun and not self._waited and self._done == decoded
        if len(self._window) > 2 * CONTEXT:
            self._shorten(decoded)
        return new

    def _follow(self, tokens: list[int]) -> None:
        """Append tokens that need no decoding."""
        self._window += tokens
        self._behind = True
        if len(self._window) > LONGEST:
            del self._window[: -2 * CONTEXT]

    def _shorten(self, decoded: str) -> None:
        """Drop old tokens from the window, where that leaves the end of the text as it is."""
        assert self.decode is not None
        unseen, forced = len(decoded) - len(self._done), len(self._window) > LONGEST
        for size in range(CONTEXT, CONTEXT + BYTES):  # one of four bytes begins a character
            tail = self.decode(self._window[-size:])
            if not tail and self.decode(self._window[:-size]) == decoded:  # special tokens
                self._window = self._window[:-size]
                return
            # Bytes that are no character may become one until a character has followed them.
            if tail and (forced or tail[-1] != UNKNOWN) and decoded.endswith(tail):
                break
            if not forced and len(self._window) % CONTEXT:
                return  # other sizes are tried now and then
        else:
            if not forced:
                return
        self._window, self._prompt = self._window[-size:], ""
        self._done = tail[: max(len(tail) - unseen, 0)]


class Stops:
    """Looks for stop strings in a text, in a time that depends on neither's length.

    The automaton of Aho and Corasick: a state stands for the longest end of the text with which a
    stop string begins. A state is made when a text first reaches it: stop strings may be long.

    begun: the length of the longest end of the text that a longer stop string begins with.
    """

    def __init__(self, stop: Sequence[str]):
        self.order = {string: i for i, string in reversed(list(enumerate(stop)))}
        self.sorted, self.firsts = sorted(self.order), {string[0] for string in stop}
        self.next: dict[tuple[int, str], int] = {}
        # Of each state: its length, which of the sorted strings begin with it, the state of its
        # next shorter end, the longest string that it ends with, and `begun`.
        self.length, self.range, self.shorter = [0], [(0, len(self.sorted))], [0]
        self.whole, self.open = [""], [0]
        self.state = 0

    @property
    def begun(self) -> int:
        return self.open[self.state]

    def touched(self, text: str) -> bool:
        """Whether a stop string has begun, or may begin in this text."""
        return self.state > 0 or not self.firsts.isdisjoint(text)

    def read(self, text: str) -> tuple[str, int] | None:
        """Go on with a text: the stop string in it that begins first, and where, from its end.

        Only strings that end in this text count; of two that begin together, the first one given.
        """
        best: tuple[int, int, str, int] | None = None
        for at, char in enumerate(text, 1):
            self.state = self._after(char)
            string = self.whole[self.state]
            if string:
                begin = at - len(string)
                found = (begin, self.order[string], string, len(text) - begin)
                best = found if best is None else min(best, found)
        return None if best is None else best[2:]

    def _after(self, char: str) -> int:
        """The state behind one more character."""
        state, made = self.state, []
        while True:
            to = self.next.get((state, char))
            if to is not None:
                break
            to = self._longer(state, char)
            if to:
                made.append(to)
            if not state:
                break
            state = self.shorter[state]
        # What was made are ends of each other: the shortest is linked first.
        shorter = to if to not in made else 0
        for state in reversed(made):
            low, high = self.range[state]
            string, size = self.sorted[low], self.length[state]
            self.shorter[state] = shorter
            self.whole[state] = string if len(string) == size else self.whole[shorter]
            goes_on = high - low > 1 or len(string) > size
            self.open[state] = size if goes_on else self.open[shorter]
            shorter = state
        return shorter

    def _longer(self, state: int, char: str) -> int:
        """A new state, one character longer; 0 where no string begins with it."""
        (low, high), at = self.range[state], self.length[state]

        def key(string: str) -> str:
            return string[at : at + 1]

        low = bisect_left(self.sorted, char, low, high, key=key)
        high = bisect_right(self.sorted, char, low, high, key=key)
        if low == high:
            if not state:  # most characters of most texts
                self.next[0, char] = 0
            return 0
        to = self.next[state, char] = len(self.length)
        self.length.append(at + 1)
        self.range.append((low, high))
        for values in (self.shorter, self.open):
            values.append(0)
        self.whole.append("")
        return to


def certain(text: str) -> str:
    """Text without an end that further bytes may turn into a character (three bytes at most)."""
    unknown = len(text) - len(text.rstrip(UNKNOWN))
    return text[: len(text) - min(unknown, 3)]
