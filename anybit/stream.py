"""Quantize a checkpoint of any size without ever holding the model: one tensor at a time.

Finished shards lie in `OUT.partial` beside a manifest that says what they were made from and how,
so a run that was killed goes on where it stopped. `OUT` appears, complete, at the end.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit import __version__
from anybit.dispatch import parse_scheme
from anybit.experts import published, published_tensors, split
from anybit.files import (
    INDEX,
    WEIGHTS,
    ShardWriter,
    Stored,
    check_absent,
    check_space,
    copy_others,
    disk_full,
    is_disk_full,
    megabytes,
    move_directory,
    read_header,
    read_json,
    write_json,
)
from anybit.format import tensor_shapes
from anybit.linear import check_finite
from anybit.progress import progress
from anybit.quantize import Plan, Spec, plan_of, quantization_config
from anybit.quantizers.rtn import RTN

SHARD_BYTES = 1 << 30  # of the source, in one file; a kill costs that much work at most
MANIFEST = "manifest.json"
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` did.

    schemes: quantized layers and their formats. kept: tensors copied as they are, and of these
    strangers: those that fit no parameter of the model. unmatched: linear layers that should be
    quantized, but that the checkpoint does not store under their own name. resumed: shards that an
    earlier run had finished.
    """

    out: Path
    schemes: Mapping[str, str]
    kept: tuple[str, ...]
    strangers: tuple[str, ...]
    unmatched: tuple[str, ...]
    weights: int
    bytes_before: int
    bytes_after: int
    shards: int
    resumed: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.out}: {len(self.schemes)} layers with {self.weights / 1e6:.4g} million weights "
            f"quantized, {len(self.kept)} tensors kept; {megabytes(self.bytes_before)} -> "
            f"{megabytes(self.bytes_after)} in {self.seconds:.3g} s"
        )


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    spec: Spec | Plan,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool | None = None,
) -> Report:
    """Quantize a transformers checkpoint in safetensors from one directory to another, by RTN.

    spec: as in `quantize_`, with the same result. Peak memory is that of the imports (0.5 GB) and
        a few copies of the largest tensor, whatever the size of the model. The tokenizer and other
        files are copied.
    overwrite: replace a checkpoint in `out`, and an unfinished run of other formats or source.
    shard_bytes: how much of the source goes into one file, which is what a kill may cost.

    Raises FileExistsError when `out` exists; FileNotFoundError and ValueError for a source that is
    incomplete, damaged or quantized already; ValueError as `quantize_` does, and for an unfinished
    run in `OUT.partial` that was started differently; OSError when the disk is too small.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out).absolute()
    check_absent(out, overwrite)
    if source.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} would replace its own source {source}; choose another directory")
    work = plan_work(source, spec, shard_bytes)
    after, resumed = run(work, source, out, overwrite, show_progress)
    return Report(
        out=out,
        schemes={name.removesuffix(".weight"): s for name, s in work.schemes.items()},
        kept=tuple(name for name in work.stored if name not in work.schemes),
        strangers=work.strangers,
        unmatched=work.unmatched,
        weights=sum(math.prod(work.stored[name].shape) for name in work.schemes),
        bytes_before=work.source_bytes,
        bytes_after=after,
        shards=len(work.shards),
        resumed=resumed,
        seconds=time.monotonic() - started,
    )


# What is to be done.


@dataclass(frozen=True)
class Work:
    """A plan resolved against a checkpoint: which tensor becomes what, and in which file."""

    stored: Mapping[str, Stored]
    config: Mapping[str, Any]  # config.json
    formats: Mapping[str, str | None]
    schemes: Mapping[str, str]  # of tensors, by name
    shards: Mapping[str, list[str]]  # file -> names of the source's tensors
    manifest: Mapping[str, Any]
    strangers: tuple[str, ...]
    unmatched: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored.values())

    @property
    def new_config(self) -> dict[str, Any]:
        """The config.json of the output."""
        return {**self.config, "quantization_config": quantization_config(self.formats)}

    def nbytes(self, name: str) -> int:
        """Bytes of the source that `write(name)` reads."""
        return self.stored[name].nbytes

    def outputs(self, names: list[str]) -> dict[str, int]:
        """Names and bytes of the tensors that tensors of the source become."""
        each = (outputs(name, self.stored[name], self.schemes.get(name)) for name in names)
        return {name: size for part in each for name, size in part.items()}

    def needed(self, shards: list[str]) -> int:
        """Bytes of output files."""
        return sum(size for path in shards for size in self.outputs(self.shards[path]).values())

    def write(self, name: str, shard: ShardWriter) -> None:
        """Quantize or copy one tensor of the source."""
        stored, scheme = self.stored[name], self.schemes.get(name)
        if scheme is None:
            shard.copy(name, stored)
            return
        weight = stored.read()
        check_finite(weight, name)
        packed = RTN().quantize(weight, parse_scheme(scheme)[0])
        for key, tensor in packed.tensors().items():
            shard.add(f"{name.removesuffix('weight')}{key}", tensor)


def plan_work(source: Path, spec: Spec | Plan, shard_bytes: int) -> Work:
    """Read headers and config.json, and decide everything before any weight is touched."""
    from anybit.integrations.transformers import linear_schemes

    stored, config = published_tensors(source), read_json(source / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise ValueError(f"{source} is quantized already, with {method}; start from the dense one")
    model, model_type = skeleton(source), config.get("model_type")
    schemes, unmatched = {}, []
    for layer, scheme in linear_schemes(model, spec).items():
        name = published(f"{layer}.weight", model_type)
        if name not in stored:
            unmatched.append(layer)
            continue
        shape, dtype = tuple(model.get_parameter(f"{layer}.weight").shape), stored[name].torch_dtype
        if stored[name].shape != shape or dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name}: config.json asks for floats of shape {shape}, {stored[name].file.name} "
                f"holds {stored[name].dtype} of {stored[name].shape}"
            )
        schemes[name] = scheme
    if not schemes:
        raise ValueError(
            f"{source}: no tensor is named after a linear layer of {type(model).__name__}; "
            f"layers are named like {unmatched[0]!r}, tensors like {next(iter(stored))!r}"
        )
    known = {published(name, model_type) for name in model.state_dict()}
    strangers = tuple(name for name in stored if name not in known)
    for names, what in (
        (unmatched, "layers are stored under other names, and stay as they are"),
        (strangers, "tensors fit no parameter of the model, and stay as they are"),
    ):
        if names:
            log.warning("%s: %d %s: %s, ...", source, len(names), what, ", ".join(names[:3]))
    formats = plan_of(spec) | dict.fromkeys(unmatched)
    manifest = {
        "anybit": __version__,
        "formats": [list(pair) for pair in formats.items()],
        "source": fingerprint(source, stored),
        "shard_bytes": shard_bytes,
    }
    shards = into_shards({name: tensor.nbytes for name, tensor in stored.items()}, shard_bytes)
    return Work(stored, config, formats, schemes, shards, manifest, strangers, tuple(unmatched))


def skeleton(source: Path) -> nn.Module:
    """The model that config.json describes, on the meta device: names and shapes, no memory.

    Its experts are linear layers of their own, as anybit stores them.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    name = (config.architectures or [""])[0]
    with torch.device("meta"):
        if hasattr(transformers, name):
            model: nn.Module = getattr(transformers, name)(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    return split(model)


def outputs(name: str, stored: Stored, scheme: str | None) -> dict[str, int]:
    """Names and bytes of the tensors that one of the source becomes."""
    if scheme is None:
        return {name: stored.nbytes}
    sizes = tensor_shapes(parse_scheme(scheme)[0], (stored.shape[0], stored.shape[1]))
    return {
        f"{name.removesuffix('weight')}{key}": math.prod(shape)
        * (entry.default_dtype if entry else torch.int32).itemsize
        for key, (shape, entry) in sizes.items()
    }


def into_shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names -> files of at most `limit` bytes, or of one tensor, in the given order."""
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


def unit_sizes(
    stored: Mapping[str, Stored], owner: Mapping[str, str], dropped: Container[str]
) -> dict[str, int]:
    """Bytes of what is written at once, in the source's order: tensors, and layers (`owner`)."""
    out: dict[str, int] = {}
    for name, tensor in stored.items():
        if name not in dropped:
            unit = owner.get(name, name)
            out[unit] = out.get(unit, 0) + tensor.nbytes
    return out


def fingerprint(source: Path, stored: Mapping[str, Stored]) -> dict[str, list[int]]:
    """Size and time of change of every file that the output depends on."""
    files = {source / "config.json", *(tensor.file for tensor in stored.values())}
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(files)}


