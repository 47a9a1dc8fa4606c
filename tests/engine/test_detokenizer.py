"""Streamed text: whole characters, no piece of a stop string, nothing lost."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from transformers import AutoTokenizer

from anybit.engine.detokenizer import LONGEST, UNKNOWN, Detokenizer
from tests.engine.conftest import PICO

TEXT = "naïve 東京 🙂👩‍👩‍👧 \n\tdef f(x): return 'ünïcödé'  # ∀x∈∅\r\n" * 3


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(PICO)


def stream(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str | None]:
    """What is released after each token, and the stop string that ended the text."""
    out, found = [], None
    for i, token in enumerate(tokens):
        text, found = detokenizer.add([token], last=i == len(tokens) - 1)
        out.append(text)
        if found:
            break
    return out, found


def bytes_decode(tokens: list[int]) -> str:
    """A tokenizer whose tokens are single bytes: every border cuts something."""
    return bytes(tokens).decode("utf-8", "replace")


def test_characters_come_whole(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces, _ = stream(Detokenizer(tokenizer.decode, []), tokens)
    assert "".join(pieces) == TEXT
    assert UNKNOWN not in "".join(pieces)
    assert sum(map(bool, pieces)) > len(tokens) / 3  # it does stream


@given(st.text(max_size=60) | st.text("aé🙂\ufffd\ud800", max_size=12), st.integers(0, 20))
@example("caf\ufffd, bar", 6)  # a prompt may end with U+FFFD itself
@settings(deadline=None, max_examples=300)
def test_any_text_byte_by_byte(text: str, cut: int) -> None:
    tokens = list(text.encode("utf-8", "surrogatepass"))
    prompt, rest = tokens[:cut], tokens[cut:]
    pieces, _ = stream(Detokenizer(bytes_decode, prompt), rest)
    if len(prompt) <= 8:  # the whole prompt is context
        whole, before = bytes_decode(tokens), bytes_decode(prompt)
        while before.endswith(UNKNOWN) and not whole.startswith(before):
            before = before[:-1]
        assert "".join(pieces) == whole[len(before) :] if rest else not pieces


@given(st.binary(max_size=80) | st.lists(st.sampled_from(range(256)), min_size=150).map(bytes))
@settings(deadline=None, max_examples=60)
def test_bytes_that_are_no_text_are_not_held_back_forever(data: bytes) -> None:
    pieces, _ = stream(Detokenizer(bytes_decode, []), list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("piece", [b"ab\xff", b"\xff", "é\xc3".encode() + b"\xe2\x82a"])
def test_bytes_that_are_no_text_make_no_step_longer(piece: bytes) -> None:
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return bytes_decode(tokens)

    data = list(piece * (300 // len(piece)))
    stream(Detokenizer(decode, []), data)
    assert max(decoded) <= LONGEST + 1
    assert sum(decoded) < (28 if piece == b"\xff" else 20) * len(data)


@given(
    st.text("abc", max_size=60),
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=300)
def test_stop_strings_at_any_border(text: str, stop: list[str]) -> None:
    """Against the definition: the text ends before the first stop string to be complete."""
    pieces, found = stream(Detokenizer(bytes_decode, [], stop), list(text.encode()))
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    if not ends:
        assert "".join(pieces) == text
        assert found is None
        return
    complete = min(ends)[0]
    starts = [text.index(s) for s in stop if s in text and text.index(s) + len(s) == complete]
    assert "".join(pieces) == text[: min(starts)]
    assert found in stop


class Naive:
    """What stop strings do, by definition: slow, and without a state."""

    def __init__(self, stop: list[str], include_stop: bool):
        self.stop, self.include_stop, self.text, self.shown = stop, include_stop, "", 0

    def add(self, new: str, last: bool, stop: bool) -> tuple[str, str | None]:
        before = len(self.text)
        self.text += new
        found = []
        for i, string in enumerate(self.stop):
            at = self.text.find(string, max(0, before - len(string) + 1))
            found += [(at, i, string)] if at >= 0 else []
        end, string = len(self.text), None
        if found and stop:
            at, _, string = min(found)
            end = at + self.include_stop * len(string)
        elif not last:
            sizes = range(max(map(len, self.stop)) + 1)
            ends = (
                n for n in sizes if n and self.text.endswith(tuple(s[:n] for s in self.longer(n)))
            )
            end -= max(ends, default=0)
        text, self.shown = self.text[self.shown : end], max(self.shown, end)
        return text, string

    def longer(self, size: int) -> list[str]:
        return [string for string in self.stop if len(string) > size]


@given(
    st.lists(st.tuples(st.text("ab", max_size=5), st.booleans()), min_size=1, max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=12),
    st.booleans(),
)
@settings(deadline=None, max_examples=400)
def test_stop_strings_of_tokens_of_several_characters(
    pieces: list[tuple[str, bool]], stop: list[str], include: bool
) -> None:
    """As defined, whatever a token holds, and from when on stop strings count."""
    detokenizer = Detokenizer(lambda tokens: "".join(map(chr, tokens)), [], stop, include)
    naive = Naive(stop, include)
    for i, (piece, counts) in enumerate(pieces):
        last = i == len(pieces) - 1
        want = naive.add(piece, last, counts)
        assert detokenizer.add([*map(ord, piece)], last, counts) == want
        if want[1]:
            break


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = Detokenizer(bytes_decode, [], ["ab"])
    assert detokenizer.add([*b"xab"], stop=False) == ("xab", None)
    assert detokenizer.add([*b"c"]) == ("c", None)  # complete before: no longer counts
    assert detokenizer.add([*b"a"]) == ("", None)
    assert detokenizer.add([*b"b"]) == ("", "ab")


@pytest.mark.parametrize("text", ["ab" * 2000, "a" * 4000, "z" * 4000])
def test_long_stop_strings_take_no_time(text: str) -> None:
    """Counted in states of the automaton: with text, not with the stop strings' million."""
    stop = ["a" * i + "b" * 60_000 for i in range(16)] + ["ab" * 30_000]
    detokenizer = Detokenizer(lambda tokens: "".join(map(chr, tokens)), [], stop)
    for char in text:
        assert detokenizer.add([ord(char)])[1] is None
    assert detokenizer._stops is not None
    assert len(detokenizer._stops.length) <= 2 * len(text)


@pytest.mark.parametrize("tokens", [[0] * 500, [0xE6] * 500, [*"東".encode()] * 200, [0, 65] * 99])
def test_few_tokens_are_decoded_at_a_time(tokens: list[int]) -> None:
    """Also of special tokens, which have no text, of broken bytes, and of bytes of characters."""
    most = 0

    def decode(some: list[int]) -> str:
        nonlocal most
        most = max(most, len(some))
        text = bytes(t for t in some if t).decode("utf-8", "replace")
        whole = UNKNOWN not in text
        return text if whole else UNKNOWN * len([t for t in some if t])  # as byte fallback does

    pieces, _ = stream(Detokenizer(decode, [66]), tokens)
    assert most <= 65
    if 0xE6 not in tokens or len(tokens) == 600:
        assert "".join(pieces) == bytes(t for t in tokens if t).decode()
