"""anthropic, the client of the Messages protocol."""

from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK: dict = {"model": "pico", "max_tokens": 100, "messages": HI}


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, max_retries=0) as client:
        yield client


def test_messages(client: Any) -> None:
    options: dict = {"thinking": {"type": "disabled"}, "service_tier": "auto"}
    system = [{"type": "text", "text": "Code.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(**ASK, **options, system=system, stop_sequences=[])
    assert answer.content[0].type == "text"
    greedy: dict = {"extra_body": {"temperature": 0}}
    with client.messages.stream(**ASK, **greedy) as stream:
        text = "".join(stream.text_stream)
    assert text == client.messages.create(**ASK, **greedy).content[0].text
    counted = client.messages.count_tokens(
        model="pico", messages=HI, system=system, thinking={"type": "disabled"}
    )
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_tools_there_and_back(client: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
    choice = {"type": "tool", "name": "weather"}
    with client.messages.stream(**ASK, tools=tools, tool_choice=choice) as stream:
        answer = stream.get_final_message()
    (call,) = answer.content
    assert call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    said = [*HI, {"role": "assistant", "content": answer.content}]
    said.append({"role": "user", "content": [result]})
    assert client.messages.create(**ASK | {"messages": said}, tools=tools).content


def test_a_schema_and_edits(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(**ASK, extra_body={"output_config": form})
    assert '"city"' in answer.content[0].text
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = client.beta.messages.create(
        **ASK, context_management=edits, betas=["context-management-2025-06-27"]
    )
    assert answer.context_management.applied_edits == []
