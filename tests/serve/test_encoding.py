"""Events by the short way are those of the general one, byte for byte."""

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from anybit.engine.sequence import Logprob, SamplingParams
from anybit.serve import channel
from anybit.serve.answers import Answer, Asked, ChatAnswer, CompletionsAnswer
from anybit.serve.connection import Exchange
from anybit.serve.encoding import Short, line
from anybit.serve.events import EventStream
from anybit.serve.messages import MessagesAnswer
from anybit.serve.model import Model
from anybit.serve.streams import Engine
from anybit.serve.texts import Words
from tests.engine.conftest import PICO

TEXT = 'def f(x):\n    """na\u00efve \u6771\u4eac \U0001f642 \\ stop\n\nUser: \t</s>"""\n'
TEXT += "\u2028\u2029\x85 "  # at which some clients end a line
KINDS: dict[str, Callable[[Asked], Answer]] = {
    "chat": ChatAnswer,
    "completions": lambda asked: CompletionsAnswer(asked, None, False, frozenset(), ()),
    "messages": lambda asked: MessagesAnswer(asked, False, False),
}


class Wire:
    """A transport, and the connection of an exchange, that keep what is written."""

    def __init__(self) -> None:
        self.data, self.transport, self.state = b"", self, SimpleNamespace(default_headers=())
        self.waiting: list[Exchange] = []
        self.loop, self.writable = asyncio.get_running_loop(), asyncio.Event()
        self.writable.set()

    def write(self, data: bytes) -> None:
        self.data += data

    def answered(self, exchange: Exchange) -> None: ...

    def read_on(self) -> None: ...


def steps(rng: random.Random, ids: list[int], count: int) -> list[channel.Step]:
    """What an engine might say of so many texts, until all have ended."""
    out, left = [], list(range(count))
    while left:
        tokens = [rng.choice(ids) if rng.random() < 0.3 else ids[len(out) % len(ids)] for _ in left]
        more = []
        for at in range(len(left)):
            if rng.random() < 0.1:
                score = Logprob(tokens[at], -0.5, ())
                finish = rng.choice([None, "length", "stop"]) if len(out) > 8 else None
                silent = finish == "stop" and rng.random() < 0.5
                more.append(
                    channel.More(
                        at, finish, silent=silent, cached=rng.randint(0, 1), logprobs=[score]
                    )
                )
        out.append(channel.Step(left, tokens, more, [], [], 0.0))
        ended = {left[each.at] for each in more if each.finish}
        left = [text for text in left if text not in ended]
    return out


async def streamed(kind: str, seed: int, model: Model) -> tuple[bytes, int]:
    """The body of a stream, and how many tokens were counted."""
    rng, wire = random.Random(seed), Wire()
    engine = Engine(model)
    engine.connection_made(Wire())  # type: ignore[arg-type]
    count = 1 if kind == "messages" else rng.randint(1, 3)
    stop = rng.choice([(), ("\n\nUser:", "stop")])
    params = SamplingParams(n=count, stop=stop, max_tokens=999, min_tokens=rng.choice([0, 0, 5]))
    asking = asyncio.ensure_future(engine.submit([([5], params)]))
    await asyncio.sleep(0)
    engine._step(channel.Step([], [], [], [0], [], 0.0))
    extra: Any = {"running": rng.random() < 0.2, "token_ids": rng.random() < 0.2, "usage": True}
    words = Words(model.tokenizer)
    answer = KINDS[kind](Asked("tiny", [[5]], count, await asking, words, **extra))
    answer.id, answer.created = "id", 0
    exchange = Exchange(wire, {"method": "POST", "http_version": "1.1"}, True, False)  # type: ignore[arg-type]
    response = EventStream(answer, engine)
    scope = {"exchange": exchange}
    work = asyncio.ensure_future(response(scope, exchange.receive, exchange.send))
    ids = [*model.tokenizer.encode(TEXT * 3, add_special_tokens=False), 0]
    for step in steps(rng, ids, count):
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(0)
        (wire.writable.clear if rng.random() < 0.1 else wire.writable.set)()
        engine._step(step)
    wire.writable.set()
    await work
    tokens = sum(len(text.completion.tokens) for text in answer.texts)
    return unchunked(wire.data.partition(b"\r\n\r\n")[2]), tokens


def unchunked(data: bytes) -> bytes:
    out = b""
    while data != b"0\r\n\r\n":
        size, _, data = data.partition(b"\r\n")
        end = int(size, 16)
        out, data = out + data[:end], data[end:].removeprefix(b"\r\n")
    return out


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    return Model(tokenizer, 512, 4096, 64, frozenset([0]), (), 8, "bfloat16", {}, 0, 0)


def test_an_event_is_one_line_for_every_client() -> None:
    value = {"a\u2028": "b\x85\u2029c\n\u2027\xe2\x80\xa8"}
    assert json.loads(line(value)) == value
    assert len(line(value).decode().splitlines()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_write_the_same(kind: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], Short.take

    def counted(self: Short, token: int) -> bool:
        taken.append(take(self, token))
        return taken[-1]

    for seed in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(Short, "take", counted)
            known = asyncio.run(streamed(kind, seed, model))
            patch.setattr(Short, "take", lambda self, token: False)
            assert asyncio.run(streamed(kind, seed, model)) == known
        text = known[0].decode()
        assert text.splitlines() == text.replace("\r", "").split("\n")[:-1]
    assert sum(taken) > len(taken) / 8
