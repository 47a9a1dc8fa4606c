"""A front end: a process that speaks HTTP and knows texts, beside the one that runs the engine."""

import asyncio
import gc
import logging
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from anybit.serve import channel
from anybit.serve.app import create_app
from anybit.serve.connection import Connection
from anybit.serve.model import Model
from anybit.serve.run import starting
from anybit.serve.server import Server
from anybit.serve.settings import DYING, LAST, Settings
from anybit.serve.streams import Engine
from anybit.serve.times import CLIENT, Times

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


def config(app: Any, settings: Settings, waits: Times) -> uvicorn.Config:
    """Uvicorn's settings. waits: takes the times of those for clients that read too slowly."""
    return uvicorn.Config(
        app,
        http=Connection.of_server(settings.patience, waits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace + 2 * LAST) + 1,
    )


async def serve(
    model: Model,
    settings: Settings,
    sock: socket.socket,
    listener: socket.socket,
    begun: Callable[[], None],
) -> None:
    """Answer until the engine's process says stop, or ends. begun: called when all is made."""
    engine = Engine(model)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: engine, sock=sock)
    with starting(sock):
        app = create_app(model, settings, engine)
    server = Uvicorn(config(app, settings, engine.times[CLIENT]))
    work = asyncio.ensure_future(server.serve([listener]))
    while not server.started and not work.done():
        await asyncio.sleep(0.005)
    if server.started:
        begun()
        engine.ready()
    stopped = asyncio.ensure_future(engine.stopped.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for each in getattr(server, "servers", ()):
        each.close()  # the port is free for the server that comes next
    await work
    stopped.cancel()
    engine.transport.close()


def run(
    sock: socket.socket, listener: socket.socket, begun: Callable[[], None] = lambda: None
) -> None:
    """Wait for what the engine's process says first, and serve. begun: as in `serve`."""
    facts = channel.hello(sock)
    if facts is None:
        return
    with starting(sock):
        model, settings, level = pickle.loads(facts)
    logging.getLogger("anybit").setLevel(level)
    sock.setblocking(False)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(model, settings, sock, listener, begun))


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest loop there is."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # of systems that have none
        return asyncio.new_event_loop()
    return new_event_loop()


def main(sock: socket.socket, listener: socket.socket) -> None:
    """The process, once all that it needs is imported."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    keep()
    with suppress(ConnectionError):
        run(sock, listener, keep)


def keep() -> None:
    """Leave what there is out of later searches for garbage, which take longer than a token."""
    gc.collect()
    gc.freeze()
