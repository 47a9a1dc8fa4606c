"""What all commands share: how a mistake is told, and what is checked before the work."""

import errno
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from anybit.errors import AnybitError
from anybit.progress import say

INTERRUPTED = 130
WORDS = {"overwrite=True": "--overwrite", "(None)": "(FORMAT none)"}  # of Python: of commands


class Commands(TyperGroup):
    """Commands that turn an expected mistake into one line and exit code 1.

    Expected are `AnybitError`, and what the operating system or the installation lacks. Anything
    else is a bug and keeps its traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:2] == ["bench", "serve"]:  # a server is benched like anything else
            args = ["bench-serve", *args[2:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning  # type: ignore[assignment]
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            typer.echo("; ".join(["\ninterrupted", *map(str, interrupt.args)]), err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (AnybitError, OSError, ImportError) as error:
            if os.environ.get("ANYBIT_DEBUG") or getattr(error, "errno", None) == errno.EPIPE:
                raise
            message = str(error)
            for word, own in WORDS.items():
                message = message.replace(word, own)
            typer.secho(f"error: {message}", fg="red", err=True)
            raise typer.Exit(1) from None


def show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """A warning as one line, without the place in the code that a program would be told."""
    typer.secho(f"warning: {message}", fg="yellow", err=True)


def check_outputs(*files: Path | None, plot: Path | None = None) -> None:
    """Raise what would else be raised when all is computed, and lost."""
    from anybit.files.directory import check_folder

    for file in files:
        if file:
            check_folder(file)
    if plot:
        from anybit.files.picture import check_picture

        check_picture(plot)


def listed(
    text: str | None, flag: str, default: Sequence[str] = (), separator: str = ";"
) -> list[str]:
    """What an option names; the default without the option."""
    if text is None:
        return [*default]
    found = [part.strip() for part in text.split(separator) if part.strip()]
    if not found:
        raise typer.BadParameter("names nothing; leave the option out", param_hint=flag)
    return found


def no_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that were given another value than their default, and would be ignored."""
    params = {param.name: param for param in context.command.params}
    for name in names:
        param, source = params[name], context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and context.params[name] != param.get_default(context):
            raise typer.BadParameter(f"has no effect {why}", param_hint=param.opts[0])


@contextmanager
def pushing(out: Path, repository: str | None) -> Iterator[None]:
    """Push what is written inside to the hub; what would keep it from that is told before.

    Raises:
        InvalidInput: The name is none, or there is no token that the hub knows.
        Unsupported: The hub cannot be reached, or does not take it.
    """
    if repository is not None:
        from anybit.files.hub import check_push, push

        check_push(repository)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept(out)) from None
    if repository is None:
        return
    say(f"pushing {out} to {repository}")
    typer.echo(push(out, repository))


def kept(out: Path) -> str:
    """What an interrupted run that writes OUT has left, in words."""
    from anybit.checkpoint.rewrite import partial_of

    partial = partial_of(out)
    if partial.is_dir() and any(partial.iterdir()):
        return f"{partial} keeps what is done: the same command goes on from there"
    return "nothing is kept"


def examples(*lines: str, title: str = "Examples") -> str:
    """An epilog that shows what to type; the leading backspace keeps its line breaks."""
    return "\n".join(["\b", f"[bold]{title}[/]", *(f"$ [cyan]{line}[/]" for line in lines)])
