"""Bytes of server-sent events, and the short way of a token to them."""

import json
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from anybit.engine.detokenizer import Detokenizer
from anybit.engine.plain import Plain

if TYPE_CHECKING:
    from anybit.serve.connection import Exchange
    from anybit.serve.streams import Stream

# Characters at which some clients end a line, though the protocol does not: `str.splitlines` does.
ENDS = {char.encode(): rf"\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}
# What stands around a text, as a JSON string, in the event of a token.
Frame = tuple[bytes, bytes]


def dumps(value: Any) -> bytes:
    """JSON in UTF-8; in ASCII where a text holds half of a surrogate pair."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def line(value: Any) -> bytes:
    """The same for an event: one line for every client."""
    found = dumps(value)
    for end, escaped in ENDS.items():
        if end in found:
            found = found.replace(end, escaped)
    return found


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: %b\n\n" % line(body)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def around(make: Callable[[str], bytes]) -> Frame:
    """What an event has before and behind a text's JSON. make: makes the event of a text."""
    mark = uuid.uuid4().hex
    before, after = make(mark).split(dumps(mark))
    return before, after


class Encoded(dict[int, bytes | None]):
    """Texts of tokens that need no decoding behind whole characters, in JSON; None: of others."""

    def __init__(self, plain: Plain | None):
        super().__init__()
        self.plain = plain

    def __missing__(self, token: int) -> bytes | None:
        text = None if self.plain is None else self.plain[token]
        self[token] = found = None if text is None else line(text)
        return found


class Short:
    """The short way of one text's tokens: all of an event but the token's text was made before.

    text: decodes the tokens of the general way. tokens: of the text so far. find: gives what stands
    around a token's text; None while the next event says more. exchange: with the stream's client.
    """

    __slots__ = ("encoded", "exchange", "find", "frame", "stream", "text", "tokens", "writable")

    def __init__(
        self,
        text: Detokenizer,
        tokens: list[int],
        find: Callable[[], Frame | None],
        encoded: Encoded,
        stream: "Stream",
        exchange: "Exchange",
    ):
        self.text, self.tokens, self.encoded = text, tokens, encoded
        self.stream, self.exchange = stream, exchange
        self.find, self.frame = find, find()
        self.writable = exchange.connection.writable.is_set

    def take(self, token: int) -> bool:
        """Write a token's event; False if it needs more than that, or what came before waits."""
        string = self.encoded[token]
        if string is None or self.stream.pending or not self.writable():
            return False
        if self.frame is None:
            self.frame = self.find()
            if self.frame is None:
                return False
        if not self.text.follows(token):
            return False
        self.tokens.append(token)
        before, after = self.frame
        self.exchange.write(before, string, after)
        return True
