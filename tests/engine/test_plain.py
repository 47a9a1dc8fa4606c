"""Texts of single tokens: streamed, they are what decoding all tokens together gives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anybit.engine.detokenizer import CONTEXT, LONGEST, UNKNOWN, Detokenizer
from anybit.engine.language import decoder
from anybit.engine.plain import plain
from tests.engine.conftest import PICO

WORDS = ["a", "b", "the", "ing", ".", ",", "n't", "é", "東京", "🙂", "\n", "  ", "x y"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ADDED = [AddedToken("<tool>"), AddedToken("<s>", special=True), AddedToken("a b")]


def wrapped(pieces: list[str], decoder: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "a"))
    backend.decoder = decoder
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(ADDED)
    return tokenizer


def llama(strip: bool) -> PreTrainedTokenizerFast:
    pieces = [*WORDS, *("▁" + word for word in WORDS), "▁", "▁▁", *BYTES]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return wrapped(pieces, decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * strip]))


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer: Any = AutoTokenizer.from_pretrained(PICO)
    tokenizer.add_tokens(ADDED)
    return tokenizer


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_level,
    "byte fallback": lambda: llama(False),
    "stripped": lambda: llama(True),
    "metaspace": lambda: wrapped([*WORDS, "▁a", "▁the", "▁"], decoders.Metaspace()),
    "word pieces": lambda: wrapped([*WORDS, "##a", "##ing"], decoders.WordPiece()),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return MAKERS[request.param]()


def streamed(tokenizer: PreTrainedTokenizerFast, prompt: list[int], tokens: list[int]) -> str:
    """The text of tokens, token by token."""
    text = Detokenizer(decoder(tokenizer), prompt, plain=plain(tokenizer))
    last = len(tokens) - 1
    return "".join(text.add([token], last=i == last)[0] for i, token in enumerate(tokens))


def test_single_tokens_are_what_all_together_are(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever the tokens, as long as bytes are characters: of others, windows decide."""
    decode, choose = decoder(tokenizer), random.Random(7)
    known = [t for t in range(len(tokenizer)) if UNKNOWN not in decode([t])]
    assert len(known) > 10
    for _ in range(300):
        prompt = choose.choices(known, k=choose.randrange(4))
        tokens = choose.choices(known, k=choose.choice([1, 3, 20, 2 * LONGEST]))
        if "WordPiece" in str(tokenizer.backend_tokenizer.decoder) and not decode(prompt):
            continue  # what begins a text is written in another way
        whole = decode(prompt + tokens)
        assert streamed(tokenizer, prompt, tokens) == whole[len(decode(prompt)) :]


def test_pieces_of_characters_are_as_with_windows(tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where a prompt ends inside of one, and, of byte-level tokens, where they are broken.

    Byte fallback writes all bytes of a row as U+FFFD if one is none of a character's: what has been
    shown is then no longer what decoding gives, and where a window begins decides what follows.
    """
    choose, name = random.Random(3), tokenizer.convert_ids_to_tokens
    parts = [[t] for t in range(len(tokenizer)) if name(t) not in BYTES]
    if len(parts) < len(tokenizer):
        rows = ([f"<0x{byte:02X}>" for byte in char.encode()] for char in "Aé東🙂")
        parts += 10 * [tokenizer.convert_tokens_to_ids(row) for row in rows]
    texts = "naïve 東京 🙂👩‍👩‍👧 \n\t'ünïcödé'  # ∀x∈∅\r\n a b<tool> the<s>ing"
    encoded = tokenizer.encode(texts * 3, add_special_tokens=False)
    for i in range(200):
        drawn = [t for part in choose.choices(parts, k=50) for t in part]
        tokens = encoded if i % 2 else drawn
        cut = choose.randrange(12)
        prompt, rest = tokens[:cut], tokens[cut:]
        fast = Detokenizer(decoder(tokenizer), prompt, ["zz"], plain=plain(tokenizer))
        slow = Detokenizer(decoder(tokenizer), prompt, ["zz"])
        for j, token in enumerate(rest):
            last = j == len(rest) - 1
            assert fast.add([token], last) == slow.add([token], last)


def test_most_tokens_are_not_decoded() -> None:
    tokenizer = byte_level()
    calls = 0
    decode = decoder(tokenizer)

    def counted(tokens: list[int]) -> str:
        nonlocal calls
        calls += 1
        return decode(tokens)

    tokens = tokenizer.encode("def main(args): return [x for x in args if x]\n" * 20)
    text = Detokenizer(counted, tokens[:CONTEXT], plain=plain(tokenizer))
    for token in tokens[CONTEXT:]:
        text.add([token])
    assert calls < 10


def test_tokens_that_depend_on_their_neighbours_are_decoded_with_them() -> None:
    assert plain(None) is None
    assert plain(wrapped(["a", "b</w>"], decoders.BPEDecoder("</w>"))) is None
    assert plain(wrapped(WORDS, decoders.CTC())) is None
    found = plain(llama(True))
    assert found is not None
    names = llama(True).convert_tokens_to_ids(["▁the", "the", "<0x41>", "<s>", "<tool>"])
    assert [found[name] for name in names] == [" the", "the", None, None, "<tool>"]
