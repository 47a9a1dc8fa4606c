"""The bodies of requests: JSON whose texts are all text, in every field and key."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from anybit.serve.mistakes import WrongField

HALF = re.compile("[\ud800-\udfff]")
# What a half can come of. Most bodies hold nothing of it, and are not looked through.
MAY_HOLD = re.compile("[\ud800-\udfff]|\\\\u[dD][89a-fA-F]")


class Body(Request):
    """A request whose body is refused if a text of it cannot be written as UTF-8.

    JSON may hold half of a surrogate pair, which is no character: tokenizers, answers and logs
    would each fail at it in their own place, some of them when the work is done.
    """

    async def json(self) -> Any:
        found = await super().json()
        raw = await self.body()
        if MAY_HOLD.search(raw.decode(json.detect_encoding(raw), "surrogatepass")):
            refuse_halves(found)
        return found


class Route(APIRoute):
    """A route that reads such bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(Body(request.scope, request.receive))

        return checked


def refuse_halves(body: Any) -> None:
    """400 for the first text or key that holds half of a surrogate pair, however deep."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), body)]
    while todo:
        path, value = todo.pop()
        field = ".".join(path)
        if isinstance(value, str) and HALF.search(value):
            raise WrongField(field, f"{field or 'the body'}: {wrong('the text', value)}")
        parts: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            parts = list(value.items())
            if key := next(filter(HALF.search, value), None):
                raise WrongField(field, f"{field or 'the body'}: {wrong('a key', key)}")
        elif isinstance(value, list):
            parts = list(enumerate(value))
        todo += [((*path, str(name)), part) for name, part in reversed(parts)]


def wrong(what: str, text: str) -> str:
    half = HALF.search(text)
    code = ord(half.group()) if half else 0
    return f"{what} holds half of a surrogate pair (\\u{code:04x}), which is no character"
