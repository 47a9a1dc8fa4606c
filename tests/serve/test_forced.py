"""Forced calls of every family: what a grammar lets through is read as valid calls of its tools."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from anybit.engine.llm import LLM
from anybit.engine.masks import fill, unpacked
from anybit.engine.structured import Grammars, Structured, by_number
from anybit.serve.reading import Piece
from anybit.serve.tools import FAMILIES, Family
from tests.engine.conftest import PICO
from tests.serve.conftest import serving
from tests.serve.test_reading import read
from tests.serve.test_requests import HI, ok

CUT = [
    "a</parameter>\n<parameter=note>b",
    "</function> </tool_call> now",
    "</parameter><tool_call>",
]
CUT += ["</tool_call><tool_call>", "free", "</parameter></function>"]
EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "count": {"type": ["integer", "null"], "minimum": 2, "maximum": 12},
        "mode": {"enum": ["a", "bc", None]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"enum": CUT}, "maxItems": 2},
        "either": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/lines"}]},
    },
    "required": ["path", "mode", "lines"],
    "$defs": {"line": {"enum": ["</parameter>", "}<|end|>", "</tool_call>", 7]}},
    "additionalProperties": False,
}
ONE_OF: dict[str, Any] = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
ONE_OF |= {"properties": {"a": {"const": 1}, "b": {"type": "boolean"}}}
ONE_OF |= {"additionalProperties": False}
FREE = {"type": "object", "additionalProperties": {"type": "string"}}
DATED: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "string", "format": "date"}},
}
DATED |= {"required": ["on"], "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"edit": EDIT, "any.of": ONE_OF, "free": FREE, "no-thing": None}
SCHEMAS |= {"dated": DATED, "odd": {"properties": {"a>b\n": {"type": "string", "maxLength": 3}}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name} | ({"parameters": s} if s else {})}
    for name, s in SCHEMAS.items()
]


def tokenizer_of(family: Family, added: str) -> Any:
    """pico's, with the family's marks as added tokens, or as text."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    if added != "split":
        tokenizer.add_tokens([AddedToken(m, special=added == "special") for m in family.marks])
    return tokenizer


MARKS = ["\n</parameter>", "</tool_call>", "</function>", "</parameter>", "<|end|>", *'>"}]']


def closing(text: str, allowed: set[int], tokenizer: Any, rng: random.Random) -> int | None:
    """An allowed token of a mark that closes something; of the one that is begun, if one is."""
    found: list[tuple[int, int]] = []
    for mark in rng.sample(MARKS, len(MARKS)):
        whole = tokenizer.encode(mark)
        if len(whole) == 1:
            found.append((9 if len(mark) > 1 else 0, whole[0]))
        else:
            begun = [size for size in range(len(mark)) if text.endswith(mark[:size])]
            found += [(size, tokenizer.encode(mark[size])[0]) for size in begun]
    taken = [each for each in found if each[1] in allowed]
    return max(taken, key=lambda each: each[0])[1] if taken else None


