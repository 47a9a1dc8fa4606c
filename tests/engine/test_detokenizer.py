"""Streamed text: whole characters, no piece of a stop string, nothing lost."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from transformers import AutoTokenizer

from anybit.engine.detokenizer import UNKNOWN, Detokenizer
from tests.engine.conftest import PICO

TEXT = "naïve 東京 🙂👩‍👩‍👧 \n\tdef f(x): return 'ünïcödé'  # ∀x∈∅\r\n" * 3


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(PICO)


def stream(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str | None]:
    """What is released after each token, and the stop string that ended the text."""
    shown, out, found = 0, [], None
    for i, token in enumerate(tokens):
        found = detokenizer.add([token], last=i == len(tokens) - 1)
        out.append(detokenizer.text[shown : detokenizer.released])
        shown = detokenizer.released
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


@given(st.binary(max_size=80))
@settings(deadline=None, max_examples=200)
def test_bytes_that_are_no_text_are_not_held_back_forever(data: bytes) -> None:
    pieces, _ = stream(Detokenizer(bytes_decode, []), list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace")


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


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = Detokenizer(bytes_decode, [], ["ab"])
    assert detokenizer.add([*b"xab"], stop=False) is None
    assert detokenizer.add([*b"c"]) is None  # complete before: no longer counts
    assert detokenizer.add([*b"a"]) is None
    assert detokenizer.text[: detokenizer.released] == "xabc"
    assert detokenizer.add([*b"b"]) == "ab"
    assert detokenizer.text == "xabc"
