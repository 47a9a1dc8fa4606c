"""Answers, whole and streamed, against the types of openai's and anthropic's own clients.

The clients take what comes without a check; here every key has to be there and of its type.
"""

import json
from functools import cache
from typing import Any

import pytest

from tests.clients.conftest import events, post

pydantic = pytest.importorskip("pydantic")

HI = [{"role": "user", "content": "hi"}]
CITY: dict = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
CITY |= {"additionalProperties": False}
FLAT = {"name": "weather", "parameters": CITY}
CHAT: dict = {"model": "pico", "messages": HI, "max_tokens": 20}
FORM = {"type": "json_schema", "schema": CITY}
ROUTES: dict[str, tuple[str, str, str]] = {
    "chat/completions": ("openai.types.chat", "ChatCompletion", "ChatCompletionChunk"),
    "completions": ("openai.types", "Completion", ""),  # has no type where a text goes on
    "responses": ("openai.types.responses", "Response", "ResponseStreamEvent"),
    "messages": ("anthropic.types", "Message", "RawMessageStreamEvent"),
}


@cache
def adapter(module: str, name: str) -> Any:
    """What checks a type; to build that of all events of a stream takes seconds."""
    return pydantic.TypeAdapter(getattr(pytest.importorskip(module), name))


def check(module: str, name: str, body: Any) -> None:
    adapter(module, name).validate_json(json.dumps(body), strict=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        ("chat/completions", CHAT | {"tools": [{"type": "function", "function": FLAT}],
            "tool_choice": "required", "stream_options": {"include_usage": True}}),
        ("completions", {"model": "pico", "prompt": "def f(", "max_tokens": 3, "logprobs": 1}),
        ("responses", {"model": "pico", "input": "hi", "max_output_tokens": 20, "top_logprobs": 1}),
        ("responses", {"model": "pico", "input": "hi", "tool_choice": "required",
            "max_output_tokens": 90, "tools": [FLAT | {"type": "function"}]}),
        ("responses", {"model": "pico", "input": "hi", "text": {"format": FORM},
            "reasoning": {"effort": "medium", "summary": "auto"}, "max_output_tokens": 90}),
        ("messages", CHAT),
        ("messages", CHAT | {"tools": [{"name": "weather", "input_schema": CITY}],
            "tool_choice": {"type": "any"}, "max_tokens": 90}),
    ],
)  # fmt: skip
def test_answers_have_the_clients_types(url: str, path: str, body: dict) -> None:
    module, whole, part = ROUTES[path]
    sent = {k: v for k, v in body.items() if k != "stream_options"}
    check(module, whole, json.loads(post(url, path, sent)))
    seen = events(url, path, body)
    assert seen
    for event in seen if part else ():
        check(module, part, event)
