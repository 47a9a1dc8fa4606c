"""What a streamed token costs between its id and the socket, without a GPU.

The engine runs with a stand-in for its model, whose tokens cost nothing, and writes `--streams`
streams; front ends are the server's, and a client in a process of its own reads the events over
loopback. Prints tokens a second, us of processor time for a token in all processes, and a table of
the steps in between.

    python benchmarks/serve_tokens.py models/pico --streams 256 --tokens 400
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from anybit.engine.detokenizer import Detokenizer
from anybit.engine.engine import Observer
from anybit.engine.llm import LLM
from anybit.engine.model_runner import Flight
from anybit.engine.output import Delta
from anybit.engine.sampler import rows_of
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams
from anybit.serve.channel import Add
from anybit.serve.encoding import dumps, event
from anybit.serve.run import FrontEnds, bind, service_of
from anybit.serve.service import Service
from anybit.serve.settings import Settings
from anybit.serve.streams import Stream

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions",
         "messages": "/v1/messages", "responses": "/v1/responses"}  # fmt: skip


class Fast:
    """A stand-in for a model: its tokens are those of a text, and cost nothing.

    Counts steps with all `streams`, from the first to the last one.
    """

    overlaps = reads_prompts = False
    device = torch.device("cpu")

    def __init__(self, ids: list[int], streams: int):
        self.ids, self.streams, self.tokens = ids, streams, 0
        self.begun: list[float] = []  # what `marks` gave at the first of them, and
        self.ended: list[float] = []  # at the last one
        self.marks: Callable[[], list[float]] = list

    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        rows = rows_of(scheduled)
        if len(rows) == self.streams:
            if not self.begun:
                self.begun = self.marks()
            self.tokens += len(rows)
        elif self.begun and not self.ended:
            self.ended = self.marks()
        # Each stream is at another place of the text.
        tokens = [self.ids[(row.at + 37 * int(row.seq.seed)) % len(self.ids)] for row in rows]
        return Flight(scheduled, rows, None, lambda: (tokens, [None] * len(rows)))


def spent(process: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        "token to text": Detokenizer(llm.decode, prompt, plain=llm.plain),
        "token to text, beside stop strings": Detokenizer(
            llm.decode, prompt, ["\n\nUser:", "</s>"], plain=llm.plain
        ),
        "token to text, decoded in a window": Detokenizer(llm.decode, prompt),
    }
    rows = {
        name: each(lambda text=text: text.add([next(tokens)]), 5000)  # type: ignore[misc]
        for name, text in texts.items()
    }
    rows["a delta"] = each(lambda: Delta("request-1", 0, " the", [5]))
    stream = Stream(["request-1"], {("request-1", 0)})
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
    parser.add_argument("--front-ends", type=int, default=1)
    given = parser.parse_args()
    llm = LLM(given.model, kv_bytes=1 << 28, max_running=given.streams)
    ids = ordinary(llm)
    table(llm, ids)
    llm.engine.prepare = None
    engine_side(llm, ids, given.streams)
    limit = "max_output_tokens" if given.path == "responses" else "max_tokens"
    ask: dict[str, Any] = {"model": "pico", "stream": True, limit: given.tokens, "temperature": 0}
    if given.path == "completions":
        ask["prompt"] = "def main("
    else:
        messages = [{"role": "user", "content": "def main("}]
        ask["input" if given.path == "responses" else "messages"] = messages
    runner = llm.engine.runner = Fast(ids, given.streams)  # type: ignore[assignment]
    ours, theirs = multiprocessing.Pipe()
    with FrontEnds(bind("127.0.0.1", 0), given.front_ends) as front_ends:
        port = front_ends.listener.getsockname()[1]
        service = service_of(llm, Settings(("pico",), queue=given.streams), front_ends.start)
        processes = [process.pid for _, process in front_ends.started]
        front_ends.give(service)
        runner.marks = lambda: [
            time.monotonic(), time.process_time(), sum(map(spent, processes)),
        ]  # fmt: skip
        hold(service, runner)
        body = json.dumps(ask).encode()
        process = multiprocessing.get_context("spawn").Process(
            target=client, args=(theirs, port, PATHS[given.path], body, given.streams)
        )
        process.start()
        # Stops when the client has read all.
        threading.Thread(target=lambda: (ours.poll(None), service.stop(0))).start()
        service.run()
        _, spent_there, events, size = ours.recv()
        process.join()
    seconds, engine, fronts = (b - a for a, b in zip(runner.begun, runner.ended, strict=True))
    each_token = 1e6 / runner.tokens
    print(f"{given.path}, {given.streams} streams: {runner.tokens / seconds:,.0f} tokens a second")
    print(f"engine's process {engine * each_token:.1f} us a token, steps included")
    print(f"front ends {fronts * each_token:.1f} us a token")
    print(
        f"client {spent_there / max(events, 1) * 1e6:.1f} us a token, "
        f"{size / max(events, 1):.0f} bytes"
    )


def hold(service: Service, runner: Fast) -> None:
    """Let no step run before all streams are there."""
    step = service.engine.step

    def held() -> list[Delta]:
        if service.texts < runner.streams and not runner.begun:
            time.sleep(0.001)
            return []
        return step()

    service.engine.step = held  # type: ignore[method-assign]


def engine_side(llm: LLM, ids: list[int], streams: int, steps: int = 200) -> None:
    """The engine's part: steps by themselves, and what it takes to tell a front end of them."""
    runner, engine = llm.engine.runner, llm.engine
    engine.runner = Fast(ids, streams)  # type: ignore[assignment]
    ours, theirs = socket.socketpair()
    service = service_of(llm, Settings(("pico",)))
    service.attach(0, ours, None)
    params = SamplingParams(max_tokens=steps + 5, ignore_eos=True)
    add = Add(0, [([5], params, None)] * streams, time.monotonic())
    (front,) = service.fronts.values()
    service._do(front, add)
    theirs.setblocking(False)
    stepping = telling = 0.0
    for _ in range(steps):
        begun = time.process_time()
        deltas = engine.step()
        stepped = time.process_time()
        service._tell(deltas)
        service._flush()
        telling, stepping = telling + time.process_time() - stepped, stepping + stepped - begun
        with suppress(BlockingIOError):
            theirs.recv(1 << 20)
    service._lost(front, BrokenPipeError())
    theirs.close()
    count = steps * streams / 1e6
    print(f"{stepping / count:8.2f} us  the engine's step, without a model")
    print(f"{telling / count:8.2f} us  the message of a step, in the engine's process")
    engine.runner, engine.observer = runner, Observer()


if __name__ == "__main__":
    main()
