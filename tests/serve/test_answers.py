"""How an answer is put together, without a server."""

import pytest

from anybit.engine.llm import Completion
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput
from anybit.serve.answers import Block, Text
from anybit.serve.messages import shown
from anybit.serve.reading import Plain


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
