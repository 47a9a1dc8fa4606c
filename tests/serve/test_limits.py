"""Nobody blocks anybody: limits of time and size, the tokenizers' threads, and the end."""

import gc
import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from typer.testing import CliRunner

from anybit.cli.app import app as cli
from anybit.engine.llm import LLM
from anybit.errors import InvalidInput, Unsupported
from anybit.serve.model import Model
from anybit.serve.run import FrontEnds, bind, run
from anybit.serve.service import Service
from anybit.serve.settings import Settings
from anybit.serve.texts import Gone, Job, Words
from tests.engine.conftest import PICO
from tests.serve.conftest import Live, serving, wait_for

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SHORT = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}


def connect(port: int, text: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), 30)
    client.sendall(text.encode())
    return client


def rest(client: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    out = b""
    while part := client.recv(1 << 16):
        out += part
    return out


def ask(live: Live, text: str) -> bytes:
    """All that is answered to a text on a connection of its own."""
    with connect(live.port, text) as client:
        return rest(client)


def test_heads_and_bodies_have_a_time(tiny: Path) -> None:
    with serving(LLM(tiny), 1, patience=0.6) as live:
        start = time.monotonic()
        assert (ask(live, ""), ask(live, HEAD)) == (b"", b"")
        stalled = ask(live, HEAD + 'Content-Length: 100\r\n\r\n{"prompt"')
        assert b"408" in stalled.split(b"\r\n")[0]
        assert time.monotonic() - start > 0.5
        # Between two requests, and in the middle of the second one.
        request = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        assert ask(live, request).startswith(b"HTTP/1.1 200")
        assert ask(live, request + "GET /hea").count(b"HTTP/1.1") == 1
        # An answer may take as long as it takes.
        body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 8})
        long = ask(live, HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}")
        assert long.startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_left(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(LLM(tiny), 1, patience=1.0) as live, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", live.port))
        body = json.dumps(SHORT | {"max_tokens": 490, "ignore_eos": True, "n": 24,
                                   "stream": True, "logprobs": 20})  # fmt: skip
        client.sendall((HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}").encode())
        assert wait_for(lambda: live.service.texts == 24)
        assert live.idle()
        assert wait_for(lambda: closed(client))
    assert "Traceback" not in caplog.text


def closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection."""
    try:
        client.sendall(b"x")
    except OSError:
        return True
    return False


def test_a_prompt_that_cannot_fit_is_refused_by_its_length(
    inside: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = Model.encode
    monkeypatch.setattr(
        Model, "encode", lambda self, text, **k: calls.append(len(text)) or encode(self, text, **k)
    )
    most = inside.server.texts.words.longest
    assert most is not None
    text = "a b " * (most * inside.llm.length // 4 + 1)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        answer = inside.post(path, body)
        assert answer.status_code == 400
        assert "bytes" in answer.json()["error"]["message"]
    assert not calls


def test_the_bound_holds_for_every_text(inside: Live) -> None:
    words, llm = inside.server.texts.words, inside.server.llm
    assert words.longest is not None
    longest = max(range(len(llm.tokenizer)), key=lambda t: len(words.bytes(t)))
    text = words.text(longest) * 5
    assert len(text.encode()) <= words.longest * len(llm.encode(text))
    assert [words.bytes(t) for t in llm.encode("h\u00e9")] == [b"h", "\u00e9".encode()] or (
        b"".join(words.bytes(t) for t in llm.encode("h\u00e9")) == "h\u00e9".encode()
    )
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.add_tokens(["<|x|>"])
    assert Words(tokenizer).longest == words.longest
    tokenizer.add_tokens([AddedToken("<|y|>", rstrip=True)])
    assert Words(tokenizer).longest is None  # it takes any number of spaces with it
    assert Words(None).longest is None


def test_long_prompts_are_counted_in_pieces(inside: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no bound is known, a few pieces decide; a client that has gone stops them."""
    llm, gone, sizes = inside.server.llm, threading.Event(), []
    job = Job(llm, Words(None), gone)  # words that know no bound

    def counted(self: Model, text: str, special: bool = True) -> list[int]:
        sizes.append(len(text))
        if len(sizes) == 2:
            gone.set()
        return [1] * (1025 if len(sizes) == 1 else 3)

    monkeypatch.setattr(Model, "encode", counted)
    with pytest.raises(InvalidInput, match="more than 512 tokens"):
        job.encode("a b " * (1 << 20))
    assert len(sizes) == 1
    with pytest.raises(Gone):
        job.encode("    " * (1 << 20))
    assert len(sizes) == 2


def test_a_stuck_tokenizer_keeps_nobody(inside: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker hangs in a prompt; others are served, and it is free when its client goes."""
    released, encode = threading.Event(), Job.encode

    def slow(self: Job, text: str, special: bool = True) -> list[int]:
        if text == "stuck":
            assert self.gone.wait(30)
            released.set()
            raise Gone
        return encode(self, text, special)

    monkeypatch.setattr(Job, "encode", slow)
    body = '{"prompt": "stuck"}'
    with connect(inside.port, HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}"):
        assert wait_for(lambda: inside.server.texts.jobs == 1)
        for _ in range(3):
            assert inside.post("/v1/completions", SHORT).status_code == 200
    assert released.wait(10)
    assert wait_for(lambda: inside.server.texts.jobs == 0)


def test_other_pages_may_ask_only_if_allowed(tiny: Path, live: Live) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization,content-type"
    with serving(LLM(tiny), origins=("https://a.example",), keys=("k",)) as open_one:
        url = open_one.url + "/v1/completions"
        asked = httpx.options(url, headers=ask)
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        refused = httpx.options(url, headers=ask | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers
        error = httpx.post(url, json=SHORT, headers={"Origin": "https://a.example"})
        assert error.status_code == 401  # which the page may read
        assert error.headers["access-control-allow-origin"] == "https://a.example"
    assert httpx.options(live.url + "/v1/completions", headers=ask).status_code == 405


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Unsupported, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            bind("127.0.0.1", port)
        got = CliRunner().invoke(cli, ["serve", "no/such/model", "--port", str(port)])
        assert got.exit_code == 1
        assert "cannot listen" in str(got.exception) + got.output


def test_what_was_frozen_while_it_served_is_not_at_the_end(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries would call it leaked."""
    frozen: list[int] = []
    monkeypatch.setattr(Service, "run", lambda *_: frozen.append(gc.get_freeze_count()))
    with FrontEnds(bind("127.0.0.1", 0), 0) as front_ends:
        run(LLM(tiny), Settings(("tiny",)), front_ends)
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0


def test_flags_reach_the_server(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[LLM, Settings]] = []

    def run(llm: LLM, settings: Settings, front_ends: FrontEnds) -> None:
        started.append((llm, settings))

    monkeypatch.setattr("anybit.serve.run.run", run)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    flags = "--port 0 --api-key a --api-key b --served-model-name m --name n --grace 3 --queue 7"
    flags += " --allowed-origins https://x --tool-parser llama --log-level warning --kv-gb 0.01"
    template = ["--chat-template", str(tmp_path / "chat.jinja")]
    got = CliRunner().invoke(cli, ["serve", str(tiny), *flags.split(), *template])
    assert got.exit_code == 0, got.output
    ((llm, settings),) = started
    assert (settings.names, settings.keys) == (("m", "n"), ("a", "b"))
    assert (settings.origins, settings.tool_parser) == (("https://x",), "llama")
    assert (settings.grace, settings.queue) == (3, 7)
    assert llm.tokenizer.chat_template == "{{ messages }}"
    assert f"m = n on {llm.device}, float32" in got.output
    for wrong in ("--tool-parser x", "--log-level x"):
        got = CliRunner().invoke(cli, ["serve", str(tiny), *wrong.split()])
        assert got.exit_code == 1
        assert "choose one of" in str(got.exception) + got.output
    (tmp_path / "empty.jinja").touch()
    (tmp_path / "bad.jinja").write_text("{{ messages }}\n{% for x in %}")
    for wrong, code, message in (
        ("--kv-gb nan", 2, "nan is not a size"),
        ("--grace inf", 2, "86400"),
        ("--served-model-name=", 1, "is empty"),
        ("--allowed-origins https://x/page", 1, "is not an origin"),
        (f"--chat-template {tmp_path}/none.jinja", 1, "is not a file"),
        (f"--chat-template {tmp_path}/empty.jinja", 1, "an empty file"),
        (f"--chat-template {tmp_path}/bad.jinja", 1, "line 2: Expected an expression"),
    ):
        got = CliRunner().invoke(cli, ["serve", str(tiny), "--port", "0", *wrong.split()])
        assert got.exit_code == code, wrong
        assert message in str(got.exception) + got.output
    assert len(started) == 1


def test_the_end_is_short(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stalled bodies, open connections and slow readers do not outlast the grace, nor shout."""
    with ExitStack() as stack:
        with serving(LLM(tiny), 1, grace=0.5) as live:

            def open_one(text: str) -> socket.socket:
                return stack.enter_context(connect(live.port, text))

            stalled = [open_one(HEAD + "Content-Length: 9\r\n\r\n{") for _ in range(10)]
            for _ in range(5):
                open_one("")
            body = json.dumps(SHORT | {"max_tokens": 400, "ignore_eos": True, "n": 64,
                                       "stream": True, "logprobs": 5})  # fmt: skip
            slow = [open_one(HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}") for _ in "ab"]
            assert all(client.recv(10) for client in slow)
        for client in stalled:
            assert b"503" in rest(client)[:20]
    told = [record for record in caplog.records if record.levelname != "INFO"]
    assert [record.message.partition(";")[0] for record in told] == ["shutting down"]