# Doing it.


def run(
    work: Work,
    source: Path,
    out: Path,
    overwrite: bool,
    show_progress: bool | None,
    title: str = "quantizing",
) -> tuple[int, int]:
    """Write all shards that are not there yet, then `out`.

    Returns the bytes of all tensors written, and how many shards an earlier run had finished.
    """
    partial = out.with_name(out.name + ".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    begin(partial, work.manifest, overwrite)
    todo = [path for path in work.shards if not (partial / path).exists()]
    resumed = len(work.shards) - len(todo)
    try:
        check_space(partial, work.needed(todo))
        with progress(title, work.source_bytes, show_progress) as step:
            for path, names in work.shards.items():
                if path not in todo:
                    step(sum(map(work.nbytes, names)), f"{path} is done")
                    continue
                with ShardWriter(partial / path, work.outputs(names)) as shard:
                    for name in names:
                        work.write(name, shard)
                        step(work.nbytes(name), name)
        after = finish(partial, source, work)
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
    """Make the work directory, or take it up again when it was made by the same manifest."""
    path = partial / MANIFEST
    if path.is_file():
        old, new = read_json(path), json.loads(json.dumps(manifest))
        changed = [key for key in new if old.get(key) != new[key]]
        if changed and not overwrite:
            what = "; ".join(difference(key, old.get(key), new[key]) for key in changed)
            raise ValueError(
                f"{partial} holds an unfinished run that was started differently ({what}); "
                "go on with the same settings, or pass overwrite=True to start anew"
            )
        if not changed:
            for left in partial.glob("*.tmp"):
                left.unlink()
            return
        shutil.rmtree(partial)
    elif partial.exists() and any(p.suffix != ".tmp" for p in partial.iterdir()):
        raise FileExistsError(f"{partial} is needed for unfinished shards, but is in use; move it")
    partial.mkdir(exist_ok=True)
    write_json(path.with_suffix(".tmp"), manifest)
    os.replace(path.with_suffix(".tmp"), path)


def difference(key: str, old: Any, new: Any) -> str:
    """What changed between two manifests, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        changed = sorted(name for name in old | new if old.get(name) != new.get(name))
        return f"{key}: {', '.join(changed)} changed"
    return f"{key} was {old}, now {new}"


def finish(partial: Path, source: Path, work: Work) -> int:
    """Write index, config.json and all other files; returns the bytes of all tensors."""
    tensors = {n: t for path in work.shards for n, t in read_header(partial / path).items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    if len(work.shards) > 1:
        where = {name: tensor.file.name for name, tensor in sorted(tensors.items())}
        write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(partial / "config.json", work.new_config)
    copy_others(source, partial)
    return total
