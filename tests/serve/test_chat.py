"""Chats: structured output, tools and thoughts, in every protocol that has them."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import llguidance
import openai
import pydantic
import pytest

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput
from anybit.serve import protocol
from anybit.serve.conversation import Dialect
from anybit.serve.texts import Job, Words
from anybit.serve.tools import FAMILIES
from tests.serve.conftest import Live, serving
from tests.serve.test_protocol import events

THOUGHTS = "{% if thinking %}<think>\n{% endif %}{# </think> #}"
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
HI = [{"role": "user", "content": "hi"}]
SMALL: dict = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SMALL |= {"additionalProperties": False}


@pytest.fixture(scope="module")
def thinking(model: Path) -> Iterator[Live]:
    """The same model, whose template knows thoughts."""
    llm = LLM(model, max_running=8)
    llm.tokenizer.chat_template += THOUGHTS
    with serving(llm) as live:
        yield live


@pytest.fixture
def client(talking: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=talking.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def choose(live: Live, **body: Any) -> dict:
    answer = live.post("/v1/chat/completions", {"messages": HI, "max_tokens": 200} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SMALL}}},
        {"structured_outputs": {"json": SMALL}},
        {"guided_json": SMALL},
        {"guided_json": json.dumps(SMALL)},
        {"guided_regex": r'\{"a": [12]\}'},
        {"guided_choice": ['{"a": 1}', '{"a": 2}']},
        {"guided_grammar": 'root ::= "{\\"a\\": " ("1" | "2") "}"'},
    ],
)
def test_structured_output(talking: Live, form: dict) -> None:
    choice = choose(talking, **form)
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert choice["finish_reason"] == "stop"
    body = {"prompt": "x", "max_tokens": 200, "n": 2} | form
    for choice in talking.post("/v1/completions", body).json()["choices"]:
        assert json.loads(choice["text"])["a"] in (1, 2)


def test_json_object(talking: Live) -> None:
    short = {"structured_outputs": {"regex": r"\{\}"}}
    assert choose(talking, **short)["message"]["content"] == "{}"
    text = choose(talking, response_format={"type": "json_object"}, max_tokens=5)
    assert text["message"]["content"].startswith("{")


def test_forced_tools(client: openai.OpenAI) -> None:
    """A random model calls a tool with valid arguments; a stream adds up to the same."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, parallel in (("required", False), (named, None)):
        options: dict = {
            "model": "alias/small", "messages": HI, "tools": TOOLS, "seed": 4, "max_tokens": 300,
            "tool_choice": choice,
        }  # fmt: skip
        if parallel is not None:
            options["parallel_tool_calls"] = parallel
        whole = client.chat.completions.create(**options)
        assert whole.model == "alias/small"
        (answer,) = whole.choices
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls or []
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert (arguments["city"] in ("Rome", "Oslo"), arguments["days"] in (1, 2)) == (True, True)
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        parts = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        assert parts[0].function.name == "weather"
        assert len(parts) > 2
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        # The conversation goes on with what the client sends back.
        told = [*HI, answer.message.model_dump(), {"role": "tool", "content": "sunny",
                "tool_call_id": call.id}]  # fmt: skip
        assert client.chat.completions.create(
            model="tiny", messages=told, tools=TOOLS, max_tokens=3
        ).choices


def test_references_of_a_forced_tools_schema_are_its_own(talking: Live) -> None:
    """As pydantic writes them: two tools may mean other things by one name."""
    for i, value in ((0, "a"), (1, "b")):
        tools = [
            {"type": "function", "function": {"name": f"f{n}", "parameters": of_reference(own)}}
            for n, own in enumerate("ab")
        ]
        named = {"type": "function", "function": {"name": f"f{i}"}}
        message = choose(talking, tools=tools, tool_choice=named)["message"]
        (call,) = message["tool_calls"][:1]
        assert call["function"]["name"] == f"f{i}"
        assert json.loads(call["function"]["arguments"]) == {"x": value}
    message = choose(talking, tools=tools, tool_choice="required")["message"]
    for call in message["tool_calls"]:
        wanted = "ab"[int(call["function"]["name"][1])]
        assert json.loads(call["function"]["arguments"]) == {"x": wanted}


