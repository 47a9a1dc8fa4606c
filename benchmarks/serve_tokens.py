"""What a streamed token costs between its id and the socket, without a GPU.

A stand-in engine writes `--streams` streams as fast as the front end takes them; a client in a
process of its own reads the events over loopback. Prints tokens a second, us of processor time for
a token in both processes, and a table of the steps in between.

    python benchmarks/serve_tokens.py models/pico --streams 256 --tokens 400
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from anybit.engine.async_engine import AsyncEngine, Stream

from anybit.engine.detokenizer import Detokenizer
from anybit.engine.engine import Delta
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.serve.events import dumps, event
from anybit.serve.run import Uvicorn, bind, config
from anybit.serve.server import Settings

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions",
         "messages": "/v1/messages", "responses": "/v1/responses"}  # fmt: skip


class StandIn(AsyncEngine):
    """Steps of one token for every stream, once all are there, and whenever all have been taken."""

    def __init__(self, llm: LLM, streams: int, ids: list[int]):
        super().__init__(llm.engine)
        self.llm, self.wanted, self.ids = llm, streams, ids
        self.texts_of: dict[str, Detokenizer] = {}
        self.told: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.begins: dict[str, int] = {}
        self.used: list[tuple[float, float]] = []  # processor time at the beginning and the end

    def start(self) -> None:
        self.loop, self.accepting = asyncio.get_running_loop(), True
        self.engine.prepare = None

    async def stop(self) -> None:
        self.accepting = False

    def submit(self, requests: list[tuple[list[int], SamplingParams]]) -> Stream:
        ((prompt, params),) = requests
        name = f"request-{len(self.limits)}"
        stream = Stream([name], {(name, 0)}, len(prompt))
        self.streams[name], self.told[name] = stream, 0
        self.limits[name] = params.max_tokens or 16
        self.begins[name] = 37 * len(self.begins)  # each stream is at another place of the text
        self.texts_of[name] = Detokenizer(
            self.llm.decode, prompt, params.stop, plain=self.llm.engine.plain
        )
        if len(self.limits) == self.wanted:
            self.loop.call_later(0.5, self._step)
        return stream

    def abort(self, stream: Stream) -> None:
        for name in stream.names:
            self.streams.pop(name, None)

    def _step(self) -> None:
        if not self.used:
            self.used.append(used())
        if any(stream.pending for stream in self.streams.values()):
            self.loop.call_later(0.0002, self._step)  # a client is behind
            return
        deltas = []
        for name in self.streams:
            at = self.told[name] = self.told[name] + 1
            token = self.ids[(at + self.begins[name]) % len(self.ids)]
            last = at == self.limits[name]
            text, _ = self.texts_of[name].add([token], last)
            deltas.append(Delta(name, 0, text, [token], finish="length" if last else None))
        self._deliver(deltas)
        if self.streams:
            self.loop.call_soon(self._step)
        else:
            self.loop.call_later(0.1, lambda: self.used.append(used()))


def used() -> tuple[float, float]:
    """Seconds of this process's processor time: its own, and the system's for it."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime, found.ru_stime


