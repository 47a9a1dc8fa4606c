"""What was found of a checkpoint, kept for the next start.

To read a config.json and the names of tensors takes transformers' classes of the model, and these
take seconds to import. So what has come of it, once a model was built, lies in the cache folder,
with all that it depends on: names, sizes and times of the directory's files, versions, and the
sources that read them. Where any of that differs, or a model's tensors have to be made of others,
the directory is read anew.
"""

import hashlib
import json
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from anybit.engine.weights import Reading
from anybit.files.directory import cache_folder, write_json
from anybit.files.safetensors import Stored
from anybit.kernels.cute.jit import folder_hash
from anybit.version import __version__

ROOM = Path(__file__).parents[1]
MOST = 100  # checkpoints of which something is kept: about 25 KB each
SETS = ("embeddings", "known", "certain")  # of a `Reading`
SOURCES = ("checkpoint", "checkpoint/foreign", "core", "engine", "engine/models", "files", "nn")


class Unkept(Exception):
    """There is something that JSON does not hold."""


def place(directory: Path) -> Path:
    """Where what is known of a directory lies."""
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]
    return cache_folder() / "checkpoints" / f"{name}.json"


def restored(directory: Path, formats: Any) -> tuple[Reading | None, str]:
    """What is known of a directory, if anything is, and the class of its tokenizer, if it has one.

    formats: as in `reading`.
    """
    try:
        facts = json.loads(place(directory).read_text(encoding="utf-8"))
        if facts["of"] != of(directory, facts["files"]):
            return None, ""
        parts = [Path(row[0]) for row in facts["stored"].values()]
        outside = any(part.is_absolute() or ".." in part.parts for part in parts)
        if outside or not of_transformers(facts["tokenizer"]):
            return None, ""
        kind: Any = type(facts["class"], (PretrainedConfig,), plain(facts["declared"]))
        config = object.__new__(kind)
        vars(config).update(plain(facts["config"]))
        stored = {
            name: Stored(directory / file, dtype, tuple(shape), start, nbytes)
            for name, (file, dtype, shape, start, nbytes) in facts["stored"].items()
        }
        sets = (set(facts[name]) for name in ("embeddings", "known", "certain"))
        embeddings, known, certain = sets
        return Reading(config, embeddings, stored, known, certain, formats or {}), facts[
            "tokenizer"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or damaged
        return None, ""


def keep(directory: Path, found: Reading, tokenizer: Any, before: list[Any]) -> None:
    """Keep what was found of a directory whose model could be built, if that can be kept.

    before: what `of` said, without files, when the reading began.
    """
    config, kind = found.config, type(tokenizer)
    name = "" if tokenizer is None else f"{kind.__module__}:{kind.__qualname__}"
    if not of_transformers(name) or of(directory, []) != before:
        return
    with suppress(OSError, ValueError, Unkept):
        stored: dict[str, list[Any]] = {}
        for each, tensor in found.stored.items():
            if not isinstance(tensor, Stored):
                raise Unkept
            stored[each] = [str(tensor.file.relative_to(directory)), *tensor[1:]]
        files = sorted({str(row[0]) for row in stored.values()})
        path = place(directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "of": of(directory, files),
            "files": files,
            "tokenizer": name,
            "stored": stored,
            "class": type(config).__name__,
            "declared": tagged(declared(config)),
            "config": tagged(vars(config)),
            **{each: sorted(getattr(found, each)) for each in SETS},
        }
        write_json(path, facts)
        every = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in every[:-MOST]:
            old.unlink(missing_ok=True)


def of_transformers(tokenizer: str) -> bool:
    """Whether a tokenizer's class, by name, is one of transformers', or there is none."""
    return not tokenizer or tokenizer.startswith("transformers.")


def forget(directory: Path) -> None:
    """Have a directory read anew."""
    place(directory).unlink(missing_ok=True)


def tokenizer_of(directory: Path, name: str) -> Any:
    """A directory's tokenizer, by the name of its class."""
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind).from_pretrained(directory)


def of(directory: Path, files: list[str]) -> list[Any]:
    """What a reading depends on: its directory's files, and some that may lie deeper.

    Of config.json the contents, since an image may give all its files one time.
    """
    here = {path.name for path in directory.iterdir() if path.is_file()}
    stats = {name: (directory / name).stat() for name in sorted(here | set(files))}
    sources = "".join(folder_hash(ROOM / folder) for folder in SOURCES)
    sources += (directory / "config.json").read_text(encoding="utf-8")
    return [
        __version__,
        version("transformers"),
        hashlib.sha256(sources.encode()).hexdigest(),
        [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()],
    ]


def declared(config: PretrainedConfig) -> dict[str, Any]:
    """What a configuration's class has beside its base: defaults, and what it computes."""
    out: dict[str, Any] = {}
    classes = type(config).__mro__
    for kind in reversed(classes[: classes.index(PretrainedConfig)]):
        for name, value in vars(kind).items():
            if name.startswith("__"):
                continue
            if isinstance(value, property):
                with suppress(AttributeError):
                    out[name] = getattr(config, name)
            elif not callable(value) and not isinstance(value, classmethod | staticmethod):
                out[name] = value
    return out


def tagged(value: Any) -> Any:
    """A value as JSON, which knows neither tuples nor keys other than texts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[tagged(key), tagged(each)] for key, each in value.items()]}
    for kind in (list, tuple, set):
        if type(value) is kind:
            return {kind.__name__: [tagged(each) for each in value]}
    raise Unkept


def plain(value: Any) -> Any:
    """What `tagged` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "dtype":
        return getattr(torch, inside)
    if kind == "dict":
        return {plain(key): plain(each) for key, each in inside}
    return {"list": list, "tuple": tuple, "set": set}[kind](plain(each) for each in inside)
