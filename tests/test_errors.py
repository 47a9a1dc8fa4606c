"""Expected mistakes are anybit's own exceptions, so that a bare one is a bug."""

import ast
from pathlib import Path

import pytest

import anybit
from anybit.errors import (
    LONGEST,
    AnybitError,
    InvalidInput,
    InvalidType,
    Unsupported,
    in_a_line,
)

PACKAGE = Path(anybit.__file__).parent


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(InvalidInput, ValueError), (InvalidType, TypeError), (Unsupported, RuntimeError)],
)
def test_each_is_also_the_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, AnybitError)
    assert issubclass(error, builtin)


def test_no_mistake_is_a_bare_builtin() -> None:
    bare = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("ValueError", "TypeError")
    ]
    assert bare == [], "raise InvalidInput or InvalidType of anybit.errors instead"


def test_errors_in_a_line() -> None:
    """Ours are whole, since they end with the remedy; a mark shows where another's is cut."""
    long = "a fact\n and " * 99
    words = " ".join(long.split())
    assert in_a_line(KeyError()) == "KeyError"
    assert in_a_line(RuntimeError("two\n  lines")) == "RuntimeError: two lines"
    assert in_a_line(RuntimeError(long)) == f"RuntimeError: {words[:LONGEST]}..."
    assert in_a_line(RuntimeError("x" * LONGEST)) == f"RuntimeError: {'x' * LONGEST}"
    assert in_a_line(Unsupported(long)) == f"Unsupported: {words}"