@pytest.mark.parametrize("draft", ["04", "06", "07", ""])
@pytest.mark.parametrize("definitions", ["definitions", "$defs"])
@pytest.mark.parametrize("root", [False, True])
def test_references_in_every_draft(draft: str, definitions: str, root: bool) -> None:
    parameters = of_reference("a", definitions)
    if root:  # as converters write it; in these drafts nothing beside such a reference counts
        known = parameters.pop(definitions)
        parameters = {
            "$ref": f"#/{definitions}/Whole",
            definitions: known | {"Whole": parameters},
        }
    if draft:
        parameters["$schema"] = f"http://json-schema.org/draft-{draft}/schema#"
    assert takes([parameters], 0, "a")
    assert not takes([parameters], 0, "b")


def test_a_schemas_own_id() -> None:
    """Tools may even share it."""
    address = "https://example.com/schema"
    schemas = [of_reference(value, address=address) for value in "ab"]
    for i, value in ((0, "a"), (1, "b")):
        assert takes(schemas, i, value)
        assert not takes(schemas, 1 - i, value)
    old = of_reference("a", "definitions") | {"id": address}
    old["$schema"] = "http://json-schema.org/draft-04/schema#"
    old["properties"]["x"]["$ref"] = f"{address}#/definitions/X"
    assert takes([old], 0, "a")
    assert not takes([old], 0, "b")


def of_reference(value: str, definitions: str = "$defs", address: str = "") -> dict[str, Any]:
    return ({"$id": address} if address else {}) | {
        "type": "object",
        "properties": {"x": {"$ref": f"{address}#/{definitions}/X"}},
        "required": ["x"],
        "additionalProperties": False,
        definitions: {"X": {"enum": [value]}},
    }


def takes(schemas: list[dict[str, Any]], index: int, value: str) -> bool:
    """Whether forced tools f0, f1, ... of these schemas let one be called with {"x": value}."""
    tools = [{"function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]
    rules = FAMILIES["llama"].forced(tools, False, json.dumps)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(rules), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps({"name": f"f{index}", "parameters": {"x": value}}).encode()
    return bool(matcher.validate_tokens(list(text)) == len(text))


def test_free_tools_are_optional(talking: Live) -> None:
    choice = choose(talking, tools=TOOLS, max_tokens=10, ignore_eos=True)
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    shown = choose(talking, tools=TOOLS, tool_choice="none", max_tokens=10, seed=1)
    plain = choose(talking, max_tokens=10, seed=1)
    assert shown["message"] == plain["message"]


def test_thoughts(thinking: Live) -> None:
    """The prompt opens the thoughts, so what comes first is one, until `</think>`."""
    options = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 400, "ignore_eos": True}
    options["logit_bias"] = {"4097": -100}
    answer = thinking.post("/v1/chat/completions", {"messages": HI} | options).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert len(message["reasoning_content"]) > 100
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 390
    # A bias closes them at once, and from there on the grammar holds.
    form = {"guided_choice": ["yes", "no"], "logit_bias": {"4097": 100}, "max_tokens": 9}
    form["chat_template_kwargs"] = {"thinking": True}
    message = choose(thinking, **form)["message"]
    assert message["content"] in ("yes", "no")
    assert "reasoning_content" not in message
    # A prompt that does not open them leaves the choice to the model.
    bias = {"4096": 100, "4097": 50}
    message = choose(thinking, guided_choice=["yes", "no"], logit_bias=bias, max_tokens=9)[
        "message"
    ]
    assert set(message["reasoning_content"].split("<think>")) == {""}
    body = {"messages": HI, "stream": True} | options
    stream = events(thinking.post("/v1/chat/completions", body).text)
    deltas = [event["choices"][0]["delta"] for event in stream]
    assert len("".join(delta.get("reasoning_content", "") for delta in deltas)) > 100
    assert not "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": TOOLS, "guided_regex": "a"}, "tools do not go with"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"chat_template_kwargs": {"made_up": 1}}, "made_up"),
        ({"chat_template_kwargs": {"messages": 1}}, "field of its own"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "made_up": 1}]}, "messages.0: this server knows no"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"store": True}, "store"),
    ],
)  # fmt: skip
def test_mistakes_are_named(talking: Live, body: dict, message: str) -> None:
    answer = talking.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2} | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


# OpenAI's Responses.


def test_responses(client: openai.OpenAI) -> None:
    options: dict = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 9}
    whole = client.responses.create(**options)
    assert whole.status in ("incomplete", "completed")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    plain = client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=9)
    assert whole.output_text == plain.choices[0].message.content
    assert (whole.temperature, whole.max_output_tokens, whole.metadata) == (0, 9, {})
    assert (whole.output[-1].status, whole.top_p) == ("incomplete", 1)
    said: dict = {"instructions": "Be short.", "metadata": {"a": "b"}, "reasoning": None}
    named = client.responses.create(**options, **said)
    assert (named.instructions, named.metadata) == ("Be short.", {"a": "b"})
    stream = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert stream[-1].type == "response.incomplete"
    assert stream[-1].response.output_text == text
    kind = {"type": "json_schema", "name": "s", "schema": SMALL}
    short = client.responses.create(model="tiny", input="hi", text={"format": kind})
    assert json.loads(short.output_text)["a"] in (1, 2)


