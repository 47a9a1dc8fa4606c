"""One client's connection: HTTP/1 by httptools, with limits, and a short way out for streams.

uvicorn's protocols have no limit for a head's time, nor for readers, and httptools' has none for a
head's size.
"""

import asyncio
import logging
import os
import re
import socket
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from anybit.serve.mistakes import error_at
from anybit.serve.times import Times

log = logging.getLogger("anybit.serve")

LIMIT = 1 << 16  # bytes of a head, of trailers, of a body nobody reads, of requests ahead
LOOK = 0.05  # seconds between looks at a client that sends no more
# The target of a request is a path, or a whole address as for a proxy.
ORIGIN = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
UPGRADE = {b"upgrade", b"http2-settings"}


class Exchange:
    """A request and its answer. keep: whether the connection may stay open after it."""

    def __init__(self, connection: "Connection", scope: Scope, keep: bool, expects: bool):
        self.connection, self.scope = connection, scope
        self.keep, self.expects = keep, expects
        self.body, self.more = bytearray(), True  # of the request
        self.started = self.ended = self.gone = False  # the answer; the client
        self.chunked = False
        self.left: int | None = None  # bytes that the answer still needs, if it told how many
        self.news = asyncio.Event()
        self.head = b""  # of the answer, and
        self.parts: list[bytes] = []  # parts of its body, that are not sent yet

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            if not self.ended:  # or else it was told, in the log as well
                log.error("%s failed", self.scope["path"], exc_info=error)
        if self.ended or self.gone:
            return
        if self.started:
            self.connection.transport.close()
        else:
            body = error_at(self.scope["path"], 500, "the server has failed")
            head = [(b"content-type", b"application/json"), (b"connection", b"close")]
            head.append((b"content-length", b"%d" % len(body)))
            await self.send({"type": "http.response.start", "status": 500, "headers": head})
            await self.send({"type": "http.response.body", "body": body})

    async def receive(self) -> Message:
        """A part of the body; the client's leaving, or the answer's end, behind it."""
        if self.expects and not self.started:
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.expects = False
        if not (self.gone or self.ended):
            self.connection.read_on()
            await self.news.wait()
            self.news.clear()
        if self.gone or self.ended:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more}

    async def send(self, message: Message) -> None:
        """A part of the answer; waits while the client reads too slowly."""
        await self.connection.writable.wait()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if body and self.scope["method"] != "HEAD":
            self.parts.append(body)
        self.flush(b"" if more or not self.chunked else b"0\r\n\r\n")
        if not more:
            self.ended, self.keep = True, self.keep and not self.left
            self.news.set()
            self.connection.answered(self)

    def write(self, *parts: bytes) -> None:
        """Send parts of the body soon; whether that is wise, `connection.writable` tells.

        What is written while a step's deltas are read is sent behind them, in one chunk: each call
        of the system leaves the processor's caches to it, and the next stream's events would wait
        for theirs.
        """
        if not self.parts:
            waiting = self.connection.waiting
            if not waiting:
                self.connection.loop.call_soon(send_all, waiting)
            waiting.append(self)
        self.parts += parts

    def flush(self, end: bytes = b"") -> None:
        """Send what was written, and the end of the body."""
        out = b"".join(self.parts)
        self.parts.clear()
        if self.left is not None:
            self.left -= len(out)
        if out and self.chunked:
            out = b"%x\r\n%b\r\n" % (len(out), out)
        if self.head or end:
            out, self.head = self.head + out + end, b""
        if out and not self.gone:
            self.connection.transport.write(out)

    def _begin(self, status: int, headers: Any) -> None:
        self.started = True
        out = [b"HTTP/1.1 %d %b\r\n" % (status, phrase(status))]
        closes = False
        for name, value in (*self.connection.state.default_headers, *headers):
            name = name.lower()
            if b"\n" in value or b"\r" in value or b"\n" in name:
                raise RuntimeError(f"the header {name!r} holds a line break")
            if name == b"content-length":
                self.left = int(value)
            closes = closes or (name == b"connection" and value.lower() == b"close")
            out += [name, b": ", value, b"\r\n"]
        empty = self.scope["method"] == "HEAD" or status in (204, 304)
        if empty:
            self.left = None
        elif self.left is None:
            self.chunked = self.scope["http_version"] == "1.1"
            if self.chunked:
                out.append(b"transfer-encoding: chunked\r\n")
            else:  # the body ends with the connection
                self.keep = False
        self.keep = self.keep and not closes
        if not self.keep and not closes:
            out.append(b"connection: close\r\n")
        out.append(b"\r\n")
        self.head = b"".join(out)  # sent with the first part of the body, or alone


