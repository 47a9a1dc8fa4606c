"""HTTP itself, byte by byte: what clients send that is unusual, and when connections end."""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from anybit.engine.engine import Delta
from anybit.engine.llm import LLM
from anybit.errors import Unsupported
from anybit.serve.answers import Asked, ChatAnswer, CompletionsAnswer, OpenAI
from anybit.serve.commands import served
from anybit.serve.connection import LIMIT
from anybit.serve.encoding import dumps, event
from anybit.serve.run import bind
from anybit.serve.streams import Stream
from tests.serve.conftest import Live, held, serving, wait_for
from tests.serve.test_limits import SHORT, ask, connect, rest

VERSION = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def request(body: dict[str, object], *headers: str, path: str = "/v1/completions") -> str:
    text = json.dumps(body)
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(text)}", "", text])


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


@pytest.mark.parametrize("path", ["/v1/completions/", "/metrics/", "/health/", "/v1/messages/"])
def test_nobody_is_sent_to_another_host(live: Live, path: str) -> None:
    for method in ("GET", "POST"):
        text = f"{method} {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        answer = ask(live, text)
        assert statuses(answer)[0] in (404, 405)
        assert b"evil.example" not in answer


@pytest.mark.parametrize("order", [0, 1])
def test_a_length_told_twice_ends_the_connection(live: Live, order: int) -> None:
    """As RFC 9112, 6.1 says: what is in front may have read another body."""
    body = json.dumps(SHORT)
    two = ["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"]
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "\r\n".join(two[::-1] if order else two)
    answer = ask(live, f"{head}\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n{VERSION}")
    assert statuses(answer) == [200]
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "lines",
    [
        "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, gzip", "Content-Length: 1, 1",
        "Content-Length: 1\r\nContent-Length: 2", "Content-Length: -1", "Content-Length : 1",
        "Host: y", "A: b\r\n c: d", "A\x00: b",
    ],
)  # fmt: skip
def test_what_may_be_read_in_two_ways_is_refused(live: Live, lines: str) -> None:
    answer = ask(live, f"GET /version HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\nx{VERSION}")
    assert statuses(answer) in ([400], [501])
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "text", ["GET /version HTTP/1.1\r\n\r\n", "nonsense\r\n\r\n", "\x16\x03\x01"]
)
def test_what_is_no_request_is_a_400(live: Live, text: str) -> None:
    assert statuses(ask(live, text)) == [400]
    assert statuses(ask(live, VERSION + text)) == [200, 400]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(live: Live, stream: bool) -> None:
    body = SHORT | {"stream": stream, "ignore_eos": True}
    for many in (1, 2):
        with connect(live.port, request(body) * many) as client:
            client.shutdown(socket.SHUT_WR)
            answer = rest(client)
        assert statuses(answer) == [200] * many
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"[DONE]" if stream else b'"usage"') == many
    assert live.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_leaves_nothing(live: Live, stream: bool) -> None:
    """Its last sign is the same as of one that sends no more."""
    body = SHORT | {"stream": stream, "ignore_eos": True, "max_tokens": 400}
    with held(live.engine):
        with connect(live.port, request(body)):
            assert wait_for(lambda: live.service.texts == 1)
        assert wait_for(lambda: not live.service.open)


def test_a_whole_address_is_a_target(live: Live) -> None:
    for target, status in (
        ("http://x/version", 200), ("HTTP://user@x:80/version?a=b", 200), ("http://x", 200),
        ("ftp://x/version", 404), ("*", 404), ("/version#there", 200), ("//x/version", 404),
    ):  # fmt: skip
        text = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = ask(live, text)
        assert statuses(answer) in ([status], [400]) if status == 404 else [status], target


def test_other_protocols_are_not_spoken(live: Live) -> None:
    """A request that would like one is answered as it is, with its body; the connection stays."""
    wish = request(
        SHORT, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x"
    )
    end = VERSION.replace("Host: x", "Host: x\r\nConnection: close")
    assert statuses(ask(live, wish + end)) == [200, 200]
    with connect(live.port, wish[:-5]) as client:  # the body in two parts
        time.sleep(0.05)
        client.sendall((wish[-5:] + end).encode())
        assert statuses(rest(client)) == [200, 200]
    assert statuses(ask(live, "CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")) == [400]


