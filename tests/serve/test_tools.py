"""Tools together with a schema: the answer is a call, or an object of the schema."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
from transformers import AutoTokenizer

from anybit.engine.llm import LLM
from anybit.errors import InvalidInput
from anybit.serve.conversation import Dialect
from anybit.serve.function_grammar import Functions, Unwritable
from anybit.serve.reading import Calls
from anybit.serve.tools import FAMILIES, Either
from tests.serve.conftest import Live, serving
from tests.serve.test_chat import THOUGHTS
from tests.serve.test_protocol import events
from tests.serve.test_reading import keyed, read
from tests.serve.test_requests import HI, SMALL, TOOLS, WEATHER, ok, prompt_of, refusal

FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SMALL}}
CALL = 4098  # the token <tool_call>


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_call_or_an_object(talking: Live, stream: bool) -> None:
    body: dict = {"messages": HI, "max_tokens": 200, "tools": TOOLS, "response_format": FORMAT}
    body |= {"parallel_tool_calls": False, "stream": stream}
    for bias, called in ((100, True), (-100, False)):
        answer = talking.post("/v1/chat/completions", body | {"logit_bias": {str(CALL): bias}})
        assert answer.status_code == 200, answer.text
        if stream:
            deltas = [event["choices"][0]["delta"] for event in events(answer.text)]
            content = "".join(delta.get("content", "") for delta in deltas)
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            arguments = "".join(call["function"]["arguments"] for call in calls)
        else:
            message = answer.json()["choices"][0]["message"]
            content, calls = message["content"], message.get("tool_calls", [])
            arguments = "".join(call["function"]["arguments"] for call in calls)
        assert bool(calls) == called
        assert json.loads(arguments if called else content)["a"] in (1, 2)


def test_tools_and_a_schema_in_every_protocol(talking: Live) -> None:
    openais = {"input": "x", "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 200}
    openais["text"] = {"format": {"type": "json_schema", "name": "s", "schema": SMALL}}
    kinds = {item["type"] for item in ok(talking, "/v1/responses", openais)["output"]}
    assert kinds in ({"message"}, {"function_call"})
    named = openais | {"tool_choice": {"type": "function", "name": "weather"}}
    (item,) = ok(talking, "/v1/responses", named)["output"]
    assert item["type"] == "function_call"
    tools = [{"name": "weather", "input_schema": SMALL}]
    anthropics = {"model": "tiny", "messages": HI, "max_tokens": 200, "tools": tools}
    anthropics["output_config"] = {"format": {"type": "json_schema", "schema": SMALL}}
    kinds = {part["type"] for part in ok(talking, "/v1/messages", anthropics)["content"]}
    assert kinds in ({"text"}, {"tool_use"})
    del anthropics["tools"]
    (part,) = ok(talking, "/v1/messages", anthropics)["content"]
    assert json.loads(part["text"])["a"] in (1, 2)


def test_only_allowed_tools_are_called(talking: Live) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    only = [{"type": "function", "function": {"name": "weather"}}]
    body: dict = {"messages": HI, "max_tokens": 200, "tools": [other, *TOOLS]}
    allowed = {"mode": "required", "tools": only}
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    message = ok(talking, "/v1/chat/completions", body)["choices"][0]["message"]
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"weather"}
    flat = {"input": "x", "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 200}
    choice = {"type": "allowed_tools", "mode": "required"}
    choice["tools"] = [{"type": "function", "name": "weather"}]
    (item, *_) = ok(talking, "/v1/responses", flat | {"tool_choice": choice})["output"]
    assert item["type"] == "function_call"
    choice["tools"] = [{"type": "function", "name": "absent"}]
    text = refusal(talking, "/v1/responses", flat | {"tool_choice": choice})
    assert "'absent', which is not among the tools" in text


def test_documents_that_are_text_are_read(talking: Live) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "abc"}
    part: dict = {"type": "document", "title": "T", "source": source}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    as_text = {"model": "tiny", "messages": [{"role": "user", "content": "T\nabc\n"}]}
    count = "/v1/messages/count_tokens"
    assert ok(talking, count, body) == ok(talking, count, as_text)
    part["source"] = {"type": "base64", "media_type": "application/pdf", "data": ""}
    assert "not 'base64'" in refusal(talking, count, body)


def test_arguments_are_an_object_whatever_the_schema_says() -> None:
    rule = FAMILIES["hermes"].call
    for parameters in ({}, {"type": ["object", "null"]}, {"properties": {"a": {"const": 1}}}):
        text = rule({"name": "f", "parameters": parameters})
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"),
            llguidance.LLMatcher.grammar_from_lark(f"start: {text}"),
            log_level=0,
        )
        begun = '{"name": "f", "arguments": '
        assert matcher.validate_tokens(list(f"{begun}{{".encode())) == len(begun) + 1
        for other in ("[", "1", '"', "null"):
            assert matcher.validate_tokens(list(f"{begun}{other}".encode())) == len(begun)
    text = {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"type": "string"}]}}}
    for wrong in ({"type": "string"}, text):
        with pytest.raises(InvalidInput, match="of type 'string'; arguments are an object"):
            rule({"name": "f", "parameters": wrong})


LOOP = {"$ref": "#/$defs/a"}
TWICE: dict = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "string"}}, "required": True},
        {"properties": {"x": False}},
        {"properties": {"x": {"type": ["string", "text"]}}},
        {"properties": {"x": {"anyOf": [{"$ref": "#/nowhere"}, {"type": "string"}]}}},
    ],
)
def test_what_functions_cannot_say_is_left_to_json(schema: dict) -> None:
    with pytest.raises(Unwritable):
        Functions(json.dumps).call("f", schema)
    tools: list[dict] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    rule = FAMILIES["hermes"].call(tools[0]["function"])
    assert rule in FAMILIES["qwen-coder"].forced(tools, False, json.dumps)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"x": {"type": "string"}}, "required": 1}, "required is 1"),
        ({"properties": "x"}, 'properties is "x"'),
        ({"properties": {"x": 5}}, 'properties is {"x": 5}'),
        ({"properties": {"x": {"anyOf": 5}}}, "anyOf is 5"),
        ({"properties": {"x": {"type": ["string", {}]}}}, 'type is ["string", {}]'),
        ({"properties": {"x": {"enum": "abc"}}}, 'enum is "abc"'),
        ({"properties": {"x": {"enum": 5, "type": ["string", "null"]}}}, "enum is 5"),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "qwen-coder"])
def test_parameters_that_are_no_schema_are_named(family: str, schema: dict, keyword: str) -> None:
    tools: list[dict] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InvalidInput, match=re.escape(f"the JSON schema: {keyword}, not ")):
        FAMILIES[family].forced(tools, False, json.dumps)


def test_options_of_functions_that_refer_to_each_other() -> None:
    loop = {"anyOf": [LOOP, {"type": "string"}]}
    for inner, of in (
        (LOOP, {"a": loop}),
        ({"$ref": "#/$defs/d0"}, TWICE | {"d40": {"type": "string"}}),
    ):
        schema = {"properties": {"x": inner}, "required": ["x"], "$defs": of}
        tools: list[dict] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        grammar = FAMILIES["qwen-coder"].forced(tools, False, json.dumps)
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"),
            llguidance.LLMatcher.grammar_from_lark(grammar),
            log_level=0,
        )
        text = b"<tool_call>\n<function=f>\n<parameter=x>\n[1"
        assert matcher.validate_tokens(list(text)) == len(text)


def test_white_space_does_not_hide_a_list() -> None:
    """What is read without it is held to the list's schema."""
    x = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
    schema = {"type": "object", "properties": {"x": x}, "required": ["x"]}
    tools: list[dict] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = FAMILIES["qwen-coder"].forced(tools, False, json.dumps)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    begun = "<tool_call>\n<function=f>\n<parameter=x>\n"
    for space in ("", " ", "\n", "\x1c", "\x1f", "\x85", "\xa0", "\u3000"):
        text = f'{begun}{space}["a"'.encode()
        assert matcher.validate_tokens(list(text)) < len(text), repr(space)
    text = f"{begun}[1]\n</parameter>".encode()
    assert matcher.validate_tokens(list(text)) == len(text)


