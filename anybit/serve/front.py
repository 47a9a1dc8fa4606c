"""A front end: a process that speaks HTTP and knows texts, beside the one that runs the engine."""

import asyncio
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from anybit.serve import channel
from anybit.serve.app import create_app
from anybit.serve.gate import Connection
from anybit.serve.model import Model
from anybit.serve.server import Server
from anybit.serve.settings import DYING, LAST, Settings
from anybit.serve.streams import Engine

log = logging.getLogger("anybit.serve")


class Uvicorn(uvicorn.Server):
    """Uvicorn that ends requests before it ends itself, when the engine's process says so."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the engine's process's."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give running requests some time, then fail them, then close every connection."""
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        server.stopping.set()
        ending = asyncio.ensure_future(self._end(server))
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self, server: Server) -> None:
        await server.engine.drain()
        await asyncio.sleep(DYING / 2 if server.engine.failure else LAST)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def config(app: Any, settings: Settings) -> uvicorn.Config:
    """Uvicorn's settings."""
    protocol = type("Connection", (Connection,), {"patience": settings.patience})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=min(75, int(settings.patience)),
        timeout_graceful_shutdown=int(settings.grace + 2 * LAST) + 1,
    )


async def serve(
    model: Model, settings: Settings, sock: socket.socket, listener: socket.socket
) -> None:
    """Answer until the engine's process says stop, or ends."""
    engine = Engine(model)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: engine, sock=sock)
    server = Uvicorn(config(create_app(model, settings, engine), settings))
    work = asyncio.ensure_future(server.serve([listener]))
    while not server.started and not work.done():
        await asyncio.sleep(0.005)
    if server.started:
        engine.ready()
    stopped = asyncio.ensure_future(engine.stopped.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for each in getattr(server, "servers", ()):
        each.close()  # the port is free for the server that comes next
    await work
    stopped.cancel()
    engine.transport.close()


def run(sock: socket.socket, listener: socket.socket) -> None:
    """Wait for what the engine's process says first, and serve."""
    facts = channel.hello(sock)
    if facts is None:
        return
    model, settings, level = pickle.loads(facts)
    logging.getLogger("anybit").setLevel(level)
    sock.setblocking(False)
    asyncio.run(serve(model, settings, sock, listener))


def main() -> None:
    """The process. Its arguments are the numbers of the channel and of the socket that listens."""
    for kind in (signal.SIGINT, signal.SIGTERM):  # the engine's process says when to end
        signal.signal(kind, signal.SIG_IGN)
    import transformers  # noqa: F401  what a tokenizer is made of

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    gc.collect()
    gc.freeze()
    channel_number, listener_number = map(int, sys.argv[1:])
    with suppress(ConnectionError):
        run(socket.socket(fileno=channel_number), socket.socket(fileno=listener_number))


if __name__ == "__main__":
    main()
