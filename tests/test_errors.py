"""Expected mistakes are anybit's own exceptions, so that a bare one is a bug."""

import ast
from pathlib import Path

import pytest

import anybit
from anybit.errors import AnybitError, InvalidInput, InvalidType, Unsupported

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
