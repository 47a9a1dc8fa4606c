"""What stands before the routes: keys, limits of size and time, HEAD, and a line in the log."""

import asyncio
import base64
import binascii
import logging
import re
import secrets
import time

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anybit.serve.mistakes import error_at
from anybit.serve.server import Settings

log = logging.getLogger("anybit.access")

OPEN = ("/health",)  # without a key
# What monitors and the chat page ask for all the time, and browsers.
QUIET = re.compile(r"/|/(health|metrics|favicon\.ico|page/.*)")
# Some clients put a charset, or nothing, into Content-Encoding: only these change the body.
CODINGS = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress"}


class Gate:
    """Plain ASGI, so that it does not come between a response and its client's disconnect.

    stopping: set when the server shuts down; then bodies that have not arrived are given up.
    """

    def __init__(self, app: ASGIApp, settings: Settings, stopping: asyncio.Event):
        self.app, self.settings, self.stopping = app, settings, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if scope["method"] == "HEAD":  # a GET, of which the server sends no body
            scope = {**scope, "method": "GET"}
        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, self._limited(receive), noted)
            else:
                await refuse(noted, scope["path"], *refusal)
        finally:
            level = logging.DEBUG if QUIET.fullmatch(scope["path"]) else logging.INFO
            client, seconds = scope.get("client") or ("-",), time.monotonic() - start
            path = scope.get("raw_path", b"-").decode("ascii", "backslashreplace")
            log.log(level, "%s %s %s %d %.3f s", client[0], scope["method"], path, status, seconds)

    def _refusal(self, scope: Scope) -> tuple[int, str, dict[bytes, bytes]] | None:
        """Why a request is not let in."""
        headers = dict(scope["headers"])
        if self.settings.keys and scope["path"] not in OPEN and not self._has_key(headers):
            # A browser asks its user for the key, as a password, where the page is.
            kind = b"Basic" if scope["path"] == "/" else b"Bearer"
            return 401, "the API key is missing or wrong", {b"www-authenticate": kind}
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.settings.body:
            return 413, f"the body is larger than {self.settings.body} bytes", {}
        encoding = headers.get(b"content-encoding", b"").decode("latin-1")
        if CODINGS & {coding.strip() for coding in encoding.lower().split(",")}:
            return 415, f"Content-Encoding {encoding}: send the body as it is, without one", {}
        return None

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, sent = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"basic":
            try:
                sent = base64.b64decode(sent).partition(b":")[2]
            except binascii.Error:
                sent = b""
        elif kind.lower() != b"bearer":
            sent = headers.get(b"x-api-key", b"")
        return any(secrets.compare_digest(sent, key.encode()) for key in self.settings.keys)

    def _limited(self, receive: Receive) -> Receive:
        """The body's parts, within the limits; then the client's leaving, whenever that is."""
        limit, patience = self.settings.body, self.settings.patience
        end, seen, whole = time.monotonic() + patience, 0, False

        async def limited() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            part = asyncio.ensure_future(receive())
            stopping = asyncio.ensure_future(self.stopping.wait())
            try:
                left = max(end - time.monotonic(), 0)
                await asyncio.wait(
                    {part, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not part.done() and self.stopping.is_set():
                    raise HTTPException(503, "the server is shutting down; try again later")
                if not part.done():
                    raise HTTPException(408, f"the body has not arrived within {patience:g} s")
            finally:
                part.cancel()
                stopping.cancel()
            message = part.result()
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            return message

        return limited


async def refuse(
    send: Send, path: str, status: int, message: str, headers: dict[bytes, bytes]
) -> None:
    """Answer with an error, without a look at the body."""
    body = error_at(path, status, message)
    headers = headers | {b"content-type": b"application/json", b"connection": b"close"}
    headers[b"content-length"] = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": body})