class Connection(asyncio.Protocol):
    """A connection, as uvicorn's server uses it.

    A client has `patience` seconds for a request's head, and to read what waits for it. One that
    sends no more, and waits for its answer, gets it.
    """

    patience = 60.0
    waits: Times
    waiting: list[Exchange]  # of all connections of a server: those with parts to be sent

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        self.app, self.state, self.app_state = config.loaded_app, server_state, app_state
        self.loop = _loop or asyncio.get_running_loop()
        self.exchanges: deque[Exchange] = deque()  # the first one is being answered
        self.reading: Exchange | None = None  # whose body arrives
        self.later = bytearray()  # what came behind a request that waits for its turn
        self.last = False  # no further request is taken
        self.eof = self.paused = False
        self.refusal: tuple[int, str] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.timer: asyncio.TimerHandle | None = None  # until a head has arrived
        self.stuck: asyncio.TimerHandle | None = None  # while more waits to be sent than is good
        self.probe: socket.socket | None = None
        self.idle = 0  # bytes since something came of what was read
        self._parse_anew()

    @classmethod
    def of_server(cls, patience: float, waits: Times) -> type["Connection"]:
        """The class of one server's connections. waits: takes the times of those for readers."""
        own = {"patience": patience, "waits": waits, "waiting": []}
        return type("Connection", (cls,), own)

    # asyncio calls these.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # "server", "client": host and port
        self.ends = [tuple(transport.get_extra_info(n)[:2]) for n in ("sockname", "peername")]
        self.state.connections.add(self)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.last and self.reading is None:
            return
        if len(self.exchanges) > 1:
            self.later += data
            if len(self.later) > LIMIT:
                self._pause()
            return
        self._parse(data)
        if self.idle > LIMIT and self.refusal is None:
            self.refusal = (
                431,
                f"a request's head, or what follows its body, has over {LIMIT} bytes",
            )
        if self.refusal is not None:
            self.last, self.reading = True, None
            if not self.exchanges:
                self._refuse()
        self._watch()

    def eof_received(self) -> bool:
        if not self.exchanges or self.exchanges[-1].more:
            return False
        self.eof = True
        # Is it gone, or does it wait? A byte out of band, which no reader sees, makes the system
        # of one that is gone say so.
        number = self.transport.get_extra_info("socket").fileno()
        self.probe = socket.socket(fileno=os.dup(number))
        with suppress(OSError):
            self.probe.send(b"\0", socket.MSG_OOB | socket.MSG_DONTWAIT)
        self.loop.call_later(LOOK, self._look)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.state.connections.discard(self)
        self._unwatch()
        self._unstick()
        if self.probe is not None:
            self.probe.close()
            self.probe = None
        for exchange in self.exchanges:
            exchange.gone = True
            exchange.news.set()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.full = self.loop.time()
        self.stuck = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        self.writable.set()
        self.waits.add(self.loop.time() - self.full)
        self._unstick()

    # The server and exchanges call these.

    def shutdown(self) -> None:
        """Close the connection after the answer that is being made, or now."""
        self.last = True
        for exchange in self.exchanges:
            exchange.keep = False
        if not self.exchanges:
            self.transport.close()

    def read_on(self) -> None:
        """Read again, if that was stopped for what had not been taken."""
        if self.paused and len(self.later) <= LIMIT:
            self.paused = False
            self.transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        """Go on to the next request."""
        self.state.total_requests += 1
        self.exchanges.remove(exchange)
        if not exchange.keep or self.transport.is_closing():
            self.exchanges.clear()
            self.transport.close()
            return
        if self.exchanges:
            self._start(self.exchanges[0])
        if self.later and len(self.exchanges) < 2:
            data, self.later = bytes(self.later), bytearray()
            self.data_received(data)
        if not self.exchanges and self.refusal is not None:
            self._refuse()
        elif not self.exchanges and self.eof:
            self.transport.close()
        self.read_on()
        self._watch()

    # The parser calls these.

    def on_message_begin(self) -> None:
        self.target, self.head = b"", True
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head:  # or else it is a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.head, self.idle = False, 0
        if self.last or self.parser.should_upgrade():
            return
        version, method = self.parser.get_http_version(), self.parser.get_method()
        fields = dict(self.headers)
        if len(self.target) + sum(len(n) + len(v) + 4 for n, v in self.headers) > LIMIT:
            self.refusal = 431, f"the request's head has over {LIMIT} bytes"
        elif version == "1.1" and [name for name, _ in self.headers].count(b"host") != 1:
            self.refusal = 400, "the request needs one header Host"
        elif fields.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self.refusal = 501, "Transfer-Encoding: send the body as it is, or chunked"
        if self.refusal is not None:
            self.last = True
            return
        target = ORIGIN.sub(b"", self.target, 1) if self.target[:1] != b"/" else self.target
        path, _, query = target.partition(b"#")[0].partition(b"?")
        path = path or b"/"
        # Where both tell a body's length, something in front of this server may believe the other.
        both = b"transfer-encoding" in fields and b"content-length" in fields
        keep = version == "1.1" and self.parser.should_keep_alive() and not both
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self.ends[0],
            "client": self.ends[1],
            "scheme": "http",
            "root_path": "",
            "method": method.decode("ascii"),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        expects = fields.get(b"expect", b"").lower() == b"100-continue"
        scope["exchange"] = self.reading = Exchange(self, scope, keep, expects)
        self.last = not keep
        self.exchanges.append(self.reading)
        if len(self.exchanges) == 1:
            self._start(self.reading)

    def on_body(self, body: bytes) -> None:
        self.idle = 0
        if self.reading is None or self.reading.ended:
            return
        self.reading.body += body
        self.reading.news.set()
        if len(self.reading.body) > LIMIT:
            self._pause()

    def on_message_complete(self) -> None:
        self.idle = 0
        if self.reading is not None:
            self.reading.more = False
            self.reading.news.set()
            self.reading = None

    # Own.

    def _parse_anew(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        # A body whose length is told twice is read as RFC 9112 says, and the connection ends.
        self.parser.set_dangerous_leniencies(lenient_chunked_length=True)

    def _parse(self, data: bytes) -> None:
        self.idle += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Other protocols are not spoken: the request counts as if it had asked for none.
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.refusal = self.refusal or (400, "this server is no proxy")
            elif not self.last:
                kept = [(name, value) for name, value in self.headers if name not in UPGRADE]
                head = b"".join(b"%b: %b\r\n" % field for field in kept)
                version = self.parser.get_http_version().encode()
                line = b"%b %b HTTP/%b\r\n" % (method, self.target, version)
                self._parse_anew()
                self._parse(line + head + b"\r\n" + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self.last:  # what follows the last request is nothing
                reason = str(error.__context__ or error)
                self.refusal = self.refusal or (400, f"the request is no HTTP: {reason}")
            elif self.reading is not None:  # its body cannot become whole
                self.transport.close()

    def _start(self, exchange: Exchange) -> None:
        task = self.loop.create_task(exchange.run(self.app))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    def _refuse(self) -> None:
        """Answer what is no request in the form of every error, and close the connection."""
        assert self.refusal is not None
        status, message = self.refusal
        body = error_at("", status, message)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, phrase(status), len(body), body)
        )
        self.transport.close()

    def _look(self) -> None:
        """Leave a client that sends no more, if it is gone."""
        if self.probe is None:
            return
        if self.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(LOOK, self._look)

    def _pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def _watch(self) -> None:
        """Wait for a head no longer than a client may take."""
        if self.exchanges:
            self._unwatch()
        elif self.timer is None and not self.transport.is_closing():
            self.timer = self.loop.call_later(self.patience, self.transport.close)

    def _unwatch(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _unstick(self) -> None:
        if self.stuck is not None:
            self.stuck.cancel()
            self.stuck = None


def send_all(waiting: list[Exchange]) -> None:
    """Send what streams have written."""
    found = waiting.copy()
    waiting.clear()
    for exchange in found:
        exchange.flush()


def phrase(status: int) -> bytes:
    """What a status is called; nothing for one that is not in the standard."""
    with suppress(ValueError):
        return HTTPStatus(status).phrase.encode()
    return b""
