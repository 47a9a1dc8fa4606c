"""What the engine's process and its front ends tell each other, over a socket pair of each.

The engine sends one message a step to each front end that it has something for. A message is a
msgpack array behind its length. A front end may trust the engine's process, which has started it.
"""

import socket
from collections.abc import Iterator

import msgspec

from anybit.engine.sequence import Logprob, SamplingParams
from anybit.engine.structured import Tried

MOST = 256 << 20  # bytes that may wait for a front end
PIECE = 1 << 18  # bytes that are received at once


class Message(msgspec.Struct, array_like=True):
    """The base of all of them."""


# From a front end.


class Add(Message, tag="add"):
    """Requests that are served all or not at all. first: the number of the first text.

    Texts of a request have numbers in a row, and so have requests. arrival: by the monotonic clock,
    which processes share. tried: the grammar of each request that has one.
    """

    first: int
    requests: list[tuple[list[int], SamplingParams, Tried | None]]
    arrival: float


class End(Message, tag="end"):
    """A text, of a request that is named by its first text, has ended by what it says."""

    request: int
    index: int
    reason: str


class Abort(Message, tag="abort"):
    """Nobody wants the rest of these requests."""

    requests: list[int]


class Ready(Message, tag="ready"):
    """The front end answers."""


class Broken(Message, tag="broken"):
    """The front end cannot start, and ends."""

    reason: str


class Ask(Message, tag="ask"):
    """Metrics are wanted."""

    number: int


class Times(Message, tag="times"):
    """Counts by buckets and sums of seconds, by the names of histograms, since the last ones."""

    seen: dict[str, tuple[list[int], float]]


# From the engine.


class Hello(Message, tag="hello"):
    """Everything that a front end needs to know, pickled."""

    facts: bytes


class More(Message, omit_defaults=True):
    """What a step says of a text besides a token. at: the text's place in the step's lists."""

    at: int
    finish: str | None = None
    stop_reason: int | None = None
    silent: bool = False
    error: str = ""
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob | None] | None = None
    embedding: list[float] | None = None


class Step(Message, tag="step"):
    """What a step has added: texts by number, and a token of each, or -1.

    admitted, refused: what has become of `Add`s, by `first`; refused with a status and the reason.
    sent: by the monotonic clock.
    """

    texts: list[int]
    tokens: list[int]
    more: list[More]
    admitted: list[int]
    refused: list[tuple[int, int, str]]
    sent: float


class Told(Message, tag="told"):
    """The metrics that were asked for."""

    number: int
    text: bytes


class State(Message, tag="state"):
    """preparing: whether steps are still being recorded."""

    preparing: bool


class Stop(Message, tag="stop"):
    """Finish within so many seconds what has begun, and end."""

    grace: float


class Failed(Message, tag="failed"):
    """The engine has failed, and its process ends."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
FromFront = Add | End | Abort | Ready | Broken | Ask | Times
FromEngine = Hello | Step | Told | State | Stop | Failed
from_front = msgspec.msgpack.Decoder(FromFront).decode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def framed(message: Message) -> bytes:
    """A message as it is sent."""
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


class Frames:
    """Takes bytes as they arrive, and gives messages that are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        at, end = 0, len(self._buffer)
        while end - at >= 4:
            to = at + 4 + int.from_bytes(self._buffer[at : at + 4], "little")
            if to > end:
                break
            yield bytes(self._buffer[at + 4 : to])
            at = to
        del self._buffer[:at]


class Channel:
    """The engine's end: never waits for a front end, whatever that does."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock, self._frames, self._unsent = sock, Frames(), bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def waits(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, now or when there is room (`flush`).

        Raises:
            OSError: The other end is gone, or has not read for too long.
        """
        self._unsent += framed(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > MOST:
                raise BrokenPipeError("it reads nothing") from None

    def receive(self) -> list[FromFront]:
        """The messages that have arrived.

        Raises:
            OSError: The other end is gone.
        """
        out: list[FromFront] = []
        while True:
            try:
                data = self.sock.recv(PIECE)
            except BlockingIOError:
                return out
            if not data:
                raise BrokenPipeError("it has ended")
            out += map(from_front, self._frames.feed(data))
            if len(data) < PIECE:
                return out


def hello(sock: socket.socket) -> bytes | None:
    """What the engine says first, for which a front end waits; None if the engine has ended."""
    sock.setblocking(True)
    head = sock.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    data = sock.recv(size, socket.MSG_WAITALL)
    while 0 < len(data) < size:  # a signal may cut it
        more = sock.recv(size - len(data), socket.MSG_WAITALL)
        if not more:
            return None
        data += more
    message = from_engine(data) if data else None
    return message.facts if isinstance(message, Hello) else None
