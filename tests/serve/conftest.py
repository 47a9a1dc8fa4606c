"""A server on a loopback port: a tiny random model with pico's tokenizer, in a thread."""

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from anybit.engine.engine import Delta, Engine
from anybit.engine.llm import LLM
from anybit.serve.run import Uvicorn, config
from anybit.serve.server import Server, Settings
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
    """A running server, from outside (url) and inside (server). end: asks it to end."""

    url: str
    server: Server
    port: int
    end: Callable[[], None]

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)  # type: ignore[arg-type]

    def idle(self) -> bool:
        """Whether the engine comes to hold nothing any more."""
        engine = self.server.llm.engine
        return wait_for(
            lambda: (
                not engine.requests
                and not self.server.engine.streams
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
    left, step = threading.Semaphore(steps), engine.step

    def limited() -> list[Delta]:
        left.acquire()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", limited)
        try:
            yield
        finally:
            left.release()


@contextmanager
def serving(llm: LLM, **settings: object) -> Iterator[Live]:
    options = {"names": ("tiny",), "grace": 5.0} | settings
    configured = config(llm, Settings(**options))  # type: ignore[arg-type]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen()
        server = Uvicorn(configured)

        def end() -> None:
            server.should_exit = True

        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert wait_for(lambda: server.started)
            assert wait_for(lambda: llm.engine.prepare is None)
            inside = configured.app.state.server  # type: ignore[union-attr]
            yield Live(f"http://127.0.0.1:{port}", inside, port, end)
        finally:
            end()
            thread.join(100)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    options = {"vocab_size": 4096, "eos_token_id": 0, "max_position_embeddings": 512}
    random_model("llama", options).save_pretrained(directory)
    for name in TOKENIZER:
        shutil.copy(PICO / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def live(tiny: Path) -> Iterator[Live]:
    with serving(LLM(tiny, block_size=8, max_running=64)) as live:
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
    with serving(LLM(model, max_running=8), names=("tiny", "alias/small")) as live:
        yield live
