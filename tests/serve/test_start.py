"""How a server starts, who may use it, and what it logs."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from anybit.cli.app import app as cli
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.serve import channel
from anybit.serve.run import FrontEnds, bind, service_of
from anybit.serve.service import Service
from anybit.serve.settings import Settings
from tests.serve.conftest import Live, wait_for
from tests.serve.test_limits import ask

LIGHT = """
import sys
from anybit.serve.run import bind
heavy = {"torch", "fastapi", "pydantic", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""

# All that a front end imports before it is told of a model.
FRONT = """
import socket, sys
ours, theirs = socket.socketpair()
listener = socket.create_server(("127.0.0.1", 0))
sys.argv[1:] = [str(theirs.detach()), str(listener.detach())]
ours.close()
from anybit.serve.run import front_end
front_end()
assert "anybit.serve.app" in sys.modules and "transformers" in sys.modules
print(*{"transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo", "sympy",
        "scipy", "sklearn"} & sys.modules.keys())
"""


# What a front end runs first, beside a module that cannot be imported.
BREAKS = """
import os, pathlib, signal, sys
if any("front_end" in word for word in sys.orig_argv):
    here = pathlib.Path(__file__).parent
    if (here / "anybit_killed.py").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (here / "anybit_late.py").exists():
        import pickle
        def loads(data):
            import anybit_late
        pickle.loads = loads
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of servers that commands start; none of them runs."""
    out: list[Settings] = []

    def run(llm: LLM, settings: Settings, front_ends: FrontEnds) -> None:
        out.append(settings)

    monkeypatch.setattr("anybit.serve.run.run", run)
    return out


def serve(model: Path, *flags: str, **environment: str) -> tuple[int, str]:
    words = ["serve", str(model), "--port", "0", *flags]
    got = CliRunner().invoke(cli, words, env=environment)
    return got.exit_code, got.output + str(got.exception or "")


def test_the_socket_listens_before_what_takes_long_to_import() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


def test_a_front_end_imports_no_models() -> None:
    done = subprocess.run([sys.executable, "-c", FRONT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("key", ["", " ", "\n", " \t "])
def test_a_blank_key_opens_no_server(tiny: Path, started: list[Settings], key: str) -> None:
    code, output = serve(tiny, ANYBIT_API_KEY=key)
    assert (code, "ANYBIT_API_KEY is set and empty" in output) == (1, True)
    code, output = serve(tiny, "--api-key", key)
    assert (code, "--api-key is empty" in output) == (1, True)
    assert not started


def test_where_keys_come_from(tiny: Path, started: list[Settings]) -> None:
    """The option's replace the variable's."""
    for flags, variable, keys in (
        ([], "s3cret other", ("s3cret", "other")),
        (["--api-key", "given"], "s3cret", ("given",)),
        (["--api-key", "given"], "", ("given",)),
    ):
        code, output = serve(tiny, *flags, ANYBIT_API_KEY=variable)
        assert code == 0, output
        assert started.pop().keys == keys
        assert not any(key in output for key in ("s3cret", "given"))
    code, output = serve(tiny, "--api-key", "s3cret s3cret")
    assert (code, "white space" in output, "s3cret" in output) == (1, True, False)


def test_an_open_server_is_warned_of(tiny: Path, started: list[Settings]) -> None:
    for flags, warned in (
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
    ):
        code, output = serve(tiny, *flags)
        assert code == 0, output
        assert ("other machines can reach" in output) == warned


def test_help_has_groups() -> None:
    output = CliRunner().invoke(cli, ["serve", "--help"]).output
    places = [output.index(f" {name} ") for name in ("Model", "Limits", "Security", "Advanced")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("fastapi.py", "cannot start: ImportError: no libfoo; install what is missing with"),
        ("anybit_late.py", "cannot start: ImportError: no libfoo"),
        ("anybit_killed.py", "3 times before it was ready: signal 9 has ended it"),
    ],
)
def test_a_front_end_that_cannot_start_is_a_line(
    tiny: Path, tmp_path: Path, module: str, said: str
) -> None:
    """One that lacks something at once, or later; and one that dies."""
    (tmp_path / module).write_text("raise ImportError('no libfoo')")
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-c", "from anybit.cli import main; main()"]
    words += ["serve", str(tiny), "--port", "0", "--front-ends", "1"]
    done = subprocess.run(words, env=os.environ | path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: a front end ")


def test_front_ends_hear_all_before_steps_are_prepared(tiny: Path) -> None:
    """What they need is larger than a socket's buffer, and preparing takes seconds on a GPU."""
    llm, (ours, theirs) = LLM(tiny, block_size=8), socket.socketpair()
    service = service_of(llm, Settings(("tiny",)))
    service.hello = channel.Hello(bytes(1 << 22))
    service.attach(0, ours, None)
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(channel.hello, theirs)

        def prepare() -> None:
            assert heard.result(20) == bytes(1 << 22)
            theirs.close()
            service.stop(0)

        llm.engine.prepare = prepare
        service.run()


def test_what_is_no_http_is_refused_as_everything_is(live: Live) -> None:
    for text in ("nonsense\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"):
        head, _, body = ask(live, text).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert b"application/json" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_the_log_has_calls_and_no_files(inside: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "anybit.access"):
        for path in ("/", "/page/page.js", "/page/about", "/favicon.ico", "/health", "/metrics"):
            httpx.get(inside.url + path)
        httpx.get(inside.url + "/v1/models")
        assert wait_for(lambda: bool(calls(caplog)))  # written after the response has arrived
    assert ["GET /v1/models 200" in line for line in calls(caplog)] == [True]


def calls(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log of calls."""
    return [record.getMessage() for record in caplog.records if record.name == "anybit.access"]


def test_a_port_in_use_is_told_before_options_that_need_imports(tiny: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        code, output = serve(tiny, "--port", port, "--format", "x")
    assert (code, "cannot listen" in output) == (1, True)


def test_no_request_is_taken_before_the_engine_is_prepared() -> None:
    """One front end reads late; another has begun, and a client of it has asked."""
    taken = list[str]()

    def prepared() -> None:
        taken.append("prepared")
        raise KeyboardInterrupt

    engine: Any = SimpleNamespace(
        served=False, requests={}, busy=False, tell=None, prepare=prepared, prepared=prepared,
        scheduler=SimpleNamespace(max_running=8),
        add=lambda *_: taken.append("added"), abort=lambda name: None,
    )  # fmt: skip
    settings: Any = SimpleNamespace(queue=8, queue_tokens=1000, grace=1)
    metrics: Any = SimpleNamespace()
    service = Service(engine, settings, metrics, b"x" * (4 << 20))
    quick, late = socket.socketpair(), socket.socketpair()
    for number, (ours, _) in enumerate((quick, late)):
        service.attach(number, ours, None)

    def begin() -> None:
        channel.hello(quick[1])
        add = channel.Add(0, [([1, 2], SamplingParams(), None)], time.monotonic())
        quick[1].sendall(channel.framed(channel.Ready()) + channel.framed(add))

    thread = threading.Thread(target=begin)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        service.run()
    thread.join()
    assert taken == ["prepared"]