def test_responses_with_tools(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **WEATHER}]
    options: dict = {"model": "tiny", "tools": tools, "tool_choice": "required"}
    options |= {"parallel_tool_calls": False}
    whole = client.responses.create(input=[{"role": "user", "content": "hi"}], **options)
    (call,) = whole.output
    assert (whole.tools[0].name, whole.tool_choice) == ("weather", "required")
    assert whole.parallel_tool_calls is False
    assert (call.type, call.name) == ("function_call", "weather")
    json.loads(call.arguments)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    stream = list(client.responses.create(input=items, stream=True, **options))
    kinds = [event.type for event in stream]
    assert "response.function_call_arguments.delta" in kinds
    (done,) = [e for e in stream if e.type == "response.function_call_arguments.done"]
    parts = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == done.arguments
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


class Weather(pydantic.BaseModel):
    """A place."""

    city: Literal["Rome", "Oslo"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client itself
def test_what_the_client_has_parsed_may_be_sent_back(client: openai.OpenAI) -> None:
    """Its own objects, and what they are as dicts."""
    chat: dict = {"model": "tiny", "messages": HI, "temperature": 0}
    tool = openai.pydantic_function_tool(Weather)
    form = client.chat.completions.parse(response_format=Weather, **chat).choices[0].message
    forced: dict = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**forced, **chat).choices[0].message
    assert form.parsed is not None
    assert called.tool_calls is not None
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}
    items = client.responses.parse(model="tiny", input="hi", text_format=Weather).output
    ways: list[Any] = [lambda it: it, lambda it: it.model_dump()]
    for way in ways:
        for again in ([way(form), *HI], [way(called), result]):
            client.chat.completions.create(**chat | {"messages": [*HI, *again]}, max_tokens=1)
        sent: Any = [*HI, *map(way, items), *HI]
        client.responses.create(model="tiny", input=sent, max_output_tokens=1)


# Anthropic's Messages.

ASK = {"model": "tiny", "max_tokens": 9, "messages": HI, "temperature": 0}
NAMED = {"name": "weather", "input_schema": WEATHER["parameters"]}


