"""What some tests cannot run without: elsewhere they are skipped, in CI nothing is."""

import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.util import find_spec
from itertools import product
from typing import TypeVar

import pytest

EVERY_KERNEL = "ANYBIT_TEST_EVERY_KERNEL" in os.environ  # emulate all, not a few of each kind
PART = os.environ.get("ANYBIT_TEST_PART", "1/1")  # which of how many parts of the tests run
COMPILERS = {"triton": "gpu", "cutlass": "hopper"}  # module, and the extra that installs it
A = TypeVar("A")
B = TypeVar("B")


def pairs(first: Sequence[A], second: Sequence[B], each: int = 1) -> list[tuple[A, B]]:
    """All pairs, or, without EVERY_KERNEL, each of `first` with `each` of `second`, in turn.

    Each turn begins one further, so that what repeats in `first` does not meet the same again.
    """
    if EVERY_KERNEL or each >= len(second):
        return list(product(first, second))
    return [
        (a, second[(i + i // len(second) + n) % len(second)])
        for i, a in enumerate(first)
        for n in range(each)
    ]


def first_of(cases: Iterable[A], parts: Callable[[A], Iterable[Hashable]]) -> list[A]:
    """The cases that have a part which none before them has; all with EVERY_KERNEL."""
    cases, seen = list(cases), set[Hashable]()
    return [
        case
        for case in cases
        if EVERY_KERNEL or (not seen.issuperset(found := [*parts(case)]) and not seen.update(found))
    ]


def in_part(name: str) -> bool:
    """Whether a test is one of this run's part, by a hash of its name."""
    part, parts = map(int, PART.split("/"))
    return zlib.crc32(name.encode()) % parts == part - 1


def check_compilers() -> None:
    """Refuse to run tests in CI (`CI=true`) where a compiler of kernels is missing.

    Raises:
        pytest.UsageError: One is.
    """
    if os.environ.get("CI") != "true":
        return
    for module, extra in COMPILERS.items():
        if find_spec(module) is None:
            raise pytest.UsageError(
                f"CI=true, and {module} is missing, without which tests would be skipped: "
                f"pip install 'anybit[{extra}]'"
            )
