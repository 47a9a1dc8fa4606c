"""A server on a loopback port: a tiny random model with pico's tokenizer.

The engine runs in a thread of the tests' process, and the front end in another one, or, where that
is what is tested, in a process of its own.
"""

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from anybit.engine.engine import Engine
from anybit.engine.llm import LLM
from anybit.engine.output import Delta
from anybit.serve import front
from anybit.serve.run import FrontEnds, bind, service_of
from anybit.serve.server import Server
from anybit.serve.service import Service
from anybit.serve.settings import Settings
from tests import forks
from tests.engine.conftest import PICO, one_thread, random_model

__all__ = ["one_thread"]  # a fixture that all tests here use

# What Qwen's template does, in short.
TEMPLATE = """
{%- if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """httpx reads those of all authorities for each request without a client: 25 ms of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@dataclass(frozen=True)
class Live:
    """A running server. service: the engine's side. end: asks it to end.

    server: the front end's side, where that is a thread.
    """

    url: str
    llm: LLM
    service: Service
    port: int
    server: Server | None

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def end(self) -> None:
        self.service.stop()

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)  # type: ignore[arg-type]

    def idle(self) -> bool:
        """Whether the engine comes to hold nothing any more."""
        engine = self.engine
        return wait_for(
            lambda: (
                not engine.requests
                and not self.service.open
                and len(engine.scheduler.blocks.free) == engine.scheduler.blocks.count
            )
        )


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true; a machine that has other work to do is waited for."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


@contextmanager
def held(engine: Engine, steps: int = 2) -> Iterator[None]:
    """The engine takes no more than a few steps meanwhile: no text can end on its own."""
    left, step = [None] * steps, engine.step

    def limited() -> list[Delta]:
        if left:
            left.pop()
            return step()
        time.sleep(0.001)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", limited)
        yield


@contextmanager
def serving(llm: LLM, front_ends: int = 0, wait: bool = True, **options: object) -> Iterator[Live]:
    """A server of a model. front_ends: processes; 0: a thread here, to look at."""
    settings = Settings(**{"names": ("tiny",), "grace": 5.0} | options)  # type: ignore[arg-type]
    made: list[Server] = []
    with bind("127.0.0.1", 0) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        if not front_ends:
            ours, theirs = socket.socketpair()
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            create = front.create_app

            def create_app(*args: Any) -> FastAPI:
                app = create(*args)
                made.append(app.state.server)
                return app

            patch.setattr(front, "create_app", create_app)
            service = service_of(llm, settings)
            service.attach(0, ours, None)
            own = listener.dup()
            stack.enter_context(running(lambda: front.run(theirs, own)))
        else:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(FrontEnds, "start", forked)
            started = stack.enter_context(FrontEnds(listener, front_ends))
            service = service_of(llm, settings, started.start)
            started.give(service)
        with running(service.run, service.stop):
            assert not wait or service.serving.wait(60)
            yield Live(f"http://127.0.0.1:{port}", llm, service, port, made[0] if made else None)


def forked(self: FrontEnds) -> tuple[socket.socket, forks.Fork]:
    """As `FrontEnds.start`, without two seconds of imports."""
    ours, theirs = socket.socketpair()
    with theirs:
        return ours, forks.Fork(forks.front_end, theirs, self.listener)


@contextmanager
def running(work: Callable[[], None], end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A thread meanwhile, which is asked to end then. What it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            yield
        finally:
            end()
            future.result(100)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    options = {"vocab_size": 4096, "eos_token_id": 0, "max_position_embeddings": 512}
    random_model("llama", options).save_pretrained(directory)
    for name in TOKENIZER:
        shutil.copy(PICO / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def inside(tiny: Path) -> Iterator[Live]:
    """A server whose front end can be looked at."""
    with serving(LLM(tiny, block_size=8)) as live:
        yield live


@pytest.fixture(scope="session")
def live(tiny: Path) -> Iterator[Live]:
    with serving(LLM(tiny, block_size=8, max_running=64), 1) as live:
        yield live


@pytest.fixture(scope="session")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has a chat template with tools."""
    directory = tmp_path_factory.mktemp("talking")
    options = {"vocab_size": 4100, "eos_token_id": 0, "max_position_embeddings": 512}
    random_model("llama", options).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # not special, as Qwen's are
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def talking(model: Path) -> Iterator[Live]:
    with serving(LLM(model, max_running=8), 1, names=("tiny", "alias/small")) as live:
        yield live


@pytest.fixture(scope="session")
def talking_inside(model: Path) -> Iterator[Live]:
    with serving(LLM(model)) as live:
        yield live
