"""What real clients send is taken: values that mean no, annotations, and vLLM's additions."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.serve import messages
from anybit.serve.answers import Block
from anybit.serve.conversation import Dialect
from anybit.serve.model import Model, model_of
from anybit.serve.protocol import CompletionRequest
from anybit.serve.texts import Words
from tests.needs import pairs
from tests.serve.conftest import Live, serving
from tests.serve.test_protocol import events

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HI},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
}
SMALL: dict = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SMALL |= {"additionalProperties": False}
WEATHER = {"name": "weather", "parameters": SMALL}
TOOLS = [{"type": "function", "function": WEATHER}]


def test_parameters_are_those_of_the_engine() -> None:
    """Each that a request may name reaches the engine, and null is the default."""
    said: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7,
        "stop": ["x"], "include_stop_str_in_output": True, "stop_token_ids": [4], "min_tokens": 2,
        "ignore_eos": True, "prompt_logprobs": 1,
    }  # fmt: skip
    others = {"logit_bias": {"5": 1.0}, "guided_regex": "a+", "max_tokens": 9, "logprobs": 3}
    request = CompletionRequest.model_validate({"prompt": "x"} | said | others)
    got, wanted = request.sampling(9, 3), SamplingParams(**said, logit_bias={5: 1.0}, max_tokens=9)
    assert got.structured is not None
    assert got.structured.regex == "a+"
    assert replace(got, structured=None) == replace(wanted, logprobs=3)
    nothing = dict.fromkeys([*said, *others])
    request = CompletionRequest.model_validate({"prompt": "x"} | nothing)
    assert request.sampling(-1, None) == SamplingParams(max_tokens=None)


def ok(live: Live, path: str, body: dict) -> dict:
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(live: Live, path: str, body: dict) -> str:
    answer = live.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def prompt_of(live: Live, **body: Any) -> str:
    """The text that a conversation becomes."""
    tokens = ok(live, "/tokenize", body)["tokens"]
    return ok(live, "/detokenize", {"tokens": tokens})["prompt"]


# Values that mean no.


NO = [None, False, [], {}, "", "auto", "none", "default", "disabled", "standard_only",
      {"type": "disabled"}, {"mode": "auto", "more": {"deep": None}, "list": []}]  # fmt: skip
YES = [True, 0, 1, "on", [None], {"type": "enabled"}, {"a": [0]}]


@pytest.mark.parametrize(("no", "path"), pairs(NO, [*BODIES]))
def test_a_field_that_says_no_asks_for_nothing(talking: Live, path: str, no: object) -> None:
    ok(talking, path, BODIES[path] | {"made_up": no})


@pytest.mark.parametrize(("yes", "path"), pairs(YES, [*BODIES]))
def test_a_field_that_asks_is_refused_by_its_name(talking: Live, path: str, yes: object) -> None:
    assert "knows no field 'made_up'" in refusal(talking, path, BODIES[path] | {"made_up": yes})


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}, "service_tier": "auto"}),
        ("/v1/messages", {"service_tier": "standard_only", "metadata": {"user_id": "u", "x": 1}}),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}, "mcp_servers": []}),
        ("/v1/messages", {"output_config": {"effort": "high"}}),
        ("/v1/messages/count_tokens", {"thinking": {"type": "disabled"}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("/v1/messages", {"thinking": {"type": "adaptive", "display": "summarized"}}),
        ("/v1/messages/count_tokens", {"thinking": {"type": "enabled", "budget_tokens": 9999}}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled"}}),
        ("/v1/responses", {"include": [], "truncation": "auto", "text": {"verbosity": "medium"}}),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"], "top_logprobs": 0}),
        ("/v1/responses", {"reasoning": {"summary": "auto", "effort": "medium"}, "store": False}),
        ("/v1/responses", {"service_tier": "default", "prompt_cache_retention": "24h"}),
        ("/v1/responses", {"stream_options": {"include_obfuscation": False}}),
        ("/v1/chat/completions", {"verbosity": "medium", "modalities": ["text"], "audio": None}),
        ("/v1/chat/completions", {"service_tier": "auto", "store": False, "metadata": {"a": "b"}}),
        ("/v1/chat/completions", {"prediction": {"type": "content", "content": "x"}}),
        ("/v1/responses", {"service_tier": "flex", "prompt_cache_options": {"mode": "implicit"}}),
        ("/v1/responses", {"max_tool_calls": 3, "client_metadata": {"a": "b"}}),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}, "enable_thinking": False}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}),
        ("/v1/chat/completions", {"request_id": "r", "functions": [], "function_call": "none"}),
        ("/v1/completions", {"use_beam_search": False, "bad_words": [], "user": "u"}),
    ],
)
def test_usual_requests_are_taken(talking: Live, path: str, more: dict) -> None:
    ok(talking, path, BODIES[path] | more)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled"}}, "budget_tokens goes with"),
        ("/v1/messages", {"thinking": {"type": "disabled", "budget_tokens": 1024}}, "goes with"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "budget_tokens: "),
        ("/v1/messages", {"thinking": {"type": "much"}}, "thinking.type: "),
        ("/v1/messages", {"output_config": {"effort": "low"}}, "reasoning_effort"),
        ("/v1/responses", {"include": ["made_up"]}, "include.0: "),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "verbosity"),
        ("/v1/responses", {"tool_choice": 5}, "tool_choice: give an object"),
        ("/v1/responses", {"tool_choice": "some"}, "tool_choice: Input should be 'none'"),
        ("/v1/responses", {"input": 5}, "input: "),
        ("/v1/chat/completions", {"tool_choice": "some"}, "tool_choice: Input should be 'none'"),
        ("/v1/chat/completions", {"enable_thinking": True}, "enable_thinking"),
        ("/v1/chat/completions", {"messages": [5]}, "messages.0: give an object"),
        ("/v1/chat/completions", {"response_format": {}}, "response_format: 'type': Field req"),
        ("/v1/completions", {"stop": 5}, "stop: Input should be a valid string"),
        ("/v1/completions", {"max_tokens": -2}, "max_tokens: "),
    ],
)
def test_what_is_not_offered_is_named(talking: Live, path: str, more: dict, message: str) -> None:
    text = refusal(talking, path, BODIES[path] | more)
    assert message in text
    assert "instance of" not in text  # no names of our classes
    assert "\n" not in text


# What comes back of earlier answers.

ANNOTATED = [
    {"id": "msg_1"}, {"status": "completed"}, {"cache_control": {"type": "ephemeral"}},
    {"provider_specific_fields": {"a": 1}}, {"annotations": [{"type": "url_citation"}]},
    {"caller": {"type": "direct"}}, {"logprobs": [{"token": "a"}]}, {"metadata": {"a": 1}},
    {"reasoning_details": [{"text": "x"}]}, {"audio": None}, {"made_up": None},
]  # fmt: skip


@pytest.mark.parametrize("more", ANNOTATED)
def test_annotations_of_what_is_sent_back_pass(talking: Live, more: dict) -> None:
    function = {"name": "weather", "arguments": '{"a": 1}'} | more
    call = {"id": "call_1", "type": "function", "function": function, "index": 0} | more
    text = {"type": "text", "text": "yes"} | more
    called: dict = {"role": "assistant", "content": [text], "tool_calls": [call]}
    told = {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"}
    chat = [*HI, called | more, told | more]
    ok(talking, "/v1/chat/completions", {"messages": chat, "max_tokens": 1, "tools": TOOLS})
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"a": 1}} | more
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text]} | more
    said = [*HI, {"role": "assistant", "content": [text, use]} | more]
    said.append({"role": "user", "content": [result]})
    ok(talking, "/v1/messages", BODIES["/v1/messages"] | {"messages": said})
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"} | more
    out = {"type": "function_call_output", "call_id": "c", "output": "rain"} | more
    part = {"type": "output_text", "text": "yes"} | more
    message = {"type": "message", "role": "assistant", "content": [part]} | more
    ok(talking, "/v1/responses", {"input": [message, item, out], "max_output_tokens": 1})


def test_thoughts_and_refusals_that_come_back_are_text(talking: Live) -> None:
    said: list[dict] = [{"role": "assistant", "content": None, "refusal": "No."}]
    said.append({"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]})
    assert "assistant: No." in prompt_of(talking, messages=said)
    assert "assistant: Never." in prompt_of(talking, messages=said)
    items = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HI]
    ok(talking, "/v1/responses", {"input": items, "max_output_tokens": 1})
    items = [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}],
              "encrypted_content": "xyz"}, *HI]  # fmt: skip
    ok(talking, "/v1/responses", {"input": items, "max_output_tokens": 1})
    redacted = [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "a"}]
    said = [*HI, {"role": "assistant", "content": redacted}, *HI]
    ok(talking, "/v1/messages", BODIES["/v1/messages"] | {"messages": said})
    whole = ok(talking, "/v1/messages", BODIES["/v1/messages"])  # an answer as it came
    ok(talking, "/v1/messages", BODIES["/v1/messages"] | {"messages": [*HI, whole, *HI]})


def test_vllms_name_of_thoughts(talking: Live) -> None:
    llm = model_of(talking.llm)
    said = messages.ChatMessage(role="assistant", content="a", reasoning="hm")
    assert Dialect(llm)._message(said)["reasoning_content"] == "hm"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "file", "x"])
def test_a_model_reads_text_only(talking: Live, kind: str) -> None:
    content = [{"type": kind, kind: {"url": "data:,"}}]
    user = [{"role": "user", "content": content}]
    for path, body, field in (
        ("/v1/chat/completions", {"messages": user}, "messages.0.content.0"),
        ("/v1/messages", {"messages": user}, "messages.0.content.0"),
        ("/v1/responses", {"input": user}, "input.0.content.0"),
        ("/v1/responses", {"input": content}, "input.0"),
    ):
        text = refusal(talking, path, BODIES[path] | body)
        assert text.startswith(f"{field}: this model reads text only")
        assert f"not {kind!r}" in text
    for path, body in (  # what tools have answered
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": content}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": content}]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": content}]},
        ),
    ):  # fmt: skip
        assert "reads text only" in refusal(talking, path, BODIES[path] | body)


def test_an_item_of_an_earlier_answer_is_not_kept(talking: Live) -> None:
    body = {"input": [{"type": "item_reference", "id": "item_1"}, *HI]}
    assert refusal(talking, "/v1/responses", body).startswith("input.0: this server keeps no")


@pytest.mark.parametrize("given", [None, "null", "", "{}"])
def test_a_call_without_arguments_has_none(talking: Live, given: str | None) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": given}}
    said = [*HI, {"role": "assistant", "tool_calls": [call]}]
    assert '"arguments": {}' in prompt_of(talking, messages=said)
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given}
    ok(talking, "/v1/responses", {"input": [item], "max_output_tokens": 1})


def test_arguments_that_are_no_object(model: Path, talking: Live) -> None:
    """They are text for templates that take one, and named where a template does not."""
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    said = [*HI, {"role": "assistant", "tool_calls": [call]}]
    assert json.dumps('{"a": ') in prompt_of(talking, messages=said)
    llm = LLM(model)
    llm.tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{% for call in m.tool_calls %}"
        "{% for k, v in call.function.arguments | items %}{{ k }}{% endfor %}"
        "{% endfor %}{% endfor %}{# <tool_call> #}"
    )
    with serving(llm) as live:
        for arguments in ('{"a": ', "[1]", "3"):
            call["function"] = {"name": "f", "arguments": arguments}
            text = refusal(live, "/v1/chat/completions", {"messages": said})
            assert "the arguments of a call of 'f' are no JSON object" in text
        call["function"] = {"name": "f", "arguments": "null"}
        ok(live, "/v1/chat/completions", {"messages": said, "max_tokens": 1})


@pytest.mark.parametrize("text", ["null", "[1]", '"a"', "3", "", '{"a": '])
def test_anthropics_answers_can_be_sent_back(talking: Live, text: str) -> None:
    block = messages.shown(Block("call", text, "c", "f"))
    assert block["input"] == {}
    for given in ({}, None):  # what clients make of a stream without arguments
        said = [*HI, {"role": "assistant", "content": [block | {"input": given}]}, *HI]
        ok(talking, "/v1/messages", BODIES["/v1/messages"] | {"messages": said})


# vLLM's additions.


def test_every_event_has_the_usage_if_asked(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = BODIES[path] | {"max_tokens": 5, "ignore_eos": True, "stream": True}
        found = events(live.post(path, body | {"stream_options": options}).text)
        counts = [event["usage"]["completion_tokens"] for event in found]
        assert (counts[-1], counts) == (5, sorted(counts))
        plain = events(live.post(path, body | {"stream_options": {"include_usage": True}}).text)
        assert [event for event in plain if event.get("usage")] == plain[-1:]


def test_log_probabilities_of_the_prompt(live: Live) -> None:
    tokens = live.llm.encode("def main(x):\n    return x")
    body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 2, "logprobs": 2}
    found = ok(live, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    echo = body | {"echo": True, "prompt_logprobs": None}
    want = ok(live, "/v1/completions", echo)["choices"][0]["logprobs"]
    assert found[0] is None
    assert len(found) == len(tokens)
    for token, entry, value in zip(tokens[1:], found[1:], want["token_logprobs"][1:], strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(value)
        assert entry[str(token)]["decoded_token"] == Words(live.llm.tokenizer).text(token)
        assert len(entry) in (2, 3)
        assert sorted(e["rank"] for e in entry.values() if e["rank"]) == [1, 2]
    chat = ok(live, "/v1/chat/completions", {"messages": HI, "max_tokens": 1, "prompt_logprobs": 0})
    assert chat["prompt_logprobs"][0] is None
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (
        chat["usage"]["prompt_tokens"] - 1
    )
    assert "prompt_logprobs" in refusal(live, "/v1/completions", body | {"stream": True})
    assert "prompt_logprobs" in refusal(
        live, "/v1/completions", body | {"echo": True, "logprobs": 1}
    )


def test_a_prompt_is_cut_from_the_left(live: Live) -> None:
    words = "import os, sys, re, json, time\n" * 60
    tokens = live.llm.encode(words)
    want = ok(live, "/v1/completions", {"prompt": tokens[-9:], "max_tokens": 4, "temperature": 0})
    for prompt in (words, tokens):
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "truncate_prompt_tokens": 9}
        got = ok(live, "/v1/completions", body)
        assert got["choices"][0]["text"] == want["choices"][0]["text"]
        assert got["usage"]["prompt_tokens"] == 9
        echo = ok(live, "/v1/completions", body | {"echo": True, "max_tokens": 0})
        assert echo["choices"][0]["text"] == live.llm.decode(tokens[-9:])
    whole = {"input": words, "truncate_prompt_tokens": -1}
    assert ok(live, "/v1/embeddings", whole)["usage"]["prompt_tokens"] == 512
    chat = {"messages": [{"role": "user", "content": words}], "truncate_prompt_tokens": -1}
    assert ok(live, "/v1/chat/completions", chat)["usage"]["total_tokens"] == 512


def test_special_tokens_of_a_prompt(tiny: Path) -> None:
    llm = LLM(tiny)
    llm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    with serving(llm) as live:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            counts = [
                ok(live, path, BODIES[path] | more)["usage"]["prompt_tokens"]
                for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            ]
            assert counts[0] == counts[1] == counts[2] + 1


def test_tokens_of_a_conversation_with_tools(talking: Live) -> None:
    options = {"messages": HI, "tools": TOOLS}
    body = options | {"return_token_strs": True}
    tokens = ok(talking, "/tokenize", body)
    usage = ok(talking, "/v1/chat/completions", options | {"max_tokens": 1})["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
    assert "weather" in "".join(tokens["token_strs"])
    begun = {"messages": [*HI, {"role": "assistant", "content": "Well"}]}
    assert prompt_of(talking, **begun, continue_final_message=True).endswith("Well")


def test_embeddings_of_fewer_numbers(live: Live) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.embeddings.create(model="tiny", input="x").data[0].embedding
        few = client.embeddings.create(model="tiny", input="x", dimensions=3).data[0].embedding
    norm = sum(number**2 for number in whole[:3]) ** 0.5
    assert few == pytest.approx([number / norm for number in whole[:3]], rel=1e-5)
    text = refusal(live, "/v1/embeddings", {"input": "x", "dimensions": len(whole) + 1})
    assert f"have {len(whole)} numbers" in text


def test_a_stop_string_may_stay(live: Live) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    whole = ok(live, "/v1/completions", body)["choices"][0]["text"]
    stop = whole[10:13]
    body |= {"stop": stop, "include_stop_str_in_output": True}
    end = whole.index(stop) + len(stop)
    choice = ok(live, "/v1/completions", body)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (whole[:end], stop)
    streamed = events(live.post("/v1/completions", body | {"stream": True}).text)
    assert "".join(e["choices"][0]["text"] for e in streamed) == whole[:end]


def test_no_limit_is_as_much_as_fits(live: Live) -> None:
    body = {"prompt": [5] * 500, "max_tokens": -1, "ignore_eos": True}
    assert ok(live, "/v1/completions", body)["usage"]["total_tokens"] == 512


def test_log_probabilities_of_responses(talking: Live) -> None:
    body = {"input": "x", "max_output_tokens": 5, "top_logprobs": 2}
    body["include"] = ["message.output_text.logprobs"]
    (item,) = ok(talking, "/v1/responses", body)["output"]
    found = item["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in found] == [2] * len(found)
    raw = b"".join(bytes(entry["bytes"]) for entry in found).decode("utf-8", "replace")
    assert raw == item["content"][0]["text"]
    text = talking.post("/v1/responses", body | {"stream": True}).text
    parts = [json.loads(p.split("data: ")[1]) for p in text.strip().split("\n\n")]
    deltas = [p for p in parts if p["type"] == "response.output_text.delta"]
    assert deltas[0]["logprobs"][0]["top_logprobs"]
    plain = ok(talking, "/v1/responses", BODIES["/v1/responses"])
    assert plain["output"][0]["content"][0]["logprobs"] == []


def test_edits_of_a_context_are_not_made_and_the_answer_says_so(talking: Live) -> None:
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    whole = ok(talking, "/v1/messages", BODIES["/v1/messages"] | edits)
    assert whole["context_management"] == {"applied_edits": []}
    text = talking.post("/v1/messages", BODIES["/v1/messages"] | edits | {"stream": True}).text
    assert '"applied_edits":[]' in text
    assert "context_management" not in ok(talking, "/v1/messages", BODIES["/v1/messages"])


def test_thoughts_are_left_out_where_a_template_can(model: Path) -> None:
    llm = LLM(model)
    llm.tokenizer.chat_template = "{% if enable_thinking is not defined %}Think. {% endif %}" + (
        llm.tokenizer.chat_template
    )
    with serving(llm) as live:
        usual = ok(live, "/v1/chat/completions", {"messages": HI, "max_tokens": 1})["usage"]
        for path, no in (
            ("/v1/chat/completions", {"thinking": {"type": "disabled"}}),
            ("/v1/chat/completions", {"reasoning_effort": "none"}),
            ("/v1/messages", {"thinking": {"type": "disabled"}}),
        ):
            usage = ok(live, path, BODIES[path] | no)["usage"]
            count = usage.get("prompt_tokens") or sum(
                usage[k] for k in ("input_tokens", "cache_read_input_tokens")
            )
            assert count < usual["prompt_tokens"]


def test_thoughts_are_asked_for_and_left_empty(model: Path) -> None:
    """Where a template has the switch; `display: omitted` keeps the blocks without their text."""
    llm = LLM(model)
    llm.tokenizer.chat_template = llm.tokenizer.chat_template + (
        "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    )
    think: dict = {"type": "enabled", "budget_tokens": 1024}
    with serving(llm) as live:
        path = "/v1/messages"
        for display, shown in ((None, True), ("summarized", True), ("omitted", False)):
            more = {"thinking": think | {"display": display}, "max_tokens": 9, "temperature": 0}
            body = BODIES[path] | more
            answer = ok(live, path, body)
            assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
            assert answer["content"][0]["type"] == "thinking"
            assert bool(answer["content"][0]["thinking"]) == shown
            streamed = live.post(path, body | {"stream": True}).text
            assert ("thinking_delta" in streamed) == shown
        body = BODIES[path] | {"max_tokens": 9}
        assert ok(live, path, body)["content"][0]["type"] == "text"


# Errors that are nobody's request.


def test_a_template_that_refuses_names_the_way_out(model: Path) -> None:
    llm = LLM(model)
    llm.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with serving(llm) as live:
        system = [{"role": "system", "content": "Be short."}, *HI]
        for path, body in (
            ("/v1/chat/completions", {"messages": system}),
            ("/v1/responses", {"input": system}),
            ("/v1/messages", {"system": "Be short."}),
            ("/tokenize", {"messages": system, "prompt": None}),
        ):
            text = refusal(live, path, BODIES[path] | body)
            assert "System role not supported" in text
            assert "without a system message" in text
            assert "--chat-template" in text


def test_an_error_of_a_library_is_not_the_clients(
    talking_inside: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Model, text: str, special: bool = True) -> list[int]:
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr(Model, "encode", fail)
    with caplog.at_level(logging.ERROR, "anybit.serve"):
        answer = httpx.post(
            talking_inside.url + "/v1/chat/completions", json={"messages": HI}, timeout=60
        )
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert any(record.exc_info for record in caplog.records if record.name == "anybit.serve")