def test_a_tool_without_parameters_gets_none() -> None:
    for function in ({"name": "f"}, {"name": "f", "parameters": None}):
        grammar = llguidance.LLMatcher.grammar_from_lark(
            f"start: {FAMILIES['llama'].call(function)}"
        )
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
        text = b'{"name": "f", "parameters": {}}'
        assert matcher.validate_tokens(list(text)) == len(text)
        assert matcher.validate_tokens(list(text.replace(b"{}", b'{"'))) == len(text) - 2


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral", "qwen-coder"])
def test_grammars_of_a_call_or_an_object(family: str) -> None:
    form = FAMILIES[family]
    grammar = form.optional(TOOLS, True, json.dumps, SMALL)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    arguments = "".join(form.opening(WEATHER)) + '{"a": 1}}'
    call = {
        "hermes": f"<tool_call>\n{arguments}\n</tool_call>",
        "llama": arguments,
        "mistral": f"[TOOL_CALLS][{arguments}]",
        "qwen-coder": "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
    }[family]
    for text, kind in ((call, "call"), ('{"a": 1}', "content")):
        assert matcher.validate_tokens(list(text.encode())) == len(text)
        reader = Either(form.reader(TOOLS), form.begins(TOOLS))
        pieces = [p for char in text for p in reader.feed(char)] + reader.feed("", True)
        assert {piece.kind for piece in pieces} == {kind}
        assert json.loads("".join(piece.text for piece in pieces))["a"] in (1, "1")
    assert matcher.validate_tokens(list(b"So: ")) == 0


