"""Real clients against one server: models/pico with a chat template, in a process of its own.

`make test-clients` runs them in an environment that has the clients alone; the server's Python is
that of ANYBIT_TEST_PYTHON, or else the same. Each file is skipped where its client is missing.
pico continues code and cannot talk: what is judged is the protocol, and what grammars force.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
# No client asks the network, or reads the keys and settings of this machine.
os.environ |= {
    "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_start_and_nothing_left() -> None:
    """The other tests' fixture looks at torch, which is not here."""


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The address of a server that has these options of `anybit serve`."""
    python = os.environ.get("ANYBIT_TEST_PYTHON", sys.executable)
    command = [python, "-m", "anybit.cli", "serve", *options, "--name", "pico", "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "ANYBIT_API_KEY"}
    server = subprocess.Popen(
        [*command, "--log-level", "warning"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        lines = map(str.strip, iter(server.stdout.readline, ""))
        found = next((line for line in lines if line.startswith("http://")), None)
        assert found, "the server has ended; its output says why"
        yield found  # it listens already: what is asked waits until the server runs
    finally:
        server.terminate()
        server.wait(60)


def post(url: str, path: str, body: object) -> str:
    """What the server answers, an error too."""
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=120) as answer:
            return answer.read().decode()
    except HTTPError as error:
        return error.read().decode()


def events(url: str, path: str, body: dict) -> list[dict]:
    """A stream's events, without the mark at its end."""
    lines = post(url, path, body | {"stream": True}).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of the server."""
    template = Path(__file__).with_name("chat.jinja")
    with served("models/pico", "--chat-template", str(template)) as found:
        yield found
