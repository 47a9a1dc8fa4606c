"""`anybit export`: checkpoints of ours as compressed-tensors or GGUF, which other engines read.

Only what these formats say exactly is written; see `ct_layers.py` and `gguf_export.py`.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.foreign.base import OF_CACHE, of_attention
from anybit.checkpoint.foreign.compressed_tensors import DENSE_SINCE, FORMAT, MIXED, TOOL
from anybit.checkpoint.foreign.convert import opened, plan_conversion
from anybit.checkpoint.foreign.ct_layers import Written, keys_of, number_of, written
from anybit.checkpoint.layout import left_out
from anybit.checkpoint.names import Names
from anybit.checkpoint.places import Place, places
from anybit.checkpoint.rewrite import (
    SHARD_BYTES,
    Rewrite,
    check_paths,
    into_shards,
    manifest_of,
    rewrite,
)
from anybit.checkpoint.trial import unreadable
from anybit.core.format import Format
from anybit.core.packed import Packed, is_codes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.directory import destination, megabytes, quantization_of, read_json
from anybit.files.hub import located
from anybit.files.safetensors import ShardWriter, Stored, stored_tensors
from anybit.formats.microscaling import NVFP4
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import published, split
from anybit.nn.plan import METHOD, patterns_for, stored_plan
from anybit.nn.tied import output_embeddings, tied_heads, untied_config

GGUF = "gguf"
TARGETS = (TOOL, GGUF)
EXPERT = re.compile(r"\.experts\.\d+\.")
MERGED = (  # one layer in vLLM
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True)
class Exported:
    """What `export_checkpoint` did.

    Attributes:
        out: The directory or file that was written.
        tool: Whose layout it has.
        layers: Number of quantized layers, by their formats there.
        dropped: Tensors that the other layout has no place for, and why.
        notes: Which engines do not read it, and why.
        bytes_after: Of all tensors of the output.
        seconds: Time that this run took.
    """

    out: Path
    tool: str
    layers: Mapping[str, int]
    dropped: Mapping[str, str]
    notes: tuple[str, ...]
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.out}: {sum(self.layers.values())} layers as {self.tool} "
            f"({', '.join(self.layers)}), {left_out(self.dropped)}; "
            f"{megabytes(self.bytes_after)} in {self.seconds:.3g} s"
            + "".join(f"\nnote: {note}" for note in self.notes)
        )


def export_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = TOOL,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write an anybit checkpoint in another tool's layout, with the same weights bit for bit.

    Memory and resuming: as in `quantize_checkpoint`.

    Args:
        source: Directory of a checkpoint of anybit, or org/name of the hub.
        out: Directory to write; of GGUF, the file.
        to: The other tool, one of `TARGETS`.
        overwrite: As in `quantize_checkpoint`.
        shard_bytes: As in `quantize_checkpoint`; a GGUF file holds everything.

    Returns:
        What was done.

    Raises:
        InvalidInput: The target is unknown, the checkpoint is not one of anybit, or a layer has a
            format that the target cannot express; nothing is written then.
        FileNotFoundError: The source is incomplete.
        FileExistsError: `out` exists.
        OSError: The disk is too small.
    """
    started = time.monotonic()
    if to not in TARGETS:
        raise InvalidInput(f"cannot export to {to!r}; known: {', '.join(TARGETS)}")
    out = destination(out)
    if to == GGUF:
        from anybit.checkpoint.foreign.gguf_export import export_gguf

        file = export_gguf(checkpoint_of(located(source)), out, overwrite)
        layers = Counter(file.kinds.values())
        took = time.monotonic() - started
        return Exported(out, GGUF, layers, file.dropped, (), file.nbytes, took)
    source = check_paths(source, out, overwrite)
    work = plan_export(source, shard_bytes)
    after, _ = rewrite(work, source, out, overwrite, "exporting")
    layers = Counter(layer.name for layer in work.layers.values())
    notes = notes_of(work.layers, work.linears, work.apart)
    return Exported(out, TOOL, layers, work.dropped, notes, after, time.monotonic() - started)


