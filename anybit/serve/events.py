"""Answers as server-sent events: written when a step's deltas arrive, without a task's turn."""

import asyncio
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from anybit.engine.output import Delta
from anybit.serve.streams import Engine

if TYPE_CHECKING:
    from anybit.serve.answers import Answer

# What makes the events of one stream: it is given deltas, and returns the last events.
Events = Generator[bytes, list[Delta], bytes]


class EventStream(Response):
    """An answer as server-sent events, whose requests end with the response, however it ends.

    Deltas become bytes in the socket's buffer in the call that brings them, and most tokens do so
    without a delta (`Short`). While the client reads too slowly, deltas wait, and become fewer,
    longer writes.
    """

    def __init__(self, answer: "Answer", engine: Engine):
        self.status_code, self.background, self.media_type = 200, None, "text/event-stream"
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.answer, self.stream, self.engine = answer, answer.asked.stream, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            await self._run(scope, receive, send)
        finally:
            self._stop()
            self.engine.abort(self.stream)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, stream, events = scope["exchange"], self.stream, self.answer.events()
        writable, wake, last = exchange.connection.writable, asyncio.Event(), None
        failure: Exception | None = None

        def flush() -> None:
            """Write what has arrived."""
            nonlocal last, failure
            deltas, stream.pending = stream.pending, []
            try:
                if out := events.send(deltas):
                    exchange.write(out)
            except StopIteration as stop:
                last = stop.value
            except Exception as error:
                last, failure = b"", error
            if last is not None:
                self._stop()
                wake.set()

        def arrived() -> None:
            if writable.is_set() and not exchange.gone:
                flush()
            else:
                wake.set()

        async def leaving() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            wake.set()

        await send({"type": "http.response.body", "body": next(events), "more_body": True})
        stream.sink = arrived
        for name, index in stream.left:
            at = self.answer.index[name] + index
            tokens, find = self.answer.texts[at].completion.tokens, partial(self.answer.frame, at)
            self.engine.shorten(stream, (name, index), tokens, find, exchange)
        if stream.pending:
            wake.set()
        gone = asyncio.ensure_future(leaving())
        try:
            while last is None and not gone.done():
                await wake.wait()
                wake.clear()
                await writable.wait()
                if stream.pending and last is None and not exchange.gone:
                    flush()
        finally:
            gone.cancel()
        if failure is not None:
            raise failure
        await send({"type": "http.response.body", "body": last or b""})

    def _stop(self) -> None:
        """Write nothing more when it arrives."""
        self.stream.sink = None
        self.engine.lengthen(self.stream)