def test_heads_and_trailers_have_a_size(live: Live) -> None:
    long = "a" * (LIMIT + 1)
    for text in (
        f"GET /version HTTP/1.1\r\nHost: x\r\nA: {long}\r\n\r\n",
        f"GET /{long} HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        assert statuses(ask(live, text)) == [431]
    for head in (
        "GET /version HTTP/1.1\r\nHost: x\r\nA: ",
        "POST /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ",
    ):
        with connect(live.port, head) as client, pytest.raises(ConnectionError):
            keep_sending(client, long.encode())


def keep_sending(client: socket.socket, data: bytes) -> None:
    for _ in range(1000):
        client.sendall(data)
        time.sleep(0.001)


def test_requests_ahead_of_their_turn_wait(live: Live) -> None:
    """Any number, of which few are read before the first has its answer; in their order."""
    many = 3000
    with held(live.engine, 0):
        client = connect(live.port, request(SHORT))
        assert wait_for(lambda: live.service.texts == 1)
        client.sendall((VERSION * many).encode())
        client.shutdown(socket.SHUT_WR)
    with client:
        answer = rest(client)
    assert statuses(answer) == [200] * (many + 1)
    assert answer.index(b'"usage"') < answer.index(b'"version"')


def test_old_clients_get_no_chunks(live: Live) -> None:
    text = request(SHORT | {"stream": True}).replace("HTTP/1.1", "HTTP/1.0")
    answer = ask(live, text)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


def test_expectations_are_met(live: Live) -> None:
    head, _, body = request(SHORT, "Expect: 100-continue").partition("\r\n\r\n")
    with connect(live.port, head + "\r\n\r\n") as client:
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body.encode())
        assert client.recv(12) == b"HTTP/1.1 200"


def test_all_addresses_are_of_both_families() -> None:
    try:
        listener = bind("::", 0)
    except Unsupported:
        pytest.skip("this machine has no IPv6")
    with listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 5).close()


def test_a_link_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pico").mkdir()
    (tmp_path / "current").symlink_to("pico")
    monkeypatch.chdir(tmp_path / "pico")
    names = [served(Path(p)) for p in (tmp_path / "current", tmp_path / "pico", ".", "../current/")]
    assert names == ["current", "pico", "pico", "current"]
    assert served(Path("org/name")) == "org/name"


def test_known_events_are_as_if_encoded_whole() -> None:
    """Of texts with everything that JSON escapes."""

    def answers() -> Iterator[OpenAI]:
        asked = Asked('a"\u00e9', [[1]], 1, Stream(["r"], {("r", 0)}), None)  # type: ignore[arg-type]
        yield ChatAnswer(asked)
        yield CompletionsAnswer(asked, None, False, frozenset(), ())

    for answer in answers():
        for text in ("a", '"\\\n\t\x00\x7f', "\u00e9\u6771\U0001f642\u2028", "\ufffd", "\ud800"):
            delta = Delta("r", 0, text, [1])
            known = answer.said(delta)
            step = answer.step(delta)
            whole = b"".join(answer.part(*part) for part in answer.parts(step))
            assert json.loads(known[6:]) == json.loads(whole[6:])
            assert known == whole or text == "\ud800"  # of which all else is ASCII, too


def test_events_are_utf_8_unless_half_of_a_pair_is_in_them() -> None:
    assert event({"a": "\u00e9"}, "n") == b'event: n\ndata: {"a":"\xc3\xa9"}\n\n'
    assert dumps({"a": "\ud800"}) == b'{"a":"\\ud800"}'
    assert dumps(float("inf")) == b"null"


def test_slow_readers_get_all(tiny: Path) -> None:
    """What waits for a reader comes later, in fewer pieces, and in order."""
    with serving(LLM(tiny), 1) as live, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", live.port))
        body = SHORT | {"max_tokens": 400, "ignore_eos": True, "n": 4, "stream": True}
        client.sendall(request(body | {"logprobs": 20}, "Connection: close").encode())
        assert live.idle()
        answer = rest(client)
    told = b"".join(re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n", answer.partition(b"\r\n\r\n")[2], re.S))
    found = [json.loads(line) for line in re.findall(rb"data: ({.*})", told)]
    texts = ["".join(e["choices"][0]["text"] for e in found if e["choices"][0]["index"] == i)
             for i in range(4)]  # fmt: skip
    assert told.endswith(b"data: [DONE]\n\n")
    with serving(LLM(tiny)) as live:
        whole = httpx.post(live.url + "/v1/completions", json=body | {"stream": False}, timeout=60)
    assert texts == [choice["text"] for choice in whole.json()["choices"]]
