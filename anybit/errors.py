"""Mistakes that are expected, as opposed to bugs: their message says the fact and the remedy.

Each class is also the builtin exception that it stands for, so `except ValueError` works. The
command line prints an `AnybitError` as one line; a bare ValueError, TypeError or RuntimeError is a
bug and keeps its traceback. What the operating system and the installation lack stays an OSError
(FileNotFoundError, ...) or an ImportError.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class AnybitError(Exception):
    """Base of every mistake that anybit expects."""


class InvalidInput(AnybitError, ValueError):
    """A value, shape, option, file or checkpoint is not what it must be."""


class InvalidType(AnybitError, TypeError):
    """An object or a tensor has the wrong type or dtype."""


class Unsupported(AnybitError, RuntimeError):
    """The request is valid, but not on this machine or in this state."""


def in_a_line(error: BaseException) -> str:
    """The kind of another library's error, and what it says."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_text(text: str) -> None:
    """InvalidInput for a text that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            "a text holds half of a surrogate pair, or bytes that are not UTF-8, which is no text"
        ) from None


@contextmanager
def loading(directory: object) -> Iterator[None]:
    """Turn a ValueError of transformers about a model directory into an `InvalidInput`."""
    try:
        yield
    except AnybitError:
        raise
    except ValueError as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidInput(f"{directory}: transformers cannot load it: {first}") from error