def walk(grammars: Grammars, text: Structured, rng: random.Random, tokenizer: Any) -> str:
    """A random text of a grammar; after some tokens, one that ends soon."""
    matcher, tokens = grammars.matcher(text), []
    bits = torch.zeros(1, -(-grammars.vocabulary // 32), dtype=torch.int32)
    while not matcher.ended:
        fill([matcher], bits)()
        written = tokenizer.decode(tokens[-12:], skip_special_tokens=False)
        assert not matcher.error, (matcher.error, written)
        allowed = set(unpacked(bits)[0].nonzero().flatten().tolist())
        assert allowed, written
        assert len(tokens) < 900, written
        many = len(tokens) > 30
        token = (
            closing(written, allowed, tokenizer, rng)
            if rng.random() < (0.8 if many else 0.2)
            else None
        )
        if many and 0 in allowed:
            token = 0
        token = rng.choice(sorted(allowed)) if token is None else token
        matcher.take(token)
        tokens += [] if token == 0 else [token]
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def calls_of(family: Family, text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as the family's reader has them."""
    reader, pieces = family.reader(TOOLS), list[Piece]()
    at = 0
    while at < len(text):
        size = rng.randint(1, 9)
        pieces += reader.feed(text[at : at + size])
        at += size
    pieces += reader.feed("", last=True)
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.kind == "call":
            calls.setdefault(piece.call, [piece.name or "", ""])[1] += piece.text
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("added", ["special", "plain", "split"])
@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_are_read_as_valid_ones(name: str, added: str) -> None:
    family, rng = FAMILIES[name], random.Random(5)
    tokenizer = tokenizer_of(family, added)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([0]))
    numbers = by_number(tokenizer)

    def mark(text: str) -> str:
        return f"<[{numbers[text]}]>" if text in numbers else json.dumps(text)

    seen = set()
    for tool in [None, *TOOLS]:
        tools = TOOLS if tool is None else [tool]
        grammar = Structured(grammar=family.forced(tools, tool is None, mark))
        for _ in range(2 if tool is None else 1):
            text = walk(grammars, grammar, rng, tokenizer)
            content, calls = calls_of(family, text, rng)
            assert calls, text
            assert not content.strip(), text
            for called_name, arguments in calls:
                schema = SCHEMAS[called_name] or {"additionalProperties": False}
                assert tool is None or called_name == tool["function"]["name"]
                assert jsonschema_rs.is_valid(schema, json.loads(arguments)), (text, arguments)
                seen.add(called_name)
    assert seen == set(SCHEMAS)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_lists_hold_the_marks_of_calls(size: int) -> None:
    reader = FAMILIES["qwen-coder"].reader
    schema = {"type": "object", "properties": {"x": {"type": "array"}, "y": {"type": "string"}}}
    tools: list[dict[str, Any]] = [{"function": {"name": "f", "parameters": schema}}]
    begin, end = "<tool_call>\n<function=f>\n<parameter=x>\n", "</function>\n</tool_call>"
    for mark in CUT:
        value = json.dumps([mark, {mark: mark}])
        for more in ("", "<parameter=y>\nz\n</parameter>\n"):
            text = f"{begin}{value}\n</parameter>\n{more}{end}"
            _, content, [(_, arguments)] = read(reader(tools), f"{text} Then.", size)
            want = {"x": json.loads(value)} | ({"y": "z"} if more else {})
            assert (content, json.loads(arguments)) == ("Then.", want)
    for broken in ('["a]', '["a', "[1", "['a', "):  # what follows is not taken for a part of it
        text = f"{begin}{broken}\n</parameter>\n{end}"
        _, content, calls = read(reader(tools), f'{text}\n{text}\nSay "hi".', size)
        assert (content, calls) == ('Say "hi".', 2 * [("f", json.dumps({"x": broken}))])


@pytest.mark.parametrize("parser", ["qwen-coder", "harmony"])
def test_a_server_forces_them(model: Path, parser: str) -> None:
    llm = LLM(model)

    def liking(*words: str) -> dict[str, int]:
        """Biases for tokens that such texts begin with."""
        texts = {word[:size] for word in words for size in range(1, 12)}
        found = [llm.encode(text, special=False) for text in texts]
        return {str(tokens[0]): 100 for tokens in found if len(tokens) == 1}

    body = {"messages": HI, "tools": [TOOLS[1], TOOLS[3]], "max_tokens": 100}
    named = {"type": "function", "function": {"name": "any.of"}}
    schema = {"const": [1, "x"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    calls: dict[str, Any] = {"logit_bias": liking("<tool_call>", "commentary")}
    answers: dict[str, Any] = {"logit_bias": liking("[", "final")}
    with serving(llm, tool_parser=parser) as live:
        for choice in ("required", named):
            answer = ok(live, "/v1/chat/completions", body | calls | {"tool_choice": choice})
            found = answer["choices"][0]["message"]["tool_calls"]
            assert found
            for call in (one["function"] for one in found):  # a second one, if the model likes
                arguments = json.loads(call["arguments"])
                assert jsonschema_rs.is_valid(SCHEMAS[call["name"]] or {}, arguments)
        body |= {"response_format": form, "parallel_tool_calls": False}
        message = ok(live, "/v1/chat/completions", body | calls)["choices"][0]["message"]
        assert len(message["tool_calls"]) == 1
        message = ok(live, "/v1/chat/completions", body | answers)["choices"][0]["message"]
        assert json.loads(message["content"]) == [1, "x"]
        del body["tools"]
        message = ok(live, "/v1/chat/completions", body | answers)["choices"][0]["message"]
        assert json.loads(message["content"]) == [1, "x"]
