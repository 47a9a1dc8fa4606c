"""The Containerfile: what it copies and installs is there, and what it runs parses."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from anybit.cli.app import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Containerfile").read_text()
KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """Names and arguments, with continued lines joined."""
    lines = re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return [(name, rest.strip()) for name, _, rest in pairs]


def arguments(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def test_it_is_made_of_known_instructions_and_what_it_copies_is_there() -> None:
    assert {name for name, _ in instructions()} <= KNOWN
    assert instructions()[0][0] == "FROM"
    for line in arguments("COPY"):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    for line in arguments("RUN"):
        shlex.split(line)
        assert line.count("(") == line.count(")")
    assert arguments("USER") == ["1000"]  # not root


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"EXTRAS=([\w,]+)", TEXT)
    assert len(named) == 2
    for text in named:
        assert set(text.split(",")) <= extras.keys()


@pytest.mark.parametrize(
    "given", [["--help"], *re.findall(r"^#   podman run .* anybit (\S+ .*)$", TEXT, re.M)]
)
def test_what_it_runs_parses(given: str | list[str]) -> None:
    program, command, *args = json.loads(arguments("ENTRYPOINT")[0])
    assert program == "anybit"
    serve = typer.main.get_command(app).commands[command]
    rest = given if isinstance(given, list) else given.split()
    if rest == ["--help"]:
        assert json.loads(arguments("CMD")[0]) == rest
        return
    context = serve.make_context(command, [*args, *rest])
    assert context.params["host"] == "0.0.0.0"
    assert str(context.params["model"]) == rest[0]
    assert context.params["port"] == int(arguments("EXPOSE")[0])
