"""Running the server: its socket, its signals and its end.

What takes seconds to import is imported after the socket listens.
"""

import asyncio
import gc
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import uvicorn

from anybit.errors import Unsupported

if TYPE_CHECKING:
    from anybit.engine.llm import LLM
    from anybit.serve.server import Server, Settings

log = logging.getLogger("anybit.serve")

LAST = 2.0  # seconds after the grace in which the last bytes may be sent


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; Unsupported if the address is not to be had. "::": also of IPv4.

    Before the model is loaded, so that a port in use is told at once. Clients that come while it
    is loaded wait.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # the latter of a name that is none
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise Unsupported(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from None


class Uvicorn(uvicorn.Server):
    """Uvicorn that ends requests before it ends itself."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give running requests some time, then fail them, then close every connection."""
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        grace = server.settings.grace
        left = server.engine.texts
        log.warning("shutting down%s", f"; {left} running sequences have {grace:g} s" * bool(left))
        server.stopping.set()
        ending = asyncio.ensure_future(self._end(server, grace))
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self, server: "Server", grace: float) -> None:
        await server.engine.drain(0 if self.force_exit else grace)
        await asyncio.sleep(LAST)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def config(llm: "LLM", settings: "Settings") -> uvicorn.Config:
    """Uvicorn's settings for a model."""
    from anybit.serve.app import create_app
    from anybit.serve.connection import Connection

    return uvicorn.Config(
        create_app(llm, settings),
        http=Connection.of_server(settings.patience),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace + 2 * LAST) + 1,
    )


def run(llm: "LLM", settings: "Settings", listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; then finish or fail every request, and return."""
    # What is loaded stays: collections of garbage would otherwise look at all of it again.
    gc.collect()
    gc.freeze()
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when all has ended
            Uvicorn(config(llm, settings)).run([listener])
    finally:
        gc.unfreeze()  # or triton's library calls what is left at the end a leak, in 40 lines
