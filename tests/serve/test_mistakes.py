"""Every kind of mistake in a request is named, and is the client's."""

import json

import httpx
import pytest

from tests.needs import pairs
from tests.serve.conftest import Live

JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": ""}, 400, "prompt: String should have at least 1"),
        ("completions", {"prompt": []}, 400, "prompt: List should have at least 1"),
        ("completions", {"prompt": [[]]}, 400, "prompt.0: List should have at least 1"),
        ("completions", {"prompt": "x", "made_up": 1}, 400, "knows no field 'made_up'"),
        ("completions", {"prompt": "x", "prompt_logprobs": 99}, 400, "prompt_logprobs: "),
        ("completions", {"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens: Input should be"),
        ("completions", {"prompt": "x", "n": "3"}, 400, "n: Input should be a valid integer"),
        ("completions", {"prompt": [[False]]}, 400, "prompt.0.0: Input should be"),
        ("completions", {"prompt": "x", "temperature": float("nan")}, 400, "finite number"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt: the text holds half of a surrogate"),
        ("chat/completions", {"messages": HI, "store": True}, 400, "store: this server does not"),
        ("chat/completions", {"messages": HI, "store": 0}, 400, "store"),
        ("chat/completions", {"messages": HI, "functions": [1]}, 400, "'functions'; give tools"),
        ("chat/completions", {"messages": HI, "audio": {"voice": "a"}}, 400, "leave it out"),
        (
            "chat/completions",
            {"messages": HI, "tools": [{"type": "custom"}]},
            400,
            "no tools itself",
        ),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "not 'web_search'"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "send all items"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "cannot fill in the middle"),
        ("completions", {"prompt": "x", "best_of": 1, "n": 2}, 400, "best_of=1"),
        ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"4096": 1}}, 400, "token 4096"),
        ("completions", {"prompt": "x", "frequency_penalty": "abc"}, 400, "frequency_penalty"),
        ("completions", {"prompt": "x", "guided_regex": "[0-9"}, 400, "unclosed character class"),
        ("completions", {"prompt": "x", "guided_regex": "1", "guided_choice": ["a"]}, 400, "one"),
        ("chat/completions", {"messages": HI, "tools": TOOLS}, 400, "chat template"),
        ("chat/completions", {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
        ("chat/completions", {"messages": HI, "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
        ("completions", {"prompt": [4096]}, 400, "token 4096 is not in the vocabulary"),
        ("completions", {"prompt": [1] * 512}, 400, "512 tokens"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "'gpt' does not exist"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "min_tokens": 99}, 400, "min_tokens=99"),
        ("completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "at most 16"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n: "),
        ("completions", {"prompt": ["x"] * 9, "n": 128}, 400, "1152 completions"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        (
            "chat/completions",
            {"messages": HI, "response_format": {"type": "xml"}},
            400,
            "'text', 'json_object', 'json_schema'",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": []}]}, 400, "at least 1"),
        ("nothing", {}, 404, "Not Found: this server has no POST /v1/nothing"),
        ("models", {}, 405, "Method Not Allowed: this server has no POST /v1/models"),
    ],
)
def test_mistakes_are_named(live: Live, path: str, body: dict, status: int, message: str) -> None:
    sent = json.dumps(body).encode()  # httpx refuses NaN
    answer = httpx.post(f"{live.url}/v1/{path}", content=sent, headers=JSON, timeout=60)
    assert answer.status_code == status
    error = answer.json()["error"]
    named = "model_not_found" if path == "completions" else "not_found"
    assert error["code"] == (named if status == 404 else None)  # a word, as OpenAI's are
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "x", "model": "gpt"}, "model"),
        ("completions", {"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role"),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": HI, "tool_choice": {}}, "tool_choice.type"),
        (
            "chat/completions",
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ("embeddings", {"input": ""}, "input"),
        ("completions", {"prompt": [[1, 2], []]}, "prompt.1"),
        ("completions", {"prompt": ["x"] * 9, "n": 128}, None),
        ("nothing", {}, None),
    ],
)
def test_mistakes_name_their_field(live: Live, path: str, body: dict, field: str | None) -> None:
    answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)
    assert answer.json()["error"]["param"] == field


