"""Forced tool calls with a published tokenizer: `DIRECTORY FAMILY` prints how texts are read.

Texts are random walks through the grammar, with the marks of calls as published, and the other way
round (special tokens that were none). Prints a line of JSON: the text, and what a reader finds.
"""

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anybit.engine.masks import unpacked
from anybit.engine.structured import Grammars, Structured
from anybit.serve.conversation import Dialect

CITY = {"city": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}}
WEATHER = {"type": "object", "properties": CITY, "required": [*CITY], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = "{{ tools }} <tool_call> <|python_tag|>"


def turned(tokenizer: Any) -> Any:
    """The same tokenizer, but marks are special tokens that were none, and none that were."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in parts["added_tokens"]:
        if any(word in token["content"] for word in ("tool", "python")):
            token["special"] = not token["special"]
    backend = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token)


def written(grammars: Grammars, structured: Structured, rng: random.Random) -> str:
    """A random text of a grammar."""
    tokenizer, size, (end,) = grammars.tokenizer, grammars.vocabulary, grammars.eos
    matcher = grammars.matcher(structured)
    tokens: list[int] = []
    while not matcher.ended and len(tokens) < 400:
        bits = torch.zeros(-(-size // 32), dtype=torch.int32)
        matcher.fill(bits)
        matcher.filled(bits)
        if matcher.error:
            return matcher.error
        allowed = unpacked(bits[None])[0].nonzero().flatten().tolist()
        token = end if end in allowed and rng.random() < 0.5 else rng.choice(allowed)
        matcher.take(token)
        tokens += [token] if token != end else []
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def main(directory: str, family: str) -> None:
    published = AutoTokenizer.from_pretrained(directory)
    for tokenizer in (published, turned(published)):
        tokenizer.chat_template = TEMPLATE
        grammars = Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
        special = {n for n, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        dialect: Any = Dialect(SimpleNamespace(tokenizer=tokenizer, special=special), family)  # type: ignore[arg-type]
        for tools, several in ((TOOLS[:1], False), (TOOLS[1:], False), (TOOLS, True)):
            grammar = dialect.family.forced(tools, several, dialect._mark)
            text = written(grammars, Structured(grammar=grammar), random.Random(len(tools)))
            pieces = dialect.reader(tools, False).feed(text, True)
            names = [piece.name for piece in pieces if piece.name]
            calls = ["".join(p.text for p in pieces if p.call == i) for i in range(len(names))]
            content = "".join(p.text for p in pieces if p.kind == "content")
            print(json.dumps({"text": text, "names": names, "calls": calls, "content": content}))


if __name__ == "__main__":
    main(*sys.argv[1:])