def test_messages(talking: Live) -> None:
    answer = talking.post("/v1/messages", ASK | {"system": "Be short."}).json()
    assert (answer["type"], answer["stop_reason"]) == ("message", "max_tokens")
    assert answer["usage"]["output_tokens"] == 9
    (block,) = answer["content"]
    text = talking.post("/v1/messages", ASK | {"system": "Be short.", "stream": True}).text
    parts = [json.loads(part.split("data: ")[1]) for part in text.strip().split("\n\n")]
    kinds = [part["type"] for part in parts]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    streamed = "".join(p["delta"]["text"] for p in parts if p["type"] == "content_block_delta")
    assert streamed == block["text"]
    stop = block["text"][2:5]
    stopped = talking.post("/v1/messages", ASK | {"system": "Be short.", "stop_sequences": [stop]})
    assert stopped.json()["stop_sequence"] == stop
    count = {"model": "tiny", "messages": HI, "system": "Be short."}
    counted = talking.post("/v1/messages/count_tokens", count).json()["input_tokens"]
    usage = answer["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_call_that_a_stop_string_cuts_is_none_to_carry_out(talking: Live) -> None:
    forced = {"tools": TOOLS, "tool_choice": "required", "stop": ['"city"']}
    choice = choose(talking, **forced)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"city"')
    body = ASK | {"tools": [NAMED], "tool_choice": {"type": "any"}, "max_tokens": 200}
    answer = talking.post("/v1/messages", body | {"stop_sequences": ['"city"']}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", '"city"')


def test_a_last_message_of_the_assistant_is_continued(talking: Live) -> None:
    """By Anthropic's protocol; in a chat, if asked. The prompt ends with the message."""
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    prompt = {"prompt": "user: hiassistant: Well, ", "max_tokens": 9, "temperature": 0}
    want = talking.post("/v1/completions", prompt).json()
    answer = talking.post("/v1/messages", ASK | {"messages": begun}).json()
    assert answer["content"][0]["text"] == want["choices"][0]["text"]
    count = {"model": "tiny", "messages": begun}
    counted = talking.post("/v1/messages/count_tokens", count).json()["input_tokens"]
    assert counted == want["usage"]["prompt_tokens"]
    chat = {"messages": begun, "max_tokens": 9, "temperature": 0}
    anew = talking.post("/v1/chat/completions", chat).json()
    assert anew["usage"]["prompt_tokens"] > counted
    chat["continue_final_message"] = True
    answer = talking.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"]["content"] == want["choices"][0]["text"]
    for wrong in ({"messages": HI}, {"add_generation_prompt": True}):
        assert talking.post("/v1/chat/completions", chat | wrong).status_code == 400
    plain = talking.post("/v1/messages/count_tokens", count | {"messages": HI}).json()
    for nothing in ("", []):  # begins nothing
        empty = {"messages": [*HI, {"role": "assistant", "content": nothing}]}
        assert talking.post("/v1/messages/count_tokens", count | empty).json() == plain


def test_thoughts_that_a_message_has_begun_go_on(thinking: Live) -> None:
    begun = [*HI, {"role": "assistant", "content": "<think> Hm"}]
    body = {"messages": begun, "continue_final_message": True, "max_tokens": 4}
    body["logit_bias"] = {"4097": -100}
    message = thinking.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == ("", True)


def test_a_message_that_a_template_changes_is_not_continued(model: Path) -> None:
    llm = LLM(model)
    llm.tokenizer.chat_template = "{{ messages[-1].content.split('.')[0] }}"
    begun = protocol.ChatMessage(role="assistant", content="One. Two")
    body = protocol.ChatRequest(messages=[begun], continue_final_message=True)
    job = Job(llm, Words(llm.tokenizer), threading.Event())
    with pytest.raises(InvalidInput, match="changes the assistant's last message"):
        Dialect(llm).prepare(body, SamplingParams(), job)


def test_formats_of_responses(talking: Live) -> None:
    body = {"input": "hi", "max_output_tokens": 1}
    answer = talking.post("/v1/responses", body | {"text": {}}).json()
    assert answer["text"] == {"format": {"type": "text"}}
    answer = talking.post("/v1/responses", body | {"text": {"format": {"type": "json_schema"}}})
    assert answer.json()["error"]["message"] == "text.format.schema: Field required"
    wrong = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    answer = talking.post("/v1/chat/completions", wrong)
    assert answer.json()["error"]["message"] == "messages.0.content.0.text: Field required"


def test_messages_with_tools(talking: Live) -> None:
    body = ASK | {"tools": [NAMED], "tool_choice": {"type": "tool", "name": "weather"}}
    body |= {"max_tokens": 300, "temperature": 1}
    answer = talking.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "tool_use"
    (call,) = answer["content"]
    assert call["input"]["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    called = {"role": "assistant", "content": answer["content"]}
    body["messages"] = [*HI, called, {"role": "user", "content": [result]}]
    text = talking.post("/v1/messages", body | {"stream": True}).text
    parts = [json.loads(part.split("data: ")[1]) for part in text.strip().split("\n\n")]
    pieces = [p["delta"] for p in parts if p["type"] == "content_block_delta"]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    json.loads("".join(piece["partial_json"] for piece in pieces))
    wrong = talking.post("/v1/messages", ASK | {"made_up": 1})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
    assert "made_up" in wrong.json()["error"]["message"]


# Models, embeddings, tokens.


def test_models_and_aliases(client: openai.OpenAI, talking: Live) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias/small"]
    assert client.models.retrieve("alias/small").id == "alias/small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    for path in ("/health", "/v1/models", "/"):
        head, whole = httpx.head(talking.url + path), httpx.get(talking.url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


def test_embeddings(client: openai.OpenAI, model: Path) -> None:
    texts = ["import os", "x = 1"]
    got = client.embeddings.create(model="tiny", input=texts)  # in base64, as the client wants it
    llm = LLM(model)
    want = llm.embed("x = 1")[0]
    assert got.data[1].embedding == pytest.approx(want, abs=1e-4)
    floats = client.embeddings.create(model="tiny", input="x = 1", encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(want, abs=1e-4)
    assert floats.usage.prompt_tokens == len(llm.encode("x = 1"))


def test_tokens_there_and_back(talking: Live) -> None:
    text = "print('\u00e9\u4e2d\U0001f600')"
    tokens = talking.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert talking.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    assert talking.post("/detokenize", {"tokens": [4100]}).status_code == 400
    chat = talking.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert "user: hi" in talking.post("/detokenize", {"tokens": chat}).json()["prompt"]
