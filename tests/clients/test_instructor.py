"""instructor, in the modes that a server can force."""

from typing import Any, Literal

import pytest

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """The weather of a city; nothing else, of which pico would have much to say."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_modes(url: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    client: Any = instructor.from_openai(plain, mode=instructor.Mode[mode])
    limit = "max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"
    user = [{"role": "user", "content": "hi"}]
    found = client.chat.completions.create(
        model="pico",
        messages=user,
        response_model=Weather,
        max_retries=0,
        temperature=0,
        **{limit: 400},
    )
    assert found.city in ("Rome", "Oslo")
