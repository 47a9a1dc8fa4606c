"""What a server may do and is called; front ends get it from the engine's process."""

from dataclasses import dataclass

LAST = 2.0  # seconds after the grace in which the last bytes may be sent
DYING = 1.0  # seconds in which front ends tell their clients that the engine has failed


@dataclass(frozen=True)
class Settings:
    """names: the model's, for clients. keys: one of which clients must send, if there are any.

    queue: texts that may wait, beyond those that run. queue_tokens: prompt tokens of all requests
    that have not ended. Beyond either, a request gets 503 with Retry-After. body: bytes of a
    request at most. grace: seconds that running requests have to finish at shutdown. patience:
    seconds that a client has for a request's head, for its body, and to read what waits for it.
    origins: web pages that may use the server from a browser; "*": all. tool_parser: the form of
    the model's tool calls, if its chat template does not tell it.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    queue: int = 256
    queue_tokens: int = 1 << 20
    body: int = 4 << 20
    grace: float = 30.0
    patience: float = 60.0
    retry_after: int = 1
    origins: tuple[str, ...] = ()
    tool_parser: str | None = None
