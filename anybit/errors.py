"""Mistakes that are expected, as opposed to bugs: their message says the fact and the remedy.

Each class is also the builtin exception that it stands for, so `except ValueError` works. The
command line prints an `AnybitError` as one line; a bare ValueError, TypeError or RuntimeError is a
bug and keeps its traceback. What the operating system and the installation lack stays an OSError
(FileNotFoundError, ...) or an ImportError.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AnybitError(Exception):
    """Base of every mistake that anybit expects."""


class InvalidInput(AnybitError, ValueError):
    """A value, shape, option, file or checkpoint is not what it must be."""


class InvalidType(AnybitError, TypeError):
    """An object or a tensor has the wrong type or dtype."""


class Unsupported(AnybitError, RuntimeError):
    """The request is valid, but not on this machine or in this state."""


LONGEST = 400  # characters of what another library's error says


def in_a_line(error: BaseException) -> str:
    """The kind of an error, and what it says; what another library says at length is cut."""
    text = message(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def message(error: BaseException) -> str:
    """What an error says, without its kind; see `in_a_line`."""
    text = " ".join(str(error).split())
    whole = isinstance(error, AnybitError) or len(text) <= LONGEST
    return text if whole else text[:LONGEST] + "..."


def near(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word: known ones that look like it, if there are any."""
    import difflib

    found = difflib.get_close_matches(word.lower(), list(known), n=3)
    return f"; did you mean {', '.join(found)}" if found else ""


def check_text(text: str) -> None:
    """InvalidInput for a text that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            "a text holds half of a surrogate pair, or bytes that are not UTF-8, which is not text"
        ) from None


@contextmanager
def loading(directory: object) -> Iterator[None]:
    """Turn a ValueError of transformers about a model directory into an `InvalidInput`."""
    try:
        yield
    except AnybitError:
        raise
    except ValueError as error:
        raise InvalidInput(
            f"{directory}: transformers cannot load it: {in_a_line(error)}"
        ) from error


@contextmanager
def probing() -> Iterator[None]:
    """Run another package's code to see whether it works: a warning of it is no failure.

    Under `-W error` a deprecation would be raised there, and a model refused for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
