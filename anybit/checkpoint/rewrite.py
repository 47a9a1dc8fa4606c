"""One checkpoint directory made into another, tensor by tensor, so that any size fits in memory.

Finished shards lie in `OUT.partial` beside a manifest that says what they were made from and how,
so a run that was killed goes on where it stopped. `OUT` appears, complete, at the end.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from anybit.checkpoint.card import write_card
from anybit.checkpoint.trial import try_out
from anybit.errors import InvalidInput
from anybit.files.directory import (
    check_absent,
    check_space,
    copy_others,
    disk_full,
    held,
    is_disk_full,
    move_directory,
    read_json,
    write_json,
)
from anybit.files.hub import located
from anybit.files.safetensors import INDEX, WEIGHTS, ShardWriter, Stored, read_header
from anybit.progress import progress
from anybit.version import __version__

SHARD_BYTES = 1 << 30  # of the source, in one file; a kill costs that much work at most
MANIFEST = "manifest.json"


class Source(Protocol):
    """A tensor of the source, or one that is made of it."""

    @property
    def file(self) -> Path:
        """Where it lies."""

    @property
    def nbytes(self) -> int:
        """Its bytes there."""

    def read(self) -> Tensor:
        """Its numbers."""


@dataclass(frozen=True)
class Rewrite(ABC):
    """What becomes of every tensor of a checkpoint, decided before any weight is read.

    Tensors that are read and written together are a unit: a layer by its name, and every other
    tensor by its own.

    Attributes:
        stored: The source's tensors by name.
        config: The source's config.json.
        shards: The output's files, and the units that each one holds.
        manifest: Names the source and all settings; an unfinished run goes on with the same only.
    """

    stored: Mapping[str, Source]
    config: Mapping[str, Any]
    shards: Mapping[str, list[str]]
    manifest: Mapping[str, Any]

    @property
    @abstractmethod
    def new_config(self) -> dict[str, Any]:
        """The config.json of the output."""

    @abstractmethod
    def outputs(self, units: list[str]) -> dict[str, int]:
        """Names and bytes of the tensors that units become."""

    @abstractmethod
    def write(self, unit: str, shard: ShardWriter) -> None:
        """Read, change and write one unit."""

    @property
    def quantized(self) -> list[tuple[str, tuple[int, int]]]:
        """Scheme and shape (N, K) of each layer that is quantized, for the model card."""
        return []

    @property
    def how(self) -> str:
        """The quantizer in words, for the model card."""
        return ""

    def try_out(self, directory: Path) -> None:
        """Raise InvalidInput when what was written cannot be read."""
        try_out(directory)

    def parts(self, unit: str) -> list[str]:
        """Names of the source's tensors that a unit is read from."""
        return [unit]

    def copy(self, name: str, shard: ShardWriter) -> None:
        """Write one of the source's tensors as it is."""
        stored = self.stored[name]
        if isinstance(stored, Stored):
            shard.copy(name, stored)
        else:
            shard.add(name, stored.read())

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(stored.nbytes for stored in self.stored.values())

    def nbytes(self, units: list[str]) -> int:
        """Bytes of the source that units are read from."""
        return sum(self.stored[name].nbytes for unit in units for name in self.parts(unit))

    def needed(self, shards: list[str]) -> int:
        """Bytes of output files."""
        return sum(size for path in shards for size in self.outputs(self.shards[path]).values())


def check_paths(model: str | os.PathLike[str], out: Path, overwrite: bool) -> Path:
    """Where the model is that `out` is to be written from: downloaded if `out` can be.

    Raises:
        FileExistsError: `out` exists.
        InvalidInput: It cannot be replaced, or not by what is made of this model.
    """
    check_absent(out, overwrite)
    source = located(model)
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
        raise InvalidInput(f"{out} would replace its own source {source}; choose another directory")
    return source


def partial_of(out: Path) -> Path:
    """Where an unfinished run keeps what it has done of `out`."""
    return out.with_name(out.name + ".partial")


def rewrite(
    work: Rewrite,
    source: Path,
    out: Path,
    overwrite: bool,
    title: str,
) -> tuple[int, int]:
    """Write all shards that are not there yet, then `out`.

    Args:
        work: What becomes of every tensor.
        source: The directory to read, whose other files are copied.
        out: The directory to write.
        overwrite: Replace a checkpoint in `out`, and an unfinished run of other settings.
        title: Of the progress bar.

    Returns:
        The bytes of all tensors written, and how many shards an earlier run had finished.

    Raises:
        InvalidInput: `OUT.partial` holds an unfinished run of other settings, or another run is
            writing into it.
        FileExistsError: `OUT.partial` holds something else.
        OSError: The disk is too small.
    """
    partial = partial_of(out)
    with held(partial):
        check_absent(out, overwrite)  # another run may have written it meanwhile
        begin(partial, work.manifest, overwrite)
        return write_shards(work, source, out, partial, title)


