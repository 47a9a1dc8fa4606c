"""What users rely on is as tests/surface/ says: public names, and the options of commands.

A change on purpose: `python -m tests.test_surface` writes both files.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import anybit
from anybit.cli.app import app

FOLDER = Path(__file__).parent / "surface"


def said(default: Any) -> str:
    """A default, where it is the same everywhere: what stands for none is not."""
    if isinstance(default, Path):
        default = default.as_posix()
    return f"={default!r}" if isinstance(default, str | int | float) else ""


def names() -> Iterator[str]:
    """Public names with the parameters of calls, and the public attributes of our own classes."""
    for name in sorted(anybit.PUBLIC):
        found = getattr(anybit, name)
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            yield name
            continue
        parameters = inspect.signature(found).parameters.values()
        marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        listed = [f"{marks.get(p.kind, '')}{p.name}{said(p.default)}" for p in parameters]
        yield f"{name}({', '.join(listed)})"
        if inspect.isclass(found):
            ours = [c for c in found.__mro__ if c.__module__.startswith("anybit.")]
            for own in sorted({key for cls in ours for key in vars(cls) if key[0] != "_"}):
                yield f"    {own}"


def options() -> Iterator[str]:
    """Commands with their options, defaults, groups and help."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in sorted(commands.items()):
        yield f"anybit {name}: {' '.join(command.help.split())}"
        for p in command.params:
            group = getattr(p, "rich_help_panel", None)
            panel = f" [{group}]" if isinstance(group, str) else ""
            text = " ".join((getattr(p, "help", None) or "").split())
            yield f"    {' '.join(p.opts)}{said(p.default)}{panel}: {text}"


SURFACE: dict[str, Callable[[], Iterator[str]]] = {"names.txt": names, "options.txt": options}


@pytest.mark.parametrize("file", SURFACE)
def test_users_find_what_they_know(file: str) -> None:
    assert list(SURFACE[file]()) == (FOLDER / file).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    for file, lines in SURFACE.items():
        (FOLDER / file).write_text("\n".join(lines()) + "\n", encoding="utf-8")
