"""What must not hurt anybody else: slow readers, vanished clients, failures, too many requests."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from anybit.engine.llm import LLM
from anybit.serve.run import FrontEnds, bind, run
from anybit.serve.service import Front
from anybit.serve.settings import Settings
from tests import forks
from tests.serve.conftest import Live, held, serving, wait_for
from tests.serve.test_protocol import events

LONG = {"prompt": "def main(", "max_tokens": 500, "ignore_eos": True}
SHORT = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}


def raw_request(live: Live, body: dict, receive_buffer: int | None = None) -> socket.socket:
    """A request sent over a bare socket, whose answer nobody has read yet."""
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", live.port))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_vanished_client_frees_its_blocks(live: Live, stream: bool) -> None:
    engine = live.engine
    before = engine.stats.finished.get("abort", 0)
    with held(engine):
        client = raw_request(live, LONG | {"stream": stream, "n": 4})
        assert wait_for(lambda: len(engine.scheduler.running) == 4)
        client.close()
        assert wait_for(lambda: not live.service.open)
    assert live.idle()
    assert engine.stats.finished["abort"] == before + 4


def test_a_client_that_leaves_before_the_answer_starts(live: Live) -> None:
    """Waiting in the queue, too, ends with the connection."""
    engine = live.engine
    streams = live.service.open
    with held(engine):
        busy = raw_request(live, LONG | {"n": 64, "stream": True})
        assert wait_for(lambda: len(engine.scheduler.running) == 64)
        clients = [raw_request(live, LONG | {"stream": stream}) for stream in (True, False)]
        assert wait_for(lambda: len(streams) == 3)
        for client in clients:
            client.close()
        assert wait_for(lambda: len(streams) == 1)
        assert len(engine.scheduler.running) == 64
        busy.close()
        assert wait_for(lambda: not streams)
    assert live.idle()


def test_a_slow_reader_stalls_nobody(live: Live) -> None:
    slow = raw_request(live, LONG | {"stream": True, "n": 16, "logprobs": 5}, 4096)
    with httpx.Client(base_url=live.url, timeout=60) as client:
        answers = [client.post("/v1/completions", json=SHORT).json() for _ in range(5)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    engine = live.engine
    # The engine ends the slow reader's texts, too, though most of them is still to be sent.
    assert wait_for(lambda: not engine.requests)
    slow.settimeout(30)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = slow.recv(1 << 20)
        assert part, "the connection ended before the answer"
        data += part
    assert b"data: [DONE]" in data[-40:]
    assert data.count(b'"finish_reason":"length"') == 16
    assert len(data) > 1 << 20  # much more than the buffers of both sockets
    slow.close()


def test_too_many_requests_are_told_to_come_back(tiny: Path) -> None:
    llm = LLM(tiny, max_running=2)
    with serving(llm, queue=3, queue_tokens=100) as live:
        with held(llm.engine):
            first = raw_request(live, LONG | {"n": 5})
            assert wait_for(lambda: live.service.texts == 5)
            refused = live.post("/v1/completions", SHORT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "too many requests" in refused.json()["error"]["message"]
            first.close()
        assert live.idle()
        with held(llm.engine):
            first = raw_request(live, LONG | {"prompt": [5] * 90})
            assert wait_for(lambda: live.service.texts == 1)
            refused = live.post("/v1/completions", SHORT | {"prompt": [5] * 20})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert live.post("/v1/completions", SHORT | {"prompt": [5] * 10}).status_code == 200
        first.close()
        assert live.post("/v1/completions", SHORT | {"prompt": [5] * 101}).status_code == 400


def test_a_failing_request_fails_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    run = live.engine.runner.launch

    def fail(scheduled: list, previous: object) -> object:
        if any(s.seq.prompt == [666] for s in scheduled):
            raise RuntimeError("out of luck")
        return run(scheduled, previous)

    monkeypatch.setattr(live.engine.runner, "launch", fail)
    answer = live.post("/v1/completions", {"prompt": [666]})
    assert answer.status_code == 500
    assert "out of luck" in answer.json()["error"]["message"]
    streamed = events(live.post("/v1/completions", {"prompt": [666], "stream": True}).text)
    assert streamed[-1]["error"]["type"] == "server_error"
    assert live.post("/v1/completions", SHORT).status_code == 200
    assert live.idle()


def test_a_dead_engine_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All open requests get a 500 or an error event, and front ends end by themselves."""
    llm, told = LLM(tiny), []

    def serve() -> None:
        with serving(llm, 1) as live, ThreadPoolExecutor() as pool:

            def die() -> list:
                """Once both are being written."""
                scheduler = llm.engine.scheduler
                if len(scheduler.running) == 1 and not scheduler.waiting:
                    return []  # the other one is still to come
                if sum(seq.generated > 1 for seq in scheduler.running) == 2:
                    raise SystemError("broken")
                return step()

            step = llm.engine.step
            monkeypatch.setattr(llm.engine, "step", die)
            (process,) = [front.process for front in live.service.fronts.values()]
            asked = [
                pool.submit(live.post, "/v1/completions", LONG | {"stream": stream})
                for stream in (False, True)
            ]
            told.extend(answer.result() for answer in asked)
            told.append(process.wait(10))

    with pytest.raises(SystemError, match="broken"):
        serve()
    whole, streamed, status = told
    assert (whole.status_code, status) == (500, 0)
    assert "SystemError: broken" in whole.json()["error"]["message"]
    assert events(streamed.text)[-1]["error"]["type"] == "server_error"