@dataclass(frozen=True)
class Export(Rewrite):
    """How our checkpoint becomes another tool's. A unit is a quantized layer, or a tensor.

    Attributes:
        layers: The quantized layers, by name.
        linears: The model's names of all linear layers, by the checkpoint's.
        apart: The model's names of heads and embeddings, by the checkpoint's.
        tied: Heads that get a copy of an embedding's codes -> that embedding.
        dropped: Tensors that are left out, and why.
    """

    stored: Mapping[str, Stored]
    layers: Mapping[str, Written]
    linears: Mapping[str, str]
    apart: Mapping[str, str]
    tied: Mapping[str, str]
    dropped: Mapping[str, str]

    @property
    def new_config(self) -> dict[str, Any]:
        names = {**self.linears, **self.apart}
        layers = {names[name]: layer for name, layer in self.layers.items()}
        kept = tuple(own for name, own in self.linears.items() if name not in self.layers)
        config = untied_config(self.config) if self.tied else self.config
        quantization = quantization_config(layers, kept, [*self.apart.values()])
        return {**config, "quantization_config": quantization}

    def parts(self, unit: str) -> list[str]:
        layer, name = self.layers.get(unit), self.tied.get(unit, unit)
        return [f"{name}.{k}" for k in keys_of(layer.format, layer.shape)] if layer else [unit]

    def outputs(self, units: list[str]) -> dict[str, int]:
        out = {}
        for name in units:
            if name not in self.layers:
                out[name] = self.stored[name].nbytes
            else:
                sizes = self.layers[name].sizes.items()
                out |= {f"{name}.{key}": size for key, size in sizes}
        return out

    def try_out(self, directory: Path) -> None:
        with unreadable(), opened(directory) as found:
            plan_conversion(found, SHARD_BYTES)

    def write(self, unit: str, shard: ShardWriter) -> None:
        layer = self.layers.get(unit)
        if layer is None:
            self.copy(unit, shard)
            return
        keys = keys_of(layer.format, layer.shape)
        tensors = dict(zip(keys, (self.stored[n].read() for n in self.parts(unit)), strict=True))
        packed = Packed.from_tensors(layer.format, layer.shape, tensors, unit)
        for key, tensor in layer.tensors(packed).items():
            shard.add(f"{unit}.{key}", tensor)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of ours, by its headers.

    Attributes:
        directory: Where it is.
        config: Of config.json.
        stored: Its tensors by name.
        model: transformers' model, without memory.
        linears: The model's names of its linear layers, by the checkpoint's.
        apart: The model's names of its output heads and embeddings, by the checkpoint's.
        tied: Heads without codes of their own -> the embeddings whose codes they share.
        layers: Those that are quantized, and embeddings: format, activation and shape (N, K).
    """

    directory: Path
    config: Mapping[str, Any]
    stored: Mapping[str, Stored]
    model: Any
    linears: Mapping[str, str]
    apart: Mapping[str, str]
    tied: Mapping[str, str]
    layers: Mapping[str, tuple[Format, str | None, tuple[int, int]]]


def checkpoint_of(source: Path) -> Checkpoint:
    """What there is to export; InvalidInput when it is no checkpoint of ours."""
    stored, config = stored_tensors(source), read_json(source / "config.json")
    quantization = quantization_of(config, source)
    if quantization.get("quant_method") != METHOD:
        raise InvalidInput(f"{source} is not a checkpoint of anybit; quantize or convert it first")
    bare = bare_model(source)
    coded = dict.fromkeys(key.rpartition(".")[0] for key in stored if is_codes(key))
    dense = [key.removesuffix(".weight") for key in stored if key.endswith(".weight")]
    where = places(Names(bare), [*coded, *dense])
    plan, model = stored_plan(quantization, source), split(bare)
    linears, names, shapes, words = {}, {}, {}, embedding_layers(bare)
    apart, heads = {}, {*output_embeddings(model), *words}
    for own, module in model.named_modules():
        if isinstance(module, nn.Linear) or own in words:
            place = where.get(own, Place(own, own))
            names[place.stored] = published(place.saved, config.get("model_type"))
            n, k = cast(Tensor, module.weight).shape
            shapes[place.stored] = n, k
            if own not in words:
                linears[place.stored] = names[place.stored]
            if own in heads:
                apart[own] = place.stored
    layers = {}
    for name in coded:
        matches = patterns_for(names.get(name, name), plan, name not in linears)
        scheme = plan[matches[-1]] if matches else None
        if name not in names or scheme is None:
            what = "its model has no such layer" if name not in names else "it names no format"
            raise InvalidInput(f"{source}: has codes for {name}, but by config.json {what}")
        layers[name] = (*parse_scheme(scheme), shapes[name])
    config = untied_config(config) if bare.has_own_head else config
    tied = {apart[head]: apart[other] for head, other in tied_heads(model).items() if head in apart}
    tied = {head: other for head, other in tied.items() if other in layers and head not in layers}
    own_names = {name: names[name] for name in apart.values()}
    return Checkpoint(source, config, stored, model, linears, own_names, tied, layers)


def plan_export(source: Path, shard_bytes: int) -> Export:
    """Which layer becomes what; InvalidInput when one of them cannot."""
    found = checkpoint_of(source)
    stored, config = found.stored, found.config
    layers: dict[str, Written] = {}
    reasons: dict[str, str] = {}
    numbers = shared_numbers(found)
    for name, (fmt, activation, shape) in found.layers.items():
        keys = [key for key in keys_of(fmt, shape) if f"{name}.{key}" in stored]
        own = {key: stored[f"{name}.{key}"] for key in keys}
        layer = written(fmt, activation, shape, own, name, numbers.get(joined(name)))
        if isinstance(layer, Written):
            layers[name] = layer
        else:
            reasons[name] = layer
    check_all(source, reasons, len(found.layers))
    dropped = {n: OF_CACHE for n in stored if of_attention(n)}  # ours are per channel
    owner = {
        f"{name}.{key}": name
        for name, layer in layers.items()
        for key in keys_of(layer.format, layer.shape)
    }
    shards = into_shards(stored, owner, dropped, shard_bytes)
    for head, words in found.tied.items():
        layers[head] = layers[words]
        next(units for units in shards.values() if words in units).append(head)
    return Export(
        stored=stored,
        config=config,
        shards=shards,
        manifest=manifest_of(source, stored, shard_bytes, export=TOOL),
        layers=layers,
        linears=found.linears,
        apart=found.apart,
        tied=found.tied,
        dropped=dropped,
    )


def shared_numbers(found: Checkpoint) -> dict[str, float]:
    """NVFP4's number of weights that vLLM merges, of which it takes one for all; by `joined`."""
    out: dict[str, float] = {}
    for name, (fmt, _, _) in found.layers.items():
        if isinstance(fmt, NVFP4):
            own = number_of(fmt, {"row_scale": found.stored[f"{name}.row_scale"]})
            out[joined(name)] = min(own, out.get(joined(name), own))  # scales become no larger
    return out