def client(pipe: Connection, port: int, path: str, body: bytes, streams: int) -> None:
    """Ask, read all events, and report seconds, processor time and bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chosen = selectors.DefaultSelector()
    for _ in range(streams):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(request)
        chosen.register(one, selectors.EVENT_READ)
    buffer, count, left = bytearray(1 << 18), 0, streams
    begun, before, events, size = 0.0, used(), 0, 0
    while left:
        for key, _ in chosen.select():
            found = key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
            part = buffer[:found]
            new = part.count(b"data: ")
            count += new
            if count > 3 * streams and not begun:  # what is before is the requests
                begun, before, events, size = time.monotonic(), used(), count, 0
            size += found
            if not found or part.endswith(b"0\r\n\r\n"):
                chosen.unregister(key.fileobj)
                left -= 1
    pipe.send((time.monotonic() - begun, sum(used()) - sum(before), count - events, size))


def each(function: Callable[[], Any], count: int = 20_000) -> float:
    """us of processor time of a call."""
    start = time.process_time()
    for _ in range(count):
        function()
    return (time.process_time() - start) / count * 1e6


def write(size: int = 240, count: int = 20_000) -> tuple[float, float]:
    """us of a write to a loopback socket that is read: of the process, and of the system."""
    a, b = socket.socketpair()
    with bind("127.0.0.1", 0) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    data, system = b"x" * size, 0.0
    own = 0.0
    for _ in range(count // 100):
        before = used()
        for _ in range(100):
            a.send(data)
        after = used()
        own, system = own + after[0] - before[0], system + after[1] - before[1]
        left = 100 * size
        while left:
            left -= len(b.recv(left))
    return own / count * 1e6, system / count * 1e6


def table(llm: LLM, ids: list[int]) -> None:
    """The steps between a token's id and the socket, us each."""
    from anybit.serve.answers import Asked, ChatAnswer

    prompt, tokens = llm.encode("def main("), itertools.cycle(ids)
    texts = {
        "token to text": Detokenizer(llm.decode, prompt, plain=llm.engine.plain),
        "token to text, beside stop strings": Detokenizer(
            llm.decode, prompt, ["\n\nUser:", "</s>"], plain=llm.engine.plain
        ),
        "token to text, decoded in a window": Detokenizer(llm.decode, prompt),
    }
    rows = {
        name: each(lambda text=text: text.add([next(tokens)]), 5000)  # type: ignore[misc]
        for name, text in texts.items()
    }
    rows["a delta"] = each(lambda: Delta("request-1", 0, " the", [5]))
    stream = Stream(["request-1"], {("request-1", 0)}, 3)
    stream.sink = stream.pending.clear
    delta = Delta("request-1", 0, " the", [5])

    def deliver() -> None:
        stream.push(delta)
        stream.wake()

    rows["to its stream"] = each(deliver)
    answer = ChatAnswer(Asked("pico", [prompt], 1, stream, None))  # type: ignore[arg-type]
    events = answer.events()
    next(events)
    rows["an event, of which only the text changes"] = each(lambda: events.send([delta]))
    body = json.loads(answer.part(0, answer.piece("content", " the"))[6:])
    rows["an event, encoded whole"] = each(lambda: event(body))
    rows["its chunk"] = each(lambda: b"%x\r\n%b\r\n" % (240, dumps(body)))
    rows["its chunk"] -= each(lambda: dumps(body))
    own, system = write()
    rows["send(), the process's part"], rows["send(), the system's part"] = own, system
    for name, us in rows.items():
        print(f"{us:8.2f} us  {name}")


def ordinary(llm: LLM) -> list[int]:
    """Tokens of a text, with what needs several tokens for a character here and there."""
    return llm.encode(
        Path(__file__).read_text() + "na\u00efve \u6771\u4eac \U0001f642", special=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--path", choices=PATHS, default="chat")
    given = parser.parse_args()
    llm = LLM(given.model, kv_bytes=1 << 24)
    ids = ordinary(llm)
    table(llm, ids)
    settings = Settings(("pico",), queue=2 * given.streams)
    configured = config(llm, settings)
    server = configured.app.state.server  # type: ignore[union-attr]
    server.engine = engine = StandIn(llm, given.streams, ids)
    limit = "max_output_tokens" if given.path == "responses" else "max_tokens"
    ask: dict[str, Any] = {"stream": True, limit: given.tokens}
    if given.path == "completions":
        ask["prompt"] = "def main("
    else:
        messages = [{"role": "user", "content": "def main("}]
        ask["input" if given.path == "responses" else "messages"] = messages
    ours, theirs = multiprocessing.Pipe()
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        body = json.dumps(ask).encode()
        process = multiprocessing.get_context("spawn").Process(
            target=client, args=(theirs, port, PATHS[given.path], body, given.streams)
        )
        process.start()
        running = Uvicorn(configured)

        async def run() -> None:
            task = asyncio.ensure_future(running.serve([listener]))
            while not ours.poll():
                await asyncio.sleep(0.2)
            running.should_exit = True
            await task

        with asyncio.Runner(loop_factory=configured.get_loop_factory()) as runner:
            runner.run(run())
        seconds, spent, events, size = ours.recv()
        process.join()
    count = given.streams * given.tokens
    (u0, s0), (u1, s1) = engine.used
    print(f"{given.path}, {given.streams} streams: {events / seconds:,.0f} tokens a second")
    own, system = (u1 - u0) / count * 1e6, (s1 - s0) / count * 1e6
    print(f"front end {own + system:.1f} us a token: own {own:.1f}, system {system:.1f}")
    print(
        f"client {spent / max(events, 1) * 1e6:.1f} us a token, {size / max(events, 1):.0f} bytes"
    )


if __name__ == "__main__":
    main()
