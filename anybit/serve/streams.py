"""What a front end hears from the engine: a stream of deltas for each caller."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from anybit.engine.output import Delta
from anybit.engine.sequence import SamplingParams
from anybit.engine.structured import Structured, Tried
from anybit.engine.transcript import Transcripts
from anybit.errors import in_a_line
from anybit.serve import channel
from anybit.serve.connection import Exchange
from anybit.serve.encoding import Encoded, Frame, Short
from anybit.serve.model import Model
from anybit.serve.times import DELIVERY, OWN, WRITING, Times

log = logging.getLogger("anybit.serve")

GRAMMAR = "as it was tried"  # what `Tried` says is not sent a second time
EVERY = 1.0  # seconds after which the engine's process is told times


class Refused(Exception):
    """The engine does not take requests: an HTTP status, and why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Stream:
    """What arrives for a few requests of one caller: lists of deltas, until all texts have ended.

    names: of the requests. left: the texts (name, index) that have not ended. sink: is called
    when a step's deltas are pending, instead of whoever reads the stream.
    A reader that is slow gets longer lists and delays nobody.
    """

    names: list[str]
    left: set[tuple[str, int]]
    pending: list[Delta] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    sink: Callable[[], None] | None = None

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

    def wake(self) -> None:
        """Say that a step's deltas are pending."""
        if self.sink is None:
            self.arrived.set()
        else:
            self.sink()


@dataclass(eq=False, slots=True)
class Text:
    """A text that has not ended. take: writes a token's event, or says that it cannot."""

    request: str
    index: int
    take: Callable[[int], bool] | None = None


@dataclass(eq=False)
class Asked:
    """Requests that the engine has not answered yet: whether it takes them."""

    stream: Stream
    requests: list[tuple[list[int], SamplingParams]]
    answer: "asyncio.Future[None]"


