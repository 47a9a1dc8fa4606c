"""How an answer is put together, without a server."""

import json

import pytest

from anybit.engine.llm import Completion
from anybit.engine.output import Delta
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput
from anybit.serve.answers import Asked, Block, Text
from anybit.serve.messages import MessagesAnswer, shown
from anybit.serve.reading import Plain, Thoughts
from anybit.serve.streams import Stream
from anybit.serve.texts import Words


def finish(arguments: str, stop_reason: int | str | None) -> str | None:
    completion = Completion(0, finish="stop", stop_reason=stop_reason)
    return Text(completion, Plain(), [Block("call", arguments, "id", "get")]).finish


def test_only_a_stop_string_cuts_a_call() -> None:
    assert finish('{"a": 1}', None) == finish('{"a": 1}', "x") == "tool_calls"
    assert finish('{"a": "\n"}', "x") == finish("{'a': 1}", None) == "tool_calls"
    assert finish("{'a': 1}", 7) == finish("[" * 100_000, None) == "tool_calls"
    assert finish('{"a', "x") == finish("[" * 100_000, "x") == "stop"
    assert shown(Block("call", '{"a": "\n"}'))["input"] == {"a": "\n"}
    assert shown(Block("call", "[" * 100_000))["input"] == {}


def test_half_a_character_is_no_pattern() -> None:
    for wrong in (Structured(regex="\ud800"), Structured(choice=["a", "\ud800"])):
        with pytest.raises(InvalidInput, match="a text holds half of a surrogate pair"):
            wrong.source({})


def test_a_stream_of_thoughts_is_signed() -> None:
    """Or else clients of Anthropic's protocol drop them; the signature is as empty as a whole's."""
    stream = Stream(["0"], {("0", 0)})
    readers = lambda: Thoughts("<think>", "</think>", False, Plain())  # noqa: E731
    answer = MessagesAnswer(
        Asked("m", [[1]], 1, stream, Words(None), readers=readers), False, False
    )
    events = answer.events()
    next(events)
    with pytest.raises(StopIteration) as end:
        events.send([Delta("0", 0, "<think>a</think>b", [1], finish="stop")])
    found = [json.loads(line[6:]) for line in end.value.value.splitlines() if line[:1] == b"d"]
    kinds = [event.get("delta", event)["type"] for event in found if event["type"][:7] == "content"]
    start, stop = "content_block_start", "content_block_stop"
    assert kinds == [start, "thinking_delta", "signature_delta", stop, start, "text_delta", stop]
    assert found[2]["delta"]["signature"] == shown(Block("reasoning"))["signature"] == ""