HALF = "half of a surrogate pair (\\ud83d)"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("responses", {"input": "a", "metadata": {"a": "\ud83d"}}, "metadata.a"),
        ("responses", {"input": "a", "metadata": {"\ud83d": "a"}}, "metadata"),
        ("responses", {"input": "a", "user": "\ud83d", "stream": True}, "user"),
        ("responses", {"input": [{"role": "user", "content": "\ud83d"}]}, "input.0.content"),
        ("responses", {"input": "a", "tools": [{"type": "function", "name": "f",
            "parameters": {"properties": {"x": {"title": "\ud83d"}}}}]},
            "tools.0.parameters.properties.x.title"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema",
            "name": "\ud83d", "schema": {}}}}, "text.format.name"),
        ("completions", {"prompt": ["a", "b\ud83d"]}, "prompt.1"),
        ("completions", {"prompt": "a", "model": "\ud83d"}, "model"),
        ("completions", {"prompt": "a", "guided_json": {"enum": [{"\ud83d": 1}]}},
            "guided_json.enum.0"),
        ("chat/completions", {"messages": HI, "\ud83d": None}, ""),
        ("messages/count_tokens", {"model": "tiny", "messages": HI, "metadata": "\ud83d"}, None),
        ("embeddings", {"input": "\ud83d\ud83d"}, "input"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_in_every_field(
    live: Live, path: str, body: dict, field: str | None
) -> None:
    """Before anything runs, escaped or not; whole pairs are characters."""
    text = json.dumps(body)
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for sent in (text.encode(), raw, text.encode("utf-16")):
        answer = httpx.post(f"{live.url}/v1/{path}", content=sent, headers=JSON, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert HALF in error["message"]
        if field is not None:  # Anthropic's errors name none apart
            assert error["param"] == field
    assert not live.service.open
    whole = text.replace("\\ud83d", "\\ud83d\\ude00").encode()
    answer = httpx.post(f"{live.url}/v1/{path}", content=whole, headers=JSON, timeout=60)
    assert HALF not in answer.text


MALFORMED = [
    b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe\x00", b"{\"prompt\": \"\\ud800\"}",
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "top_p": Infinity}',
    b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b"[" * 200000, b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    b'{"prompt": ' + b"[" * 40000 + b"]" * 40000 + b"}",
    b'{"\\ud800": 1, "prompt": {"\\udfff": "\\ud800"}}', b'{"prompt": [1, "a"]}',
    b'{"prompt": "x", "stop": ["\\ud800"], "max_tokens": 2}',
    b'{"prompt": "x", "max_tokens": 2, "seed": -' + b"9" * 300 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 300 + b"}",
    b'{"prompt": "\\u0000\\u0000", "max_tokens": 2}',
    b'{"prompt": [1e30]}', b'{"prompt": [-1]}', b'{"prompt": [99999999999999999999999]}',
    b'{"messages": [{"role": "\\ud800", "content": "\\ud800"}], "max_tokens": 1}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"prompt": "x", "stop_token_ids": [99999999999999999999999]}',
    b'{"prompt": "x", "max_tokens": 3, "top_k": 99999999999999999999999999}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "path"), pairs(MALFORMED, ["/v1/completions", "/v1/chat/completions", "/tokenize"])
)
def test_malformed_bodies_are_the_clients_mistake(live: Live, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(live.url + path, content=body, headers=headers, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({}, b'{"prompt": "x"}', 400, "Content-Type"),
        ({"content-type": "application/x-www-form-urlencoded"}, b"{}", 400, "Content-Type"),
        (JSON, b'{"prompt": "\xe9"}', 400, "not JSON: 'utf-8' codec can't decode byte 0xe9"),
        (JSON, b"[" * 200000, 400, "not JSON: "),
        (JSON | {"content-encoding": "gzip"}, b"{}", 415, "Content-Encoding gzip"),
        (JSON | {"content-encoding": "utf-8, BR"}, b"{}", 415, "Content-Encoding utf-8, BR"),
        (JSON | {"content-encoding": "utf-8"}, b"{", 400, "not JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_bodies_that_are_not_json_are_told(
    live: Live, path: str, headers: dict, body: bytes, status: int, message: str
) -> None:
    answer = httpx.post(live.url + path, content=body, headers=headers, timeout=60)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages")  # each in its protocol's form


def test_the_field_that_is_refused_is_the_errors_param(talking: Live) -> None:
    path = "/v1/chat/completions"
    for more, param in (
        ({"made_up": 1}, "made_up"),
        ({"stream_options": {"made_up": 1}}, "stream_options.made_up"),
        ({"messages": [{**HI[0], "x": 1}]}, "messages.0.x"),
        ({"web_search_options": {}}, "web_search_options"),
    ):
        error = talking.post(path, {"messages": HI, "max_tokens": 1} | more).json()["error"]
        assert error["param"] == param
        assert f"knows no field '{param.rpartition('.')[2]}'" in error["message"]


BAD: dict = {"type": "object", "patternProperties": {"^a": {}, "b$": {"type": "null"}}}


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("completions", {"guided_json": BAD}, "guided_json: the grammar is not taken: a key may"),
        ("completions", {"guided_regex": "("}, "guided_regex: the grammar is not taken: "),
        ("completions", {"guided_json": "x"}, "guided_json: the JSON schema is not JSON: "),
        ("completions", {"structured_outputs": {"grammar": "start: x"}}, "structured_outputs: the"),
        ("chat/completions", {"guided_json": BAD}, "guided_json: the grammar is not taken: "),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": 1}}}},
            "response_format: the JSON schema: enum is 1, not a list",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": name, "parameters": schema}}
                       for name, schema in (("f", {}), ("g", {"required": 5}))],
             "tool_choice": "required"},
            "tools: the parameters of 'g': the JSON schema: required is 5, not a list of strings",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}],
             "tool_choice": "required"},
            "tools: the grammar is not taken: a key may match two of its patternProperties",
        ),
        (
            "chat/completions",
            {"chat_template_kwargs": {"made_up": True}},
            "chat_template_kwargs.made_up: the model's chat template does not read it",
        ),
    ],
)  # fmt: skip
def test_a_schema_that_is_refused_is_named(talking: Live, path: str, more: dict, said: str) -> None:
    what = {"prompt": "x"} if path == "completions" else {"messages": HI}
    answer = talking.post(f"/v1/{path}", what | {"max_tokens": 1} | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)
