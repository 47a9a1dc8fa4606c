"""A field of `EngineConfig` is an argument of `LLM`, an option of commands, and documented."""

import inspect
from dataclasses import fields

import typer

from anybit.cli.app import app
from anybit.engine.config import EngineConfig, texts
from anybit.engine.llm import LLM

FIELDS = {field.name: field for field in fields(EngineConfig)}


def test_every_field_is_an_argument_and_has_a_text() -> None:
    arguments = dict(inspect.signature(LLM).parameters)
    assert [*arguments] == [*texts()] == [*FIELDS]
    assert all(
        p.default == FIELDS[name].default for name, p in arguments.items() if name != "model"
    )


def test_fields_with_a_group_are_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {p.name: p for p in commands["serve"].params}
    for name, field in FIELDS.items():
        if field.metadata:
            found = options[name]
            assert found.rich_help_panel == field.metadata["group"]
            assert found.help.split() == texts()[name].split("\n\n")[0].split()
