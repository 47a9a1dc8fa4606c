"""Commands that tell about a model, and about what anybit keeps."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from anybit.cli.group import check_outputs, listed
from anybit.progress import say


def info(
    model: Annotated[Path, Argument(help="A model: a directory, or ORG/NAME of the hub.")],
    formats: Annotated[
        str | None, Option("--format", help="Formats, separated by ';'. The usual if absent.")
    ] = None,
    device: Annotated[
        str | None, Option(help="GPUs, separated by ';': 'RTX 4090', l40s, h100, ...")
    ] = None,
    memory: Annotated[str | None, Option(help="Memory of another machine: 24GB.")] = None,
    context: Annotated[int, Option(min=1, help="Tokens of a sequence.")] = 4096,
    sequences: Annotated[int, Option(min=1, help="Sequences at the same time.")] = 1,
    json_file: Annotated[
        Path | None, Option("--json", help="Write all of it to this file as well.")
    ] = None,
) -> None:
    """Tell a model's size in each format, where it fits, and what runs it.

    Reads config.json and headers alone: of a model of the hub, the weights are not downloaded.
    """
    check_outputs(json_file)
    say(f"reading headers of {model}")
    from dataclasses import asdict

    from anybit.cli.info import DEVICES, FORMATS, show
    from anybit.cli.info import info as run
    from anybit.files.directory import write_json

    chosen = listed(formats, "--format", FORMATS), listed(device, "--device", DEVICES)
    found = run(model, *chosen, memory, context, sequences)
    show(found)
    if json_file:
        write_json(json_file, asdict(found))


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all of it.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Show what anybit keeps on this disk to be faster the next time, or clear it.

    The folder is $ANYBIT_CACHE, or ~/.cache/anybit. Models of the hub lie in its own cache, which
    `hf cache ls` shows.
    """
    from anybit.cli import cache as kept

    typer.echo(kept.show())
    if clear and (yes or typer.confirm("Remove all of it?")):
        typer.echo(kept.clear())