def test_an_object_that_may_be_taken_for_a_call_is_refused(model: Path) -> None:
    """Where calls are bare objects."""
    llm = LLM(model)
    llm.tokenizer.chat_template += '{# tools "parameters": #}'
    body: dict = {"messages": HI, "tools": TOOLS, "max_tokens": 200}
    named = {"type": "object", "properties": {"name": {"enum": ["a"]}}, "required": ["name"]}
    named["additionalProperties"] = False
    with serving(llm, tool_parser="llama") as live:
        ok(live, "/v1/chat/completions", body | {"response_format": FORMAT})
        form = {"type": "json_schema", "json_schema": {"schema": named}}
        text = refusal(live, "/v1/chat/completions", body | {"response_format": form})
        assert "property 'name', with which this model's tool calls begin" in text


def test_an_object_may_hold_the_marks_of_a_call() -> None:
    reader = Either(Calls(("<tool_call>",), ("</tool_call>",)), ("<tool_call>",))
    text = '{"a": "<tool_call>"}'
    assert "".join(piece.text for piece in reader.feed(text, True)) == text


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'),
        ("qwen-coder", "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n"
         "</function>\n</tool_call>"),
        ("glm", keyed("weather", a="1")),
    ],
)  # fmt: skip
def test_a_call_ends_thoughts_that_nothing_has_ended(
    model: Path, family: str, call: str, size: int
) -> None:
    """Qwen3.5 forgets `</think>` now and then. Another tool's name is a thought."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += THOUGHTS
    dialect = Dialect(SimpleNamespace(tokenizer=tokenizer, special=set()), family)  # type: ignore[arg-type]
    for begun, thought in ((True, "Hm."), (False, "<think>Hm.")):
        text = f"{thought}\n{call}"
        found = read(dialect.reader(TOOLS, begun), text, size)
        assert found == ("Hm.\n", "", [("weather", '{"a": 1}')])
        text = text.replace("weather", "climate")
        assert read(dialect.reader(TOOLS, begun), text, size)[2] == []
        text = f"{thought}\n{call}</think>{call}"  # a grammar knows where thoughts end
        assert len(read(dialect.reader(TOOLS, begun, free=False), text, size)[2]) == 1


def test_llama_4_marks_its_calls() -> None:
    call = '{"name": "weather", "parameters": {"a": 1}}'
    text = f"<|python_start|>{call}<|python_end|>"
    found = read(FAMILIES["llama"].reader(TOOLS), text, 3)
    assert found == ("", "", [("weather", '{"a": 1}')])


def test_a_list_of_no_parts_is_no_text(talking: Live) -> None:
    """As some clients send back what has called tools alone."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    prompts = {
        prompt_of(talking, messages=[*HI, {"role": "assistant", "tool_calls": [call]} | content])
        for content in ({"content": []}, {"content": ""}, {"content": None}, {})
    }
    assert len(prompts) == 1
