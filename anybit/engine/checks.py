"""What the fields of `SamplingParams` may be: each is checked, and made what it stands for."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from numbers import Real
from operator import index
from typing import Any

from anybit.engine.structured import Structured
from anybit.errors import InvalidInput, InvalidType, message

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_SEED = 2**64 - 1

Check = Callable[[str, Any], Any]  # from a field's name and value to the value that is meant


def wrong(name: str, value: object, want: str) -> InvalidType:
    """What to raise for a value of the wrong type."""
    shown = message(Exception(repr(value)))  # in a line, which may be cut
    return InvalidType(f"{name}={shown} is of type {type(value).__name__}; give {want}")


def integer(name: str, value: Any, want: str = "an integer") -> int:
    """An integer, also NumPy's; no bool, and no float."""
    try:
        if not isinstance(value, bool) and not getattr(value, "shape", ()):
            return index(value)
    except TypeError:  # a tensor's or an array's of floats, too
        pass
    raise wrong(name, value, want)


def number(name: str, value: Any) -> float:
    """A real number, also NumPy's."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds is out of every range
        return math.inf


def whole(least: int, most: int | None, want: str, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        value = integer(name, value, "an integer, or None" if optional else "an integer")
        if value < least or (most is not None and value > most):
            raise InvalidInput(f"{name}={value} is out of range: {want}")
        return value

    return check


def real(want: str, inside: Callable[[float], bool]) -> Check:
    def check(name: str, value: Any) -> float:
        value = number(name, value)
        if not inside(value):
            raise InvalidInput(f"{name}={value!r} is out of range: {want}")
        return value

    return check


def instance(kind: type, want: str, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> Any:
        if isinstance(value, kind) or (value is None and optional):
            return value
        raise wrong(name, value, want)

    return check


def items(name: str, value: Any, want: str) -> list[Any]:
    """A list of what can be listed; None is an empty one."""
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable | None):
        raise wrong(name, value, want)
    return [] if value is None else list(value)


def tokens(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        raise wrong(name, value, "a list of token ids")
    return tuple(integer(name, token) for token in items(name, value, "a list of token ids"))


def strings(name: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else items(name, value, "a string, or a list of them")
    for string in found:
        if not isinstance(string, str):
            raise wrong(name, string, "strings")
        if not string:
            raise InvalidInput(
                f"{name}={found!r} is out of range: strings of at least one character"
            )
    return tuple(found)


def biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping | None):
        raise wrong(name, value, "a dict of biases by token id")
    found = {integer(name, token): number(name, bias) for token, bias in (value or {}).items()}
    if not all(-100 <= bias <= 100 for bias in found.values()):
        raise InvalidInput(f"{name}={found!r} is out of range: biases from -100 to 100")
    return found


def checked(check: Check, default: Any) -> Any:
    """A field of a dataclass, whose values are what `check` makes of those given."""
    return field(default=default, metadata={"check": check})


FLAG = instance(bool, "True or False")
LOGPROBS = whole(0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None", optional=True)
PENALTY = real("-2 to 2", lambda x: -2 <= x <= 2)
STRUCTURED = instance(Structured, "a Structured, such as Structured(json=...)", optional=True)