def test_a_killed_front_end_takes_only_its_requests(tiny: Path) -> None:
    """The engine drops them at once, what another one serves goes on, and a new one starts."""
    llm = LLM(tiny, block_size=8)
    with serving(llm, 2) as live, ThreadPoolExecutor() as pool:
        assert wait_for(lambda: all(front.ready for front in live.service.fronts.values()))
        fronts = list(live.service.fronts.values())

        def ask(front: Front, other: Front) -> "Future[list[str]]":
            """A stream of a front end, while the other one sleeps."""
            before = len(live.service.open)
            other.process.send_signal(signal.SIGSTOP)
            asked = pool.submit(lambda: list(lines(live.url, LONG | {"stream": True})))
            assert wait_for(lambda: len(live.service.open) == before + 1)
            other.process.send_signal(signal.SIGCONT)
            return asked

        with held(llm.engine):
            stays, goes = ask(*fronts), ask(*fronts[::-1])
            assert {found.front for found in live.service.open.values()} == set(fronts)
            fronts[1].process.kill()
            assert wait_for(lambda: len(live.service.open) == 1)
            assert len(llm.engine.requests) == 1
            with pytest.raises(httpx.TransportError):
                goes.result()
        assert stays.result()[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in stays.result()[-4]
        assert wait_for(lambda: [f.ready for f in live.service.fronts.values()] == [True, True])
        assert live.post("/v1/completions", SHORT).status_code == 200
        assert live.idle()


def test_a_server_that_prepares_steps_is_not_healthy_yet(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prepared = LLM(tiny), threading.Event()
    monkeypatch.setattr(llm.engine, "prepare", lambda: prepared.wait(60) or None)
    with serving(llm, 1, wait=False) as live:
        try:
            answer = httpx.get(live.url + "/health", timeout=60)
            assert answer.status_code == 503
            assert "still starting" in answer.json()["error"]["message"]
        finally:
            prepared.set()
        assert wait_for(lambda: httpx.get(live.url + "/health").status_code == 200)


def test_many_clients_at_once_each_get_their_own(live: Live) -> None:
    """Streams neither lose nor mix up tokens."""
    with httpx.Client(base_url=live.url, timeout=120) as client:

        def ask(i: int, stream: bool) -> list[int]:
            body = {"prompt": [i + 5] * (1 + i % 7), "max_tokens": 10 + i, "seed": i}
            body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
            answer = client.post("/v1/completions", json=body)
            bodies = events(answer.text) if stream else [answer.json()]
            return [t for e in bodies for t in e["choices"][0]["token_ids"]]

        with ThreadPoolExecutor(24) as pool:
            streamed = list(pool.map(lambda i: ask(i, True), range(48)))
        alone = [ask(i, False) for i in range(48)]
    assert [len(tokens) for tokens in alone] == [10 + i for i in range(48)]
    assert streamed == alone


def test_the_schema_fuzzed(tiny: Path) -> None:
    """Bodies that fit our OpenAPI schema and bodies that do not: never a 500."""
    import schemathesis  # takes two seconds

    with serving(LLM(tiny, length=48), 1) as live, httpx.Client(timeout=60) as client:
        schema = schemathesis.openapi.from_dict(client.get(live.url + "/openapi.json").json())
        operations = [result.ok() for result in schema.get_all_operations()]
        modes = schemathesis.GenerationMode
        assert {op.path for op in operations} >= {"/v1/completions", "/v1/chat/completions"}
        for operation in operations:
            posts = operation.method == "post"
            for mode in modes if posts else [modes.POSITIVE]:

                @settings(
                    max_examples=6 if posts else 1,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def fuzz(case: "schemathesis.Case") -> None:
                    answer = case.call(base_url=live.url, timeout=60)
                    assert answer.status_code < 500 or answer.status_code == 503, answer.text

                fuzz()
        assert client.post(live.url + "/v1/completions", json=SHORT).status_code == 200
        assert live.idle()


def serve(model: Path, port: int, grace: float, told: "Connection[int, int]") -> None:
    """A server, which tells its port first."""
    torch.set_num_threads(1)
    with FrontEnds(bind("127.0.0.1", port)) as front_ends:
        told.send(front_ends.listener.getsockname()[1])
        run(LLM(model, block_size=8), Settings(("tiny",), grace=grace), front_ends)


class Process:
    """A server in a process of its own, on a port, or on one that is free, 0."""

    def __init__(self, model: Path, port: int, grace: float):
        heard, told = forks.CONTEXT.Pipe(duplex=False)
        self.process = forks.Fork(serve, model, port, grace, told)
        told.close()
        self.port = heard.recv()
        self.url = f"http://127.0.0.1:{self.port}"
        assert wait_for(self.healthy)

    def healthy(self) -> bool:
        assert self.process.poll() is None, "the server has ended; its output says why"
        try:
            return httpx.get(self.url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, kind: signal.Signals) -> None:
        os.kill(self.process.pid, kind)


def lines(url: str, body: dict) -> Iterator[str]:
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
        yield from answer.iter_lines()


@pytest.fixture
def start(tiny: Path) -> Iterator[Callable[[int, float], Process]]:
    """A function that starts a server process; all are gone after the test."""
    started: list[Process] = []

    def start(port: int, grace: float) -> Process:
        started.append(Process(tiny, port, grace))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.process.wait(60)


def test_kill_restart_and_graceful_shutdown(start: Callable[[int, float], Process]) -> None:
    first = start(0, 30)
    answer = lines(first.url, LONG | {"n": 128, "logprobs": 20, "stream": True})
    next(answer)
    first.kill(signal.SIGKILL)
    rest = [line for line in answer if line]
    assert any("its process has ended" in line for line in rest)
    assert rest[-1] == "data: [DONE]"
    first.process.wait(60)

    second = start(first.port, 60)  # the same port, at once; the grace is enough
    whole = httpx.post(second.url + "/v1/completions", json=SHORT, timeout=60).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    short = ended(second, LONG | {"max_tokens": 20, "stream": True})
    assert '"finish_reason":"length"' in short[-2]

    assert short[-1] == "data: [DONE]"


def test_what_the_grace_does_not_suffice_for_is_told(tiny: Path) -> None:
    with serving(LLM(tiny, block_size=8), 1, grace=0.0) as live:
        stream = lines(live.url, LONG | {"n": 128, "logprobs": 20, "stream": True})
        first = next(stream)
        live.end()
        rest = [line for line in (first, *stream) if line]
    assert any("shutting down" in line for line in rest)
    assert rest[-1] == "data: [DONE]"


def ended(server: Process, body: dict) -> list[str]:
    """The lines of a stream whose server is asked to end at the first of them."""
    stream = lines(server.url, body)
    first = next(stream)
    server.kill(signal.SIGTERM)
    rest = [first, *stream]
    assert server.process.wait(60) == 0
    return [line for line in rest if line]
