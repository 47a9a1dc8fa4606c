"""openai, the client of the protocol's authors."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

HI = [{"role": "user", "content": "hi"}]


class Weather(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        yield client


def test_chats(client: Any) -> None:
    whole = client.chat.completions.create(
        model="pico", messages=HI, max_tokens=5, service_tier="auto", metadata={"a": "b"},
        store=False, verbosity="medium", temperature=0,
    )  # fmt: skip
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="pico", messages=HI, max_tokens=5, temperature=0, stream=True,
            stream_options=options,
        )
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_and_its_call_are_sent_back(client: Any) -> None:
    """With a schema and tools at once, as agents do; objects, and what they are as dicts."""
    options: dict = {"model": "pico", "tools": [openai.pydantic_function_tool(Weather)]}
    options |= {"response_format": Weather, "max_tokens": 400, "temperature": 0}
    options["parallel_tool_calls"] = False
    first = client.chat.completions.parse(messages=HI, **options).choices[0].message
    assert first.tool_calls or first.parsed.city in ("Rome", "Oslo")
    forced = client.chat.completions.parse(messages=HI, tool_choice="required", **options)
    (call,) = forced.choices[0].message.tool_calls
    assert call.function.parsed_arguments.city in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    for message in (forced.choices[0].message, forced.choices[0].message.model_dump()):
        said = [*HI, message, result]
        assert client.chat.completions.create(model="pico", messages=said, max_tokens=1).choices


def test_responses(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}
    options: dict = {"model": "pico", "max_output_tokens": 400, "tools": [tool], "temperature": 0}
    options["parallel_tool_calls"] = False
    options |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    first = client.responses.parse(input="hi", text_format=Weather, **options)
    assert first.output[0].type in ("message", "function_call")
    forced = client.responses.create(
        input="hi", tool_choice={"type": "function", "name": "weather"}, **options
    )
    (call,) = forced.output
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    said = [*HI, *first.output, *forced.output, result]
    last = client.responses.create(
        model="pico", input=said, max_output_tokens=3, top_logprobs=2,
        include=["message.output_text.logprobs"], truncation="auto",
    )  # fmt: skip
    assert last.output[0].content[0].logprobs[0].top_logprobs


def test_completions_and_embeddings(client: Any) -> None:
    answer = client.completions.create(model="pico", prompt="def f(", max_tokens=3, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 3
    (item,) = client.embeddings.create(model="pico", input="x", dimensions=4).data
    assert sum(number**2 for number in item.embedding) == pytest.approx(1, abs=1e-5)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    user = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        client.chat.completions.create(model="pico", messages=user)