def write_shards(
    work: Rewrite, source: Path, out: Path, partial: Path, title: str
) -> tuple[int, int]:
    """As `rewrite`, when the directory of unfinished shards is there."""
    todo = [path for path in work.shards if not (partial / path).exists()]
    resumed = len(work.shards) - len(todo)
    try:
        check_space(partial, work.needed(todo))
        with progress(title, work.source_bytes) as step:
            for path, names in work.shards.items():
                if path not in todo:
                    step(work.nbytes(names), f"{path} is done")
                    continue
                with ShardWriter(partial / path, work.outputs(names)) as shard:
                    for name in names:
                        work.write(name, shard)
                        step(work.nbytes([name]), name)
        after = finish(partial, source, work)
        if work.quantized:
            write_card(partial, str(source), work.quantized, work.how)
        move_directory(partial, out)
        (out / MANIFEST).unlink()
    except BaseException as error:
        todo = [path for path in work.shards if not (partial / path).exists()]
        if len(todo) == len(work.shards):
            shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            kept = f"; finished shards are kept in {partial}" if partial.exists() else ""
            advice = f"{kept}; free some and run it again, or write to another disk"
            raise disk_full(out.parent, work.needed(todo), advice) from error
        raise
    return after, resumed


def begin(partial: Path, manifest: Mapping[str, Any], overwrite: bool) -> None:
    """Put a manifest into a directory, or go on with the run there if its manifest is the same."""
    path = partial / MANIFEST
    if path.is_file():
        old, new = read_json(path), json.loads(json.dumps(manifest))
        changed = [key for key in new if old.get(key) != new[key]]
        if changed and not overwrite:
            what = "; ".join(difference(key, old.get(key), new[key]) for key in changed)
            raise InvalidInput(
                f"{partial} holds an unfinished run that was started differently ({what}); "
                "go on with the same settings, or pass overwrite=True to start anew"
            )
        if not changed:
            for left in partial.glob("*.tmp"):
                left.unlink()
            return
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    else:
        check_unused(partial)
    write_json(path, manifest)


def check_unused(partial: Path) -> None:
    """FileExistsError when files of another kind lie where unfinished shards are to go."""
    if found := sorted(path.name for path in partial.iterdir() if path.suffix != ".tmp"):
        raise FileExistsError(
            f"{partial} is needed for unfinished shards, but is in use: it holds {found[0]}; "
            "finish the run that wrote it, move it, or choose another directory"
        )


def difference(key: str, old: Any, new: Any) -> str:
    """What changed between two manifests, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        changed = sorted(name for name in old | new if old.get(name) != new.get(name))
        return f"{key}: {', '.join(changed)} changed"
    return f"{key} was {old}, now {new}"


def finish(partial: Path, source: Path, work: Rewrite) -> int:
    """Write index, config.json and all other files; returns the bytes of all tensors."""
    tensors = {n: t for path in work.shards for n, t in read_header(partial / path).items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    if len(work.shards) > 1:
        where = {name: tensor.file.name for name, tensor in sorted(tensors.items())}
        write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(partial / "config.json", work.new_config)
    copy_others(source, partial)
    work.try_out(partial)
    return total


def fingerprint(source: Path, stored: Mapping[str, Source]) -> dict[str, list[int]]:
    """Size and time of change of every file that the output depends on."""
    config = source / "config.json"
    files = {*(tensor.file for tensor in stored.values()), *([config] * config.is_file())}
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(files)}


def manifest_of(
    source: Path, stored: Mapping[str, Source], shard_bytes: int, **settings: Any
) -> dict[str, Any]:
    """A manifest: the version, the settings, and the source by size and time of its files."""
    files = fingerprint(source, stored)
    return {"anybit": __version__, **settings, "source": files, "shard_bytes": shard_bytes}


def into_shards(
    stored: Mapping[str, Source], owner: Mapping[str, str], dropped: Container[str], limit: int
) -> dict[str, list[str]]:
    """Distribute units over files of at most `limit` bytes, or of one unit, in the source's order.

    Args:
        stored: The source's tensors.
        owner: Layers by the names of their tensors.
        dropped: Tensors that are left out.
        limit: Bytes of a file, as the source has them.

    Returns:
        Units by file name.
    """
    sizes = Counter[str]()
    for name, tensor in stored.items():
        if name not in dropped:
            sizes[owner.get(name, name)] += tensor.nbytes
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    total = len(shards)
    return {f"model-{i:05}-of-{total:05}.safetensors": s for i, s in enumerate(shards, 1)}
