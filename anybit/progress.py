"""Progress on long work: a bar with an ETA on a terminal, nothing elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    def __call__(self, amount: int, what: str = "") -> None:
        """`amount` more units are done; now at `what`."""


@contextmanager
def progress(title: str, total: int, show: bool | None = None) -> Iterator[Progress]:
    """Yield a function to call after each step. show=None: only when stderr is a terminal."""
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda amount, what="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", style="dim"),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, what="")

        def step(amount: int, what: str = "") -> None:
            bar.update(task, advance=amount, what=what)

        yield step
