"""litellm, which writes its own fields into what is sent back."""

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

PARAMETERS: dict = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
PARAMETERS |= {"required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def ask(url: str, provider: str = "openai", **options: Any) -> Any:
    base = url if provider == "anthropic" else f"{url}/v1"
    return litellm.completion(f"{provider}/pico", api_base=base, api_key="none", **options)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_conversation_with_tools(url: str, provider: str) -> None:
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    said: list[Any] = [{"role": "user", "content": [text]}]
    options: dict = {"tools": TOOLS, "max_tokens": 100, "temperature": 0}
    message = (
        ask(url, provider, messages=said, tool_choice="required", **options).choices[0].message
    )
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    for back in (message, message.model_dump()):
        again = [*said, back, *({**result, "tool_call_id": c.id} for c in message.tool_calls)]
        assert ask(url, provider, messages=again, **options).choices
    chunks = list(ask(url, provider, messages=said, max_tokens=3, stream=True))
    assert chunks[-1].choices[0].finish_reason
