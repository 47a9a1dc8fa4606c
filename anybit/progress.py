"""Progress on long work: a bar on a terminal; in a log, if asked for, a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

SECONDS = 10.0  # between two lines of a log

_shown: ContextVar[bool | None] = ContextVar("shown", default=None)  # as `progress` takes it
_lines = False  # whether work without a terminal prints lines; commands do, the library does not


class Progress(Protocol):
    def __call__(self, amount: int, what: str = "") -> None:
        """`amount` more units are done; now at `what`."""


def print_lines() -> None:
    """From now on, print progress to stderr without a terminal, too: one line in ten seconds."""
    global _lines
    _lines = True


def say(text: str) -> None:
    """A line on stderr about what begins now, if progress is printed at all."""
    if _lines or sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


class Parts:
    """How long the parts of a start have taken, for a line of a server's log."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """What was done since the part before was this one."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    @property
    def whole(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self.begun

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())


START = Parts()


@contextmanager
def shown(show: bool | None) -> Iterator[None]:
    """What `progress` does inside, unless it is told."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def progress(title: str, total: int, show: bool | None = None) -> Iterator[Progress]:
    """Yield a function to call after each step.

    Args:
        title: What is being done.
        total: Units of work.
        show: False for silence, True for a bar; None for a bar on a terminal, and else for lines,
            if `print_lines` was called.
    """
    show = _shown.get() if show is None else show
    if show is None and not sys.stderr.isatty() and _lines:
        yield _Lines(title, total)
    elif show or (show is None and sys.stderr.isatty()):
        with _bar(title, total) as step:
            yield step
    else:
        yield lambda amount, what="": None


class _Lines:
    """Prints the share that is done, and the time that is left, every `SECONDS`."""

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, max(total, 1), 0
        self.start = self.last = time.monotonic()
        print(title, file=sys.stderr, flush=True)

    def __call__(self, amount: int, what: str = "") -> None:
        self.done += amount
        now = time.monotonic()
        if self.done and (now - self.last >= SECONDS):
            self.last = now
            left = (now - self.start) * (self.total - self.done) / self.done
            at = f", at {what}" if what else ""
            line = f"{self.title}: {self.done / self.total:.0%}, about {left:.0f} s left{at}"
            print(line, file=sys.stderr, flush=True)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Progress]:
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