class Engine(asyncio.Protocol):
    """The engine as a front end sees it: the methods are for one asyncio loop.

    >>> stream = await engine.submit([(prompt, params)])
    >>> async for deltas in stream: ...

    accepting: whether it takes requests; failure: why it has died. preparing: whether it still
    records steps. stopped: is done once everything is to end, `until` a time of the loop's clock.
    """

    def __init__(self, model: Model):
        self.streams: dict[str, Stream] = {}
        self.accepting, self.preparing, self.failure = True, True, ""
        self.loop = asyncio.get_running_loop()
        self.stopped, self.until = asyncio.Event(), 0.0
        self.transcripts = Transcripts(model, self._ended)
        self.vocabulary, self.length = model.vocabulary, model.length
        self.grammars, self.encoded = model.grammars, Encoded(model.plain)
        self._texts: dict[int, Text] = {}
        self._asked: dict[int, Asked] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}  # for metrics
        self.times = {name: Times(bounds) for name, (_, bounds) in OWN.items()}
        self.loop.call_later(EVERY, self._tell_times)
        self._frames = channel.Frames()
        self._next, self._count = 0, count()

    async def submit(self, requests: list[tuple[list[int], SamplingParams]]) -> Stream:
        """Queue prompts. The stream's deltas carry the names in `stream.names`.

        Raises:
            Refused: A prompt cannot be served (then none is queued), there are too many requests,
                or the engine has failed or is about to end.
        """
        if not self.accepting:
            raise Refused(503, self.failure or "the engine is shutting down")
        first, names, texts = self._next, [], set()
        for _, params in requests:
            names.append(str(self._next))
            for index in range(params.n):
                self._texts[self._next] = Text(names[-1], index)
                texts.add((names[-1], index))
                self._next += 1
        stream = Stream(names, texts)
        asked = self._asked[first] = Asked(stream, requests, self.loop.create_future())
        self.streams |= dict.fromkeys(names, stream)
        try:
            sent = [(prompt, *self._wired(params)) for prompt, params in requests]
            self._send(channel.Add(first, sent, time.monotonic()))
            await asked.answer
        except OverflowError:
            self._forget(stream)
            raise Refused(400, "a number of the request has more than 64 bits") from None
        except asyncio.CancelledError:
            self.abort(stream)
            raise
        finally:
            self._asked.pop(first, None)
        return stream

    def abort(self, stream: Stream) -> None:
        """End a stream's requests and free their blocks before the next step; no more arrives."""
        if names := self._forget(stream):
            self._send(channel.Abort(list(map(int, names))))

    def shorten(
        self,
        stream: Stream,
        text: tuple[str, int],
        tokens: list[int],
        find: Callable[[], Frame | None],
        exchange: Exchange,
    ) -> None:
        """Write a text's tokens without deltas where these would say nothing else, see `Short`."""
        found, wait = self.transcripts.open.get(text, (None, 0))
        if found is not None and wait <= 0:  # or else its tokens are counted
            short = Short(found, tokens, find, self.encoded, stream, exchange)
            self._texts[int(text[0]) + text[1]].take = short.take

    def lengthen(self, stream: Stream) -> None:
        """Make deltas of all tokens of a stream again."""
        for name, index in stream.left:
            if text := self._texts.get(int(name) + index):
                text.take = None

    async def drain(self) -> None:
        """Take no more requests, let those that run end within the grace, then abort the rest."""
        self.accepting = False
        while self.streams and self.loop.time() < self.until:
            await asyncio.sleep(0.02)
        for stream in set(self.streams.values()):
            left = [Delta(*text, finish="abort") for text in stream.left]
            self.abort(stream)
            for delta in left:
                stream.push(delta)
            stream.wake()

    async def metrics(self) -> bytes:
        """All metrics in Prometheus' exposition format."""
        number = next(self._count)
        answer = self._waiting[number] = self.loop.create_future()
        if self.failure:
            raise Refused(503, self.failure)
        seen = {name: times.take() for name, times in self.times.items()}
        self._send(channel.Times(seen))
        self._send(channel.Ask(number))
        return await answer

    def ready(self) -> None:
        """Tell that the front end answers."""
        self._send(channel.Ready())

    def _wired(self, params: SamplingParams) -> tuple[SamplingParams, Tried | None]:
        """Parameters whose numbers are no larger than they need be, and what was tried for them."""
        most = {"max_tokens": self.length, "min_tokens": self.length, "top_k": self.vocabulary}
        changes: dict[str, Any] = {
            name: limit
            for name, limit in most.items()
            if (value := getattr(params, name)) is not None and value > limit
        }
        tried, structured = None, params.structured
        if structured is not None:
            if self.grammars is None:
                raise Refused(400, "structured output needs a tokenizer, and the model has none")
            tried = self.grammars.tried(structured)  # long since, so that this takes no time
            changes["structured"] = Structured(
                grammar=GRAMMAR, think=structured.think, thinking=structured.thinking
            )
        return replace(params, **changes) if changes else params, tried

    def _send(self, message: channel.Message) -> None:
        self.transport.write(channel.framed(message))

    def _tell_times(self) -> None:
        """Tell the engine's process what took how long."""
        seen = {name: times.take() for name, times in self.times.items() if any(times.counts)}
        if seen and not self.failure:
            self._send(channel.Times(seen))
        self.loop.call_later(EVERY, self._tell_times)

    def _ended(self, request: str, index: int, reason: str) -> None:
        """Tell the engine that a text has ended by what it says."""
        self._send(channel.End(int(request), index, reason))

    def _forget(self, stream: Stream) -> list[str]:
        """Expect nothing more for a stream; its requests that had not ended."""
        names = [name for name in stream.names if self.streams.pop(name, None)]
        for name, index in stream.left:
            self._texts.pop(int(name) + index, None)
            self.transcripts.drop(name, index)
        return names

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for message in map(channel.from_engine, self._frames.feed(data)):
            match message:
                case channel.Step():
                    self._step(message)
                case channel.Told(number, text):
                    if not (answer := self._waiting.pop(number)).done():
                        answer.set_result(text)
                case channel.State(preparing):
                    self.preparing = preparing
                case channel.Stop(grace):
                    self.until = self.loop.time() + grace
                    self.stopped.set()
                case channel.Failed(reason):
                    self._died(reason)

    def connection_lost(self, error: Exception | None) -> None:
        self._died("its process has ended")

    def _step(self, step: channel.Step) -> None:
        """Take what a step has added."""
        for first in step.admitted:
            self._admitted(first)
        for first, status, reason in step.refused:
            if asked := self._asked.get(first):
                self._forget(asked.stream)
                if not asked.answer.done():
                    asked.answer.set_exception(Refused(status, reason))
        touched: dict[Stream, None] = {}
        written = 0
        more, find = {each.at: each for each in step.more}, self._texts.get
        for at, (number, token) in enumerate(zip(step.texts, step.tokens, strict=True)):
            text = find(number)
            if text is None:  # aborted by its caller, or ended by what it says
                continue
            if text.take is not None and at not in more and text.take(token):
                written += 1
                continue
            delta = Delta(text.request, text.index, "", [token] if token >= 0 else [])
            if each := more.get(at):
                delta.logprobs, delta.finish, delta.error = each.logprobs, each.finish, each.error
                delta.stop_reason, delta.silent, delta.cached = (
                    each.stop_reason,
                    each.silent,
                    each.cached,
                )
                delta.accepted, delta.rejected = each.accepted, each.rejected
                delta.prompt_logprobs, delta.embedding = each.prompt_logprobs, each.embedding
            if not self.transcripts.read([delta]):
                continue
            stream = self.streams[delta.request]
            stream.push(delta)
            touched[stream] = None
            if delta.finish:
                del self._texts[number]
                if not any(name == delta.request for name, _ in stream.left):
                    del self.streams[delta.request]
        read = time.monotonic()
        for stream in touched:
            stream.wake()
        if touched or written:
            self.times[DELIVERY].add(read - step.sent, len(touched) + written)
            self.times[WRITING].add(time.monotonic() - read, len(touched) + written)

    def _admitted(self, first: int) -> None:
        """Begin the texts of requests that the engine has taken."""
        asked = self._asked.get(first)
        if asked is None:
            return
        try:
            for name, (prompt, params) in zip(asked.stream.names, asked.requests, strict=True):
                self.transcripts.add(name, prompt, params)
        except Exception as error:  # of the tokenizer's decoder
            log.exception("request %s cannot be read", asked.stream.names)
            self.abort(asked.stream)
            if not asked.answer.done():
                asked.answer.set_exception(Refused(500, in_a_line(error)))
        if not asked.answer.done():
            asked.answer.set_result(None)

    def _died(self, reason: str) -> None:
        """End everything with an error."""
        if self.failure:
            return
        if not self.stopped.is_set():
            log.error("the engine has failed: %s; %d open requests fail", reason, len(self.streams))
        self.accepting, self.failure = False, f"the engine has failed: {reason}"
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(Refused(500, self.failure))
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Refused(503, self.failure))
        for stream in set(self.streams.values()):
            for text in list(stream.left):
                stream.push(Delta(*text, finish="error", error=self.failure))
            stream.wake()
        self.streams.clear()
        self.stopped.set()
