"""Launches that `anybit tune` found fastest on this machine's GPU; they come before the rules."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from anybit.core.format import Format
from anybit.core.scheme import scheme_name
from anybit.errors import InvalidInput
from anybit.files.directory import cache_folder, write_json
from anybit.kernels.backend import COUNTS
from anybit.version import __version__

C = TypeVar("C", bound=Callable[..., Any])


class Named(Protocol):
    """A way to multiply."""

    @property
    def name(self) -> str:
        """What tells it from the others for a layer."""


W = TypeVar("W", bound=Named)


class Cell(NamedTuple):
    """Whose launches are compared: those of a backend for a layer, and a dtype of activations."""

    backend: str
    scheme: str
    dtype: str
    n: int
    k: int


class Winner(NamedTuple):
    """The fastest launch, by its backend's name for it, of those for up to `most` tokens."""

    most: int
    launch: str

    def near(self, m: int) -> bool:
        """Whether it speaks for m tokens where no model compares launches: at most four times."""
        return self.most <= 4 * m


Tuned = dict[Cell, list[Winner]]  # in rising order
_caches: list[Any] = []


def tuned_file(gpu: str) -> Path:
    """Where the launches of a GPU lie, by its name as the driver gives it."""
    return cache_folder() / f"tiles-{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


def cached(function: C) -> C:
    """`lru_cache` for what follows from tuned launches: `save` makes it forget."""
    made: Any = lru_cache(COUNTS)(function)
    _caches.append(made)
    return made


def forget() -> None:
    for each in _caches:
        each.cache_clear()


def save(gpu: str, found: Tuned) -> Path:
    """Put some cells into the GPU's file."""
    path = tuned_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.parent):
        forget()  # others may have written
        rows = [
            cell._asdict() | winner._asdict()
            for cell, winners in (load(gpu) | found).items()
            for winner in winners
        ]
        write_json(path, {"version": __version__, "gpu": gpu, "launches": rows})
    forget()
    return path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait for all others that are in here with the same folder. On Windows, nobody waits."""
    if os.name == "nt":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@cached
def load(gpu: str) -> Tuned:
    """The launches of a GPU; none when the file is absent, or of another version of anybit.

    Raises ValueError for a file that is no such list.
    """
    path = tuned_file(gpu)
    if not path.exists():
        return {}
    out: Tuned = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data.get("launches", ()) if data["version"] == __version__ else ():
            cell = Cell(*(row[name] for name in Cell._fields))
            out.setdefault(cell, []).append(Winner(int(row["most"]), row["launch"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it, and run `anybit "
            "tune` again"
        ) from None
    return {cell: sorted(winners) for cell, winners in out.items()}


def cell_of(
    backend: str, fmt: Format, activation: str | None, dtype: torch.dtype, n: int, k: int
) -> Cell:
    """The cell of a layer. dtype: of y."""
    name = str(dtype).removeprefix("torch.")
    return Cell(backend, scheme_name(fmt, activation), name, n, k)


def winner(cell: Cell, m: int, device: torch.device) -> Winner | None:
    """What is tuned for m tokens or the next larger number, or None."""
    if device.type != "cuda":
        return None
    winners = load(torch.cuda.get_device_name(device)).get(cell, ())
    return next((found for found in winners if m <= found.most), None)


def fastest(
    ways: Callable[[int], Iterable[tuple[float, W]]], m: int, found: Winner | None
) -> W | None:
    """Of all ways for m tokens the one of the least time; None where there is none.

    Between numbers of tokens that were timed, a winner is taken as long as the model ranks it no
    worse than it did there: by so much the model was wrong.

    Args:
        ways: For a number of tokens, with the times that a model gives them.
        m: Tokens.
        found: What was fastest for these or some more tokens.
    """
    here = list(ways(m))
    least, best = min(here, key=itemgetter(0), default=(0.0, None))
    if found is None:
        return best
    there = list(ways(found.most))
    now = [(time, way) for time, way in here if way.name == found.launch]
    then = [time for time, way in there if way.name == found.launch]
    if now and then and now[0][0] / least <= then[0] / min(time for time, _ in there):
        return now[0][1]
    return best
