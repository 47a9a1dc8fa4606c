"""What commands that measure a running server share: its key, its first model, its absence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anybit.errors import InvalidInput

KEY = "ANYBIT_API_KEY"


def key_header(keys: str | None) -> dict[str, str]:
    """The header with the first of several keys, which the server's variable may hold."""
    key = next(iter((keys or "").split()), "")
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput("the API key holds characters that no header can")
    return {"Authorization": f"Bearer {key}"} if key else {}


def first_model(models: Any) -> dict[str, Any]:
    """The first model of /v1/models' answer; {} where that names none."""
    try:
        return {**models["data"][0], "id": str(models["data"][0]["id"])}
    except (KeyError, IndexError, TypeError):
        return {}


@contextmanager
def reached(url: str) -> Iterator[None]:
    """Inside, ConnectionError where no server answers at an address.

    Raises ImportError with the remedy where httpx is missing.
    """
    try:
        import httpx
    except ImportError:
        raise ImportError(
            f"asking {url} needs httpx; install it with: pip install 'anybit[serve]'"
        ) from None
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConnectionError(
            f"no server answers at {url} ({error or type(error).__name__}); start one with "
            "`anybit serve DIR`, and give its address as http://HOST:PORT"
        ) from None
