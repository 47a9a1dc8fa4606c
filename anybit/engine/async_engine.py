"""The engine in a thread of its own, for many callers in one asyncio loop."""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from anybit.engine.engine import Delta, Engine
from anybit.engine.sequence import SamplingParams
from anybit.errors import Unsupported, in_a_line

log = logging.getLogger("anybit.engine")


class EngineStopped(Unsupported):
    """The engine takes no requests any more."""


@dataclass(eq=False)
class Stream:
    """What arrives for a few requests of one caller: lists of deltas, until all texts have ended.

    names: of the requests. left: the texts (name, index) that have not ended.
    A reader that is slow gets longer lists and delays nobody.
    """

    names: list[str]
    left: set[tuple[str, int]]
    tokens: int  # of the prompts
    pending: list[Delta] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while self.left or self.pending:
            await self.arrived.wait()
            self.arrived.clear()
            deltas, self.pending = self.pending, []
            yield deltas

    def push(self, delta: Delta) -> None:
        self.pending.append(delta)
        if delta.finish:
            self.left.discard((delta.request, delta.index))
        self.arrived.set()


class AsyncEngine:
    """Runs an engine's steps in a thread; the methods are for one asyncio loop.

    >>> engine = AsyncEngine(llm.engine); engine.start()
    >>> stream = engine.submit([(prompt, params)])
    >>> async for deltas in stream: ...
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.streams: dict[str, Stream] = {}
        self.accepting = False
        self.failure = ""  # why the thread has died
        self._inbox: queue.SimpleQueue[Callable[[], list[Delta]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="anybit-engine", daemon=True)
        self._count = itertools.count()

    def start(self) -> None:
        """Start the thread; call it in the loop that will call everything else.

        Raises:
            Unsupported: Something else uses the engine.
        """
        if self.engine.served or self.engine.requests:
            raise Unsupported(
                "the engine is at work already, for another AsyncEngine or LLM; wait until that "
                "has ended, or make an engine of its own"
            )
        self.engine.served = True
        self.loop = asyncio.get_running_loop()
        self._thread.start()
        self.accepting = True

    def submit(self, requests: list[tuple[list[int], SamplingParams]]) -> Stream:
        """Queue prompts. The stream's deltas carry the names in `stream.names`.

        Raises ValueError for a prompt that cannot be served (then none is queued), EngineStopped
        after a failure or the beginning of a shutdown.
        """
        if not self.accepting:
            raise EngineStopped(self.failure or "the engine is shutting down")
        for prompt, params in requests:
            self.engine.check(prompt, params)
        names = [f"request-{next(self._count)}" for _ in requests]
        together = list(zip(names, requests, strict=True))
        texts = {(name, i) for name, (_, params) in together for i in range(params.n)}
        stream = Stream(names, texts, sum(len(prompt) for prompt, _ in requests))
        for name, (prompt, params) in together:
            self.streams[name] = stream
            self._inbox.put(partial(self._add, name, prompt, params, time.monotonic()))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a stream's requests and free their blocks before the next step; no more arrives."""
        for name in stream.names:
            if self.streams.pop(name, None):
                self._inbox.put(partial(self.engine.abort, name))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, give those that run some time to finish, then abort the rest."""
        self.accepting = False
        end = self.loop.time() + seconds
        while self.streams and self.loop.time() < end:
            await asyncio.sleep(0.02)
        for name in list(self.streams):
            self._inbox.put(partial(self.engine.abort, name))

    async def stop(self) -> None:
        """End every request and the thread."""
        await self.drain(0)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self.engine.served = False
        await asyncio.sleep(0)  # what the thread has sent is delivered now

    @property
    def texts(self) -> int:
        """Texts that have not ended."""
        return sum(len(stream.left) for stream in set(self.streams.values()))

    # In the engine's thread.

    def _run(self) -> None:
        try:
            self.engine.prepared()
            while self._commands():
                self._send(self.engine.step())
        except BaseException as error:
            log.exception("the engine's thread has died")
            self.loop.call_soon_threadsafe(self._died, in_a_line(error))

    def _add(
        self, name: str, prompt: list[int], params: SamplingParams, arrival: float
    ) -> list[Delta]:
        try:
            self.engine.add(name, prompt, params, arrival)
        except Exception as error:  # of the tokenizer's decoder, say
            log.exception("request %s cannot be added", name)
            return [Delta(name, i, finish="error", error=str(error)) for i in range(params.n)]
        return []

    def _commands(self) -> bool:
        """Do what callers have asked for, waiting if there is nothing else to do; False to stop."""
        while True:
            self.engine.idle(lambda: not self._inbox.empty())
            try:
                command = self._inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._send(command())

    def _send(self, deltas: list[Delta]) -> None:
        if deltas:
            self.loop.call_soon_threadsafe(self._deliver, deltas)

    # In the loop.

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self.streams.get(delta.request)
            if stream is None:  # aborted by its caller
                continue
            stream.push(delta)
            if delta.finish and not any(name == delta.request for name, _ in stream.left):
                del self.streams[delta.request]

    def _died(self, reason: str) -> None:
        self.accepting, self.failure = False, f"the engine has failed: {reason}"
        for stream in set(self.streams.values()):
            for name, index in list(stream.left):
                stream.push(Delta(name, index, finish="error", error=self.failure))
        self.streams.clear()
