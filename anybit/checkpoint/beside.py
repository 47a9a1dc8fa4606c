"""Tensors of a checkpoint that its class in transformers does not have: heads for further tokens.

transformers drops them when it loads a model. What is written of that model has them again.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from anybit.checkpoint.layout import some
from anybit.checkpoint.names import natural
from anybit.checkpoint.trial import read_as
from anybit.core.packed import is_codes
from anybit.errors import AnybitError
from anybit.files.directory import quantization_of, read_json, write_json
from anybit.files.hub import MAIN, Name, name_of, snapshot
from anybit.files.safetensors import INDEX, ShardWriter, Stored, read_header, stored_tensors
from anybit.nn.plan import METHOD, patterns_for, quantization_config, stored_plan

log = logging.getLogger(__name__)


def source_of(model: Any) -> Path | None:
    """The directory that a model was loaded from, if it is there still."""
    named = str(getattr(model, "name_or_path", "") or "")
    name = name_of(named)
    if name is not None:
        commit = getattr(model.config, "_commit_hash", None)
        path = snapshot(Name(name.repository, commit or MAIN))
    else:
        path = Path(named) if named else None
    return path if path is not None and (path / "config.json").is_file() else None


class Beside:
    """What lies beside a model in the checkpoint that it was loaded from.

    Attributes:
        tensors: By name; their contents where the model is saved over that checkpoint.
        schemes: Of those layers that are codes, by name.
    """

    def __init__(self, model: Any, out: Path):
        self.tensors: Mapping[str, Stored | Tensor] = {}
        self.schemes: dict[str, str | None] = {}
        self.source = source_of(model)
        if self.source is None:
            return
        try:
            table, stored = read_as(self.source)
        except (AnybitError, OSError):  # not safetensors, or half gone: nothing is known of it
            return
        kind, order = type(table.model), sorted(stored, key=natural)
        found = {n: stored[n] for n in order if table.in_model(n)[0] not in table.state}
        if found and type(model) is not kind and model.get_output_embeddings() is None:
            log.warning(
                "%s: %d tensors that no %s has are not saved with a %s: %s",
                self.source,
                len(found),
                kind.__name__,
                type(model).__name__,
                some([*found]),
            )
            return
        over = os.path.realpath(self.source) == os.path.realpath(out)
        self.tensors = {n: t.read() for n, t in found.items()} if over else found
        coded = dict.fromkeys(name.rpartition(".")[0] for name in found if is_codes(name))
        if coded:
            given = quantization_of(read_json(self.source / "config.json"), self.source)
            plan = stored_plan(given, self.source)
            self.schemes = {name: scheme_in(plan, name) for name in coded}

    def add_to(self, out: Path) -> None:
        """Write them into the directory of a model that was saved, as a shard of their own."""
        written = stored_tensors(out)
        tensors = {n: t for n, t in self.tensors.items() if n not in written}
        if not tensors:
            return
        files = sorted({tensor.file for tensor in written.values()})
        with ShardWriter(out / "beside.safetensors", tensors) as shard:
            for name, tensor in tensors.items():
                add = shard.copy if isinstance(tensor, Stored) else shard.add
                add(name, tensor)  # type: ignore[arg-type]
        into_one_index(out, [*files, shard.path])
        config = read_json(out / "config.json")
        quantization = config.get("quantization_config", {})
        if self.schemes and quantization.get("quant_method") == METHOD:
            plan = stored_plan(quantization, out) | self.schemes
            write_json(
                out / "config.json", config | {"quantization_config": quantization_config(plan)}
            )


def scheme_in(plan: Mapping[str, str | None], layer: str) -> str | None:
    """What a plan says of a layer."""
    patterns = patterns_for(layer, plan)
    return plan[patterns[-1]] if patterns else None


def into_one_index(directory: Path, files: list[Path]) -> None:
    """Name files of a directory as the shards of one checkpoint, and write the index."""
    where: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        for key, entry in read_header(file).items():
            where[key], total = name, total + entry.nbytes
        os.rename(file, directory / name)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
