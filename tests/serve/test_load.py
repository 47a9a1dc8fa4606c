"""`anybit bench serve`: what it asks of a server, and what it makes of the answers."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anybit.cli.app import app
from anybit.errors import InvalidInput
from anybit.serve import bench as load_client
from anybit.serve.bench import Lengths, Load, Seen, summary
from tests.serve.conftest import Live

STEP = 0.02  # seconds between two tokens of the stand-ins


def bench(*args: object, code: int = 0) -> str:
    got = CliRunner().invoke(app, ["bench", "serve", *map(str, args)])
    assert got.exit_code == code, got.output
    return got.output


def as_vllm(count: int) -> Iterator[dict[str, Any]]:
    """Two tokens in each event, of which the text of one may be empty."""
    for at in range(0, count, 2):
        yield {"choices": [{"text": "a", "token_ids": [7] * min(2, count - at)}]}


def as_llama_cpp(count: int) -> Iterator[dict[str, Any]]:
    """Text alone; how many tokens it was is told at the end."""
    for _ in range(count - 1):
        yield {"choices": [{"text": "a"}]}
    yield {"choices": [{"text": ""}], "usage": {"completion_tokens": count}}


def broken(count: int) -> Iterator[dict[str, Any]]:
    yield {"choices": [{"text": "a"}]}
    yield {"error": {"message": "out of memory"}}


@pytest.fixture
def stand_in() -> Iterator[Callable[[Any], tuple[str, list[Any]]]]:
    """A function that starts a server with such answers: its address, and what it was asked."""
    servers = []

    def start(
        answer: Callable[[int], Iterator[dict[str, Any]]],
        takes: Callable[[str, dict[str, Any]], int] = lambda path, body: 200,
    ) -> tuple[str, list[Any]]:
        """takes: the status for a path and a body; what is refused counts as not asked."""
        asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/v1/models" else 404)
                self.end_headers()
                self.wfile.write(b'{"data": [{"id": "theirs"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = takes(self.path, body)
                self.send_response(status)
                self.end_headers()
                if status != 200:
                    return
                asked.append((time.perf_counter(), body))
                for event in answer(body["max_tokens"]):
                    time.sleep(STEP)
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", [as_vllm, as_llama_cpp])
def test_rates_lengths_and_times(
    answer: Any, stand_in: Callable[[Any], tuple[str, list[Any]]], tmp_path: Path
) -> None:
    url, asked = stand_in(answer)
    report, picture = tmp_path / "a.json", tmp_path / "a.png"
    args = "--rate", "40,80", "--seconds", 0.5, "--prompt", "9~0.5:4-20", "--output", 6
    shown = bench(url, *args, "--json", report, "--plot", picture).splitlines()
    assert [line.split()[0] for line in shown[-2:]] == ["40/s", "80/s"]
    assert picture.stat().st_size > 1000
    rows = json.loads(report.read_text())["rows"]
    asked = asked[1:]  # the first was a try
    assert sum(row["requests"] for row in rows) == len(asked) > 30
    assert all(row["failed"] == 0 for row in rows)
    # A prompt's tokens lie within bounds, and arrivals do not wait for answers.
    lengths = {len(body["prompt"]) for _, body in asked}
    assert len(lengths) > 3
    assert min(lengths) >= 4
    assert max(lengths) <= 20
    assert {body["model"] for _, body in asked} == {"theirs"}
    events = 3 if answer is as_vllm else 5
    for row in rows:
        assert STEP * 1e3 <= row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["tpot_p50_ms"] >= STEP * 1e3 * (events - 1) / 5
    assert rows[1]["requests"] > rows[0]["requests"]


def as_chat(count: int) -> Iterator[dict[str, Any]]:
    yield {"choices": [{"delta": {"role": "assistant"}}]}
    for at in range(count):
        yield {"choices": [{"delta": {"reasoning_content" if at < 2 else "content": "a"}}]}


def no_numbers(path: str, body: dict[str, Any]) -> int:
    return 200 if isinstance(body.get("prompt"), str) else 400


def only_openai(path: str, body: dict[str, Any]) -> int:
    known = {"model", "temperature", "stream", "stream_options", "max_tokens", "messages"}
    if path != "/v1/chat/completions":
        return 404
    return 200 if body.keys() <= known else 400


@pytest.mark.parametrize(
    ("answer", "takes", "said"),
    [
        (as_llama_cpp, no_numbers, "asked by /v1/completions, with words for tokens"),
        (
            as_chat,
            only_openai,
            "asked by /v1/chat/completions, with words for tokens, and answers end where the model "
            "ends them",
        ),
    ],
)
def test_servers_that_know_less(answer: Any, takes: Any, said: str, stand_in: Any) -> None:
    """A loop of requests for each number of them at the same time; with /v1 in the address."""
    url, asked = stand_in(answer, takes)
    args = "--streams", "1,3", "--requests", 6, "--prompt", 9, "--output", 5
    shown = bench(f"{url}/v1/", *args).splitlines()
    assert shown[0] == said
    lines = [line.split()[:4] for line in shown[-2:]]
    assert lines == [["1", "open", "6", "0"], ["3", "open", "6", "0"]]
    assert len(asked) == 1 + 2 * 6
    for _, body in asked[1:]:
        text = body.get("prompt") or body["messages"][0]["content"]
        assert len(text.split()) == 9
        assert body["max_tokens"] == 5


def test_prompts_are_new_each_time_and_lengths_are_not(stand_in: Any) -> None:
    """Else a prefix cache would have them, in whichever server is asked twice."""
    url, asked = stand_in(as_vllm)
    drawn = []
    for _ in range(2):
        bench(url, "--streams", 1, "--requests", 3, "--prompt", "20~1.0", "--output", 2)
        drawn.append([tuple(body["prompt"]) for _, body in asked[-3:]])
    assert [*map(len, drawn[0])] == [*map(len, drawn[1])]
    assert not {*drawn[0]} & {*drawn[1]}


def test_failures_are_told(stand_in: Callable[[Any], tuple[str, list[Any]]]) -> None:
    url, _ = stand_in(broken)
    shown = bench(url, "--requests", 3, code=1)
    assert "failed: out of memory" in shown
    assert "no request was answered" in shown


def test_on_a_server_of_anybit(live: Live) -> None:
    shown = bench(live.url, "--requests", 6, "--streams", 3, "--prompt", 12, "--output", 5)
    assert shown.splitlines()[-1].split()[:4] == ["3", "open", "6", "0"]


def test_plans_are_those_that_were_asked_for() -> None:
    load = Load(Lengths.read("270~1.0:16-3000"), Lengths(8), rate=50, seconds=40)
    plan = load.plan(random.Random(1))
    prompts = sorted(prompt for _, prompt, _ in plan)
    assert 1800 < len(plan) < 2200
    assert all(0 <= at < 40 for at, *_ in plan)
    assert 240 < prompts[len(prompts) // 2] < 300
    assert prompts[0] >= 16
    assert prompts[-1] == 3000
    for text in ("0", "a", "5~", "5~1:9-3", "5~1:0-3", "-5"):
        with pytest.raises(InvalidInput, match="is no number of tokens"):
            Lengths.read(text)
    for rate in ("0", "a", "4,", "inf"):
        assert "give requests a second" in bench("http://127.0.0.1:1", "--rate", rate, code=1)
    for streams in ("0", "1.5", "", "2,"):
        shown = bench("http://127.0.0.1:1", "--streams", streams, code=1)
        assert "give requests at the same time" in shown


def test_figures() -> None:
    seen = [Seen(1.0, [1.5, 1.6, 1.9], 3), Seen(2.0, [2.1], 1), Seen(3.0, error="no")]
    row = summary(seen, 2.0)
    assert (row["requests"], row["failed"], row["out_tok_s"]) == (3, 1, 2)
    found = [row["ttft_p50_ms"], row["tpot_p50_ms"], row["itl_max_ms"]]
    assert found == pytest.approx([500, 200, 300])


@pytest.mark.parametrize(
    "options", [("--rate", 20, "--seconds", 1), ("--streams", 3, "--requests", 7)]
)
def test_several_processes_put_the_load_of_one(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[object, ...]
) -> None:
    asked, rows = [], []
    for count in (1, 2):
        monkeypatch.setattr(load_client, "clients", lambda count=count: count)
        url, seen = stand_in(as_vllm)
        more = "--prompt", "5~1.0:2-9", "--output", "3~1.0:1-6", "--json", tmp_path / "rows.json"
        bench(url, *options, *more)
        rows.append(json.loads((tmp_path / "rows.json").read_text())["rows"][0])
        asked.append(sorted((len(b["prompt"]), b["max_tokens"]) for _, b in seen[1:]))
    assert asked[0] == asked[1]
    assert rows[0]["requests"] == rows[1]["requests"] == len(asked[0])
    assert rows[1]["failed"] == 0
    assert rows[1]["ttft_p50_ms"] >= 1000 * STEP
