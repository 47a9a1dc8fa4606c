"""langchain-openai, over both of OpenAI's protocols."""

from typing import Any, Literal

import pytest

langchain = pytest.importorskip("langchain_openai")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.mark.parametrize("responses", [False, True])
def test_a_conversation_with_tools(url: str, responses: bool) -> None:
    model: Any = langchain.ChatOpenAI(
        model="pico", base_url=f"{url}/v1", max_tokens=400, max_retries=0, temperature=0,
        use_responses_api=responses,
    )  # fmt: skip
    assert model.invoke("hi").content
    assert list(model.stream("hi"))
    forced = model.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
    said = forced.invoke("hi")
    (call,) = said.tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    assert model.bind_tools([Weather]).invoke([{"role": "user", "content": "hi"}, said, result])
    form = model.with_structured_output(Weather, method="json_schema")
    assert form.invoke("hi").city in ("Rome", "Oslo")
    both = model.bind_tools([Weather], response_format=Weather, parallel_tool_calls=False)
    assert both.invoke("hi")
