"""Whole answers, streams and errors against the published specifications of three protocols.

The suites look at few of a stream's events. Here each is judged by its own schema, in which all
keys that a specification requires are required, null or not.
"""

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.clients.conftest import events, post

llm_comply = pytest.importorskip("llm_comply")
schema = pytest.importorskip("llm_comply.schema")

SPECS = Path(llm_comply.__file__).parent / "specs"
HI = [{"role": "user", "content": "hi"}]
CITY: dict = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
CITY |= {"additionalProperties": False}
FLAT = {"name": "weather", "parameters": CITY}
CHAT: dict = {"model": "pico", "messages": HI, "max_tokens": 40}
CHATS: list[dict] = [
    {"logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}},
    {"tools": [{"type": "function", "function": FLAT}], "tool_choice": "required"},
    {"max_tokens": 1},
]
RESPONSES: list[dict] = [
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "instructions": "Code."},
    {"tools": [FLAT | {"type": "function"}], "tool_choice": "required", "metadata": {"a": "b"}},
    {"max_output_tokens": 1, "reasoning": {"summary": "auto"}, "presence_penalty": 0.5},
]
MESSAGES: list[dict] = [
    {"stop_sequences": ["you"]},
    {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}},
    {"max_tokens": 1},
]


LOADED: dict[str, Any] = {}


def nullable(part: Any) -> None:
    """The loader makes null a type of what may be null, but no member of its list of values."""
    if isinstance(part, dict):
        if "null" in (part.get("type") or ()) and "enum" in part:
            part["enum"] = [*part["enum"], None]
        part = [*part.values()]
    for inner in part if isinstance(part, list) else ():
        nullable(inner)


def conforms(spec: str, name: str, body: Any) -> None:
    if spec not in LOADED:
        LOADED[spec] = schema.SpecLoader(str(SPECS / spec))
        nullable([LOADED[spec].get_schema(name) for name in LOADED[spec].schema_names])
    assert LOADED[spec].validate(body, name) == [], (name, body)


@pytest.mark.parametrize("more", CHATS)
def test_chats(url: str, more: dict) -> None:
    whole = {k: v for k, v in more.items() if k != "stream_options"}
    answer = json.loads(post(url, "chat/completions", CHAT | whole))
    conforms("openai_chat.json", "CreateChatCompletionResponse", answer)
    for event in events(url, "chat/completions", CHAT | more):
        conforms("openai_chat.json", "CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("more", RESPONSES)
def test_responses(url: str, more: dict) -> None:
    body = {"model": "pico", "input": "hi", "max_output_tokens": 40} | more
    conforms("openresponses.json", "ResponseResource", json.loads(post(url, "responses", body)))
    numbers = []
    for event in events(url, "responses", body):
        name = schema.SSE_EVENT_TO_SCHEMA[event["type"]]
        conforms("openresponses.json", name, event)
        numbers.append(event["sequence_number"])
    assert numbers == [*range(len(numbers))]


@pytest.mark.parametrize("more", MESSAGES)
def test_messages(url: str, more: dict) -> None:
    body = CHAT | more
    answer = json.loads(post(url, "messages", body))
    conforms("anthropic.json", "Message", answer)
    kinds = []
    for event in events(url, "messages", body):
        conforms("anthropic.json", "MessageStreamEvent", event)
        kinds.append(event["type"])
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def test_other_routes(url: str) -> None:
    spec = "openai_chat.json"
    body = {"model": "pico", "prompt": "def f(", "max_tokens": 3, "logprobs": 1}
    conforms(spec, "CreateCompletionResponse", json.loads(post(url, "completions", body)))
    vector = json.loads(post(url, "embeddings", {"model": "pico", "input": "x"}))
    conforms(spec, "CreateEmbeddingResponse", vector)
    conforms(spec, "ListModelsResponse", json.loads(urlopen(f"{url}/v1/models").read()))
    counted = json.loads(post(url, "messages/count_tokens", {"model": "pico", "messages": HI}))
    conforms("anthropic.json", "CountMessageTokensResponse", counted)


@pytest.mark.parametrize("body", [{"model": "gpt", "messages": HI, "max_tokens": 1}, {}, []])
def test_errors(url: str, body: Any) -> None:
    for path in ("chat/completions", "completions", "responses", "embeddings"):
        conforms("openai_chat.json", "ErrorResponse", json.loads(post(url, path, body)))
    conforms("anthropic.json", "ErrorResponse", json.loads(post(url, "messages", body)))
