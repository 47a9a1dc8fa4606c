"""Grammars that end the library that reads them: a 400 for their client, and nothing for others."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from anybit.errors import InvalidInput
from anybit.serve.tools import FAMILIES
from tests.serve.conftest import Live, wait_for
from tests.serve.test_robustness import SHORT, Process, start

__all__ = ["start"]  # a fixture


def chain(length: int) -> dict:
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": refs | {f"d{length}": {"type": "integer"}}}


TOOL = {"type": "function", "function": {"name": "unheard"}}
RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(12000)), 'r12000: "a"'])
DEADLY = {
    "an integer": {"guided_json": {"enum": [-(2**63)]}},
    "a chain of references": {"guided_json": chain(9000)},
    "a chain of objects": {
        "guided_json": {"$ref": "#/$defs/d0", "$defs": {
            f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
            for i in range(5000)
        } | {"d5000": {}}},
    },
    "rules": {"guided_grammar": RULES},
    "copies": {"guided_regex": "(a{1000}){1000}"},
}  # fmt: skip


def test_the_server_outlives_them(start: Callable[[int, float], Process]) -> None:
    server = start(0, 5)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for name, form in DEADLY.items():
            answer = client.post("/v1/completions", json=SHORT | form)
            assert (answer.status_code, server.healthy()) == (400, True), name
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error", name
            assert "\n" not in error["message"], name
        body = SHORT | {"guided_json": {"const": 5}, "max_tokens": 9}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "5"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompts_do_not_wait_for_grammars(
    talking_inside: Live, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    grammars = talking_inside.server.llm.grammars
    assert grammars is not None
    with grammars._lock:
        trial, _ = grammars._ready()
    judge, go_on = trial.judge, threading.Event()

    def held(kind: str, text: str) -> dict:
        assert go_on.wait(60)
        return judge(kind, text)

    monkeypatch.setattr(trial, "judge", held)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    body = SHORT if path == "/v1/completions" else chat
    slow = [body | {"guided_regex": f"{path}{i}"} for i in range(3)]
    slow += [chat | {"tools": [TOOL], "tool_choice": "required"}] if body is chat else []
    with ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(talking_inside.post, path, each) for each in slow]
            assert wait_for(lambda: talking_inside.server.texts.jobs == len(slow))
            assert talking_inside.post(path, body).status_code == 200
            assert not any(answer.done() for answer in waiting)
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in waiting] == [200] * len(slow)


def test_numbers_of_a_request_are_not_rounded(live: Live) -> None:
    """As the bytes say them: neither by the parser of requests nor by the grammar."""

    def ask(schema: str) -> httpx.Response:
        body = json.dumps(SHORT | {"max_tokens": 40})[:-1] + f', "guided_json": {schema}}}'
        headers = {"content-type": "application/json"}
        return httpx.post(live.url + "/v1/completions", content=body, headers=headers, timeout=60)

    for number in ("9007199254740992", "-9007199254740992", "9223372036854775807", "0.1"):
        text = ask(f'{{"enum": [{number}]}}').json()["choices"][0]["text"]
        assert text == number
    for number in ("9007199254740993", "1e400", "-9223372036854775808", "123456789.12345679"):
        answer = ask(f'{{"enum": [{number}]}}')
        assert answer.status_code == 400
        assert "kept exactly" in answer.json()["error"]["message"]


@pytest.fixture
def broken(inside: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str, text: str) -> dict:
        raise RuntimeError("the library has a bug")

    grammars = inside.server.llm.grammars
    assert grammars is not None
    with grammars._lock:
        trial, _ = grammars._ready()
    monkeypatch.setattr(trial, "judge", fail)


@pytest.mark.usefixtures("broken")
def test_a_bug_is_no_mistake_of_the_client(inside: Live, caplog: pytest.LogCaptureFixture) -> None:
    answer = inside.post("/v1/completions", SHORT | {"guided_regex": "unheard"})
    assert answer.status_code == 500
    assert "the library has a bug" in answer.json()["error"]["message"]
    assert "Traceback" in caplog.text


def test_a_grammar_that_cannot_go_on_is_the_clients(live: Live) -> None:
    grammar = "start: " + " | ".join(f'"d{i}"' for i in range(5000))
    answer = live.post("/v1/completions", SHORT | {"guided_grammar": grammar})
    assert answer.status_code == 400
    assert "make it simpler" in answer.json()["error"]["message"]


def test_tools_are_checked_as_schemas_are() -> None:
    """The numbers of their parameters, too; what is refused is refused before a model runs."""
    parameters = {"type": "object", "properties": {"id": {"enum": [2**53 + 1]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for family in FAMILIES.values():
        with pytest.raises(InvalidInput, match="kept exactly"):
            family.forced(tools, True, json.dumps)
