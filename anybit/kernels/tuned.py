"""Tiles that `anybit tune` found on this machine's GPU; they come before the shipped rules."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from anybit.errors import InvalidInput
from anybit.files.directory import cache_folder, write_json
from anybit.kernels.backend import COUNTS
from anybit.kernels.mma.tiles import Tile as MmaTile
from anybit.kernels.triton.tiles import Tile as TritonTile
from anybit.version import __version__

FAMILIES = {"mma": MmaTile, "triton": TritonTile}  # backends that are tuned, best first
Tile = MmaTile | TritonTile
T = TypeVar("T", MmaTile, TritonTile)
C = TypeVar("C", bound=Callable[..., Any])
Cell = tuple[str, int, int]  # scheme, N, K
Tuned = dict[Cell, list[tuple[int, Tile]]]  # most tokens of a tile's range, in rising order
_caches: list[Any] = []


def tuned_file(gpu: str) -> Path:
    """Where the tiles of a GPU lie, by its name as the driver gives it."""
    return cache_folder() / f"tiles-{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


def cached(function: C) -> C:
    """`lru_cache` for what follows from tuned tiles: `save` makes it forget."""
    made: Any = lru_cache(COUNTS)(function)
    _caches.append(made)
    return made


def forget() -> None:
    for each in _caches:
        each.cache_clear()


def save(gpu: str, tiles: Tuned) -> Path:
    """Add the tiles of some cells to the GPU's file, in the place of their family's."""
    path = tuned_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.parent):
        forget()  # others may have written
        _add(gpu, tiles, path)
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


def _add(gpu: str, tiles: Tuned, path: Path) -> None:
    merged = dict(load(gpu))
    for cell, found in tiles.items():
        fresh = {type(tile) for _, tile in found}
        kept = [row for row in merged.get(cell, ()) if type(row[1]) not in fresh]
        merged[cell] = [*kept, *found]
    names = {kind: name for name, kind in FAMILIES.items()}
    cells = [
        {"scheme": s, "n": n, "k": k, "m": m, "backend": names[type(tile)], "tile": asdict(tile)}
        for (s, n, k), found in merged.items()
        for m, tile in found
    ]
    unfinished = path.with_suffix(f".{os.getpid()}")
    write_json(unfinished, {"version": __version__, "gpu": gpu, "tiles": cells})
    os.replace(unfinished, path)


@cached
def load(gpu: str) -> Tuned:
    """The tiles of a GPU; none when the file is absent, or of another version of anybit.

    Raises ValueError for a file that is no such list.
    """
    path = tuned_file(gpu)
    if not path.exists():
        return {}
    out: Tuned = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for cell in data["tiles"] if data["version"] == __version__ else ():
            key = (cell["scheme"], cell["n"], cell["k"])
            tile = FAMILIES[cell["backend"]](**cell["tile"])
            out.setdefault(key, []).append((cell["m"], tile))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it, and run `anybit "
            "tune` again"
        ) from None
    return {key: sorted(found, key=lambda row: row[0]) for key, found in out.items()}


def tile_for(kind: type[T], gpu: str, scheme: str, m: int, n: int, k: int) -> T | None:
    """The tile of this kind tuned for the next larger number of tokens, or None."""
    found = load(gpu).get((scheme, n, k), ())
    tiles = (tile for most, tile in found if m <= most and isinstance(tile, kind))
    return next(tiles, None)
