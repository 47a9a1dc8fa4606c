"""pydantic-ai, over three protocols."""

from typing import Any, Literal

import pytest

pydantic = pytest.importorskip("pydantic")
ai = pytest.importorskip("pydantic_ai")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")


class Weather(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("output", ["tool", "native"])
def test_an_agent(url: str, kind: str, output: str) -> None:
    model: Any = getattr(models, kind)(
        "pico", provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    )
    form = Weather if output == "tool" else ai.NativeOutput(Weather)
    agent = ai.Agent(model, output_type=form, model_settings={"max_tokens": 400, "temperature": 0})
    first = agent.run_sync("hi")
    assert first.output.city in ("Rome", "Oslo")
    again = agent.run_sync("and now?", message_history=first.all_messages())
    assert again.output.city in ("Rome", "Oslo")


def test_text_and_a_history(url: str) -> None:
    provider = providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent: Any = ai.Agent(
        models.OpenAIChatModel("pico", provider=provider), model_settings={"max_tokens": 9}
    )
    first = agent.run_sync("hi")
    assert agent.run_sync("more", message_history=first.all_messages()).output