def check_all(source: Path, reasons: Mapping[str, str], count: int) -> None:
    """InvalidInput when some of `count` layers cannot be written, for the reasons given."""
    if reasons:
        name = next(iter(reasons))
        raise InvalidInput(
            f"{source}: {len(reasons)} of {count} layers cannot be exported exactly, the first is "
            f"{name}: {reasons[name]}; quantize with other formats (`anybit plan --head` names the "
            "output head's)"
        )


def quantization_config(
    layers: Mapping[str, Written], kept: tuple[str, ...], apart: Collection[str]
) -> dict[str, Any]:
    """The last group, of the commonest kind, is for all linear layers, and the others name theirs.

    Heads and embeddings are named in any case, since engines have classes of their own for them;
    experts of one kind by a pattern, by which transformers finds their group.

    Args:
        layers: By the model's names.
        kept: Linear layers that are not quantized.
        apart: Heads and embeddings.
    """
    kinds = {name: kind_of(layer) for name, layer in layers.items()}
    counts = Counter(kind for name, kind in kinds.items() if name not in apart).most_common()
    order = [kind for kind, _ in reversed(counts)]
    order = [*dict.fromkeys(kind for kind in kinds.values() if kind not in order), *order]
    experts = [name for name in (*layers, *kept) if EXPERT.search(name)]
    alike = len({kinds.get(name) for name in experts}) == 1
    groups = {}
    for i, kind in enumerate(order, 1):
        names = [name for name, other in kinds.items() if other == kind]
        targets = [target_of(name) for name in names if name in apart]
        if alike and kinds.get(experts[0]) == kind:
            targets.append(f"re:.*{EXPERT.pattern}")
        if i == len(order):
            targets.append("Linear")
        else:
            some = set(names).difference(apart, experts if alike else ())
            targets += [name for name in names if name in some]
        groups[f"group_{i}"] = {"targets": targets} | layers[names[0]].group
    formats = {layer.name for layer in layers.values()}
    return {
        "quant_method": TOOL,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "version": ".".join(map(str, (*DENSE_SINCE, 0))),
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def kind_of(layer: Written | None) -> tuple[str, str, str | None] | None:
    """What a config group says of a layer."""
    return (layer.name, layer.weights, layer.activation) if layer else None


def target_of(name: str) -> str:
    """A target for one layer, which engines may hold inside another one than transformers does."""
    return name if "." in name else rf"re:(.*\.)?{re.escape(name)}$"


def notes_of(
    layers: Mapping[str, Written], linears: Mapping[str, str], apart: Mapping[str, str]
) -> tuple[str, ...]:
    """What known engines do not read of an exact export. Names are the checkpoint's."""
    together: dict[str, set[Any]] = {}
    for name in linears:
        together.setdefault(merged(name), set()).add(kind_of(layers.get(name)))
    mixed = [name for name, kinds in together.items() if len(kinds) > 1]
    notes = []
    if mixed:
        notes.append(
            f"vLLM reads some layers as one, which have different formats here: {len(mixed)}, the "
            f"first is {mixed[0]}; quantize those alike for it"
        )
    numbers: dict[str, set[float]] = {}
    for name, layer in layers.items():
        if layer.number is not None:
            numbers.setdefault(joined(name), set()).add(layer.number)
    if several := [name for name, found in numbers.items() if len(found) > 1]:
        notes.append(
            f"vLLM takes the largest number of nvfp4 for all weights that it merges, and here they "
            f"differ, so that others have wrong weights there: {len(several)}, the first is "
            f"{several[0]}; quantize the dense model again, with this version"
        )
    for name in apart:
        kind = layers.get(name)
        if kind and name not in linears and (kind.name != FORMAT or not in_words(kind)):
            notes.append(
                f"vLLM has no embeddings in {kind.format.spec} (that of {name}), only int2, int4 "
                "and int8 without `zero`"
            )
    rounded = [name for name, kind in layers.items() if kind.name == FORMAT and kind.activation]
    if rounded:
        notes.append(
            f"vLLM reads packed integers with int8 activations, such as {rounded[0]}, from 0.26 "
            "on, but not in experts, and only its humming kernels round the activations"
        )
    experts = {kind.name for name, kind in layers.items() if EXPERT.search(name)}
    if "nvfp4-pack-quantized" in experts:
        notes.append(
            "transformers 5.24 reads other weights from experts in nvfp4; vLLM's are these"
        )
    return tuple(notes)


def merged(name: str) -> str:
    """The layer that vLLM makes of this one and others; its own name where it is one there."""
    expert = EXPERT.search(name)
    return f"{name[: expert.start()]}.experts" if expert else joined(name)


def joined(name: str) -> str:
    """The layers whose rows vLLM puts into one weight with this one's; its own name without any."""
    before, _, last = name.rpartition(".")
    return next((f"{before}.{'+'.join(parts)}" for parts in MERGED if last in parts), name)


def in_words(layer: Written) -> bool:
    """Whether vLLM's kernel looks up such embeddings: no code lies in two words, none is moved."""
    settings = json.loads(layer.weights)
    return bool(settings["symmetric"] and 32 % settings["num_bits"] == 0)
