"""`anybit convert`: checkpoints of other tools, streamed tensor by tensor into ours.

A tool is one module with one function, `layers(given)`, which says by headers,
config and a few small tensors what every layer becomes; see `base.py`. What is exact is kept in
codes.
"""

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybit.checkpoint.architecture import QUANTIZATION_KEYS, bare_model
from anybit.checkpoint.foreign import mlx
from anybit.checkpoint.foreign.base import OF_CACHE, Given, Layer, of_attention, owner
from anybit.checkpoint.foreign.dense_experts import as_transformers_reads
from anybit.checkpoint.foreign.fit import OTHERS, fit_all, lost_tensors, rounded_to
from anybit.checkpoint.foreign.gguf_file import is_gguf, read_model
from anybit.checkpoint.foreign.gguf_model import Made, open_model, write_tokenizer
from anybit.checkpoint.foreign.methods import method_of, reader_of
from anybit.checkpoint.foreign.mxfp4 import one_by_one
from anybit.checkpoint.layout import check_fit, check_missing, left_out, tell_strange
from anybit.checkpoint.names import Names, as_they_are, ignored_unexpected
from anybit.checkpoint.places import Place, name_of, places, without_place
from anybit.checkpoint.rewrite import (
    SHARD_BYTES,
    Rewrite,
    check_paths,
    into_shards,
    manifest_of,
    rewrite,
)
from anybit.core.packed import Packed, tensor_shapes
from anybit.errors import InvalidInput
from anybit.files.directory import destination, megabytes, read_json
from anybit.files.safetensors import ShardWriter, Stored, stored_tensors
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import split
from anybit.nn.linear import all_finite, check_finite
from anybit.nn.model import is_linear
from anybit.nn.plan import Plan, Spec, is_head, quantization_config
from anybit.nn.tied import tied_heads, untied_config, untied_heads

CODES = (
    torch.uint8,
    torch.int8,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
PACKED = (torch.int16, torch.int32)  # if they are matrices
DENSE = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` did.

    Attributes:
        out: The directory that was written.
        method: The tool's name in config.json.
        formats: Layers and the schemes that hold them exactly.
        notes: What the tool does beside the weights and we do not, and of how many layers.
        decoded: Layers that are dense now, in the model's dtype, and why.
        dropped: Tensors that were left out, and why.
        unexpected: Layers that transformers' model does not have under their names, such as experts
            that it stores in another shape.
        bytes_before: Of all tensors of the source.
        bytes_after: Of all tensors of the output.
        seconds: Time that this run took.
    """

    out: Path
    method: str
    formats: Mapping[str, str]
    notes: Mapping[str, int]
    decoded: Mapping[str, str]
    dropped: Mapping[str, str]
    unexpected: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        counts = Counter(self.formats.values())
        what = [f"{count} layers are {spec}" for spec, count in counts.most_common()]
        if not counts and not self.decoded:
            what.append("no layer is in codes")
        if self.decoded:
            what.append(f"{len(self.decoded)} layers are dense now")
        what.append(left_out(self.dropped))
        lines = [
            f"{self.out}: from {self.method}, {', '.join(what)}; "
            f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)} in "
            f"{self.seconds:.3g} s"
        ]
        for reason, count in Counter(self.decoded.values()).items():
            names = [name for name, why in self.decoded.items() if why == reason]
            others = f" and {count - 1} others" if count > 1 else ""
            lines.append(f"decoded, as no format of anybit holds it: {names[0]}{others}: {reason}")
        lines += [f"{count} layers: {note}" for note, count in self.notes.items()]
        if self.unexpected:
            lines.append(
                f"not in transformers' model, and kept: {len(self.unexpected)} layers, such as "
                f"{self.unexpected[0]}"
            )
        return "\n".join(lines)


def convert_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Spec | Plan | None = None,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Convert another tool's quantized checkpoint (safetensors or GGUF) to one of anybit's.

    Without `to`, dequantized weights equal the tool's own formula in fp32, bit for bit; layers that
    no format of ours can hold are decoded to the model's dtype, and named in the result. Memory and
    resuming: as in `quantize_checkpoint`.

    Args:
        source: Directory of a model that another tool quantized, or a GGUF file; or org/name of
            the hub, with :Q4_K_M for one of its GGUF files.
        out: Directory to write.
        to: What the decoded weights are rounded to instead: a scheme for all quantized layers, such
            as "int4:group=128", or `{glob: scheme or None}` over their names, in which the last
            match wins. Other layers, and those of None, stay as they are.
        overwrite: As in `quantize_checkpoint`.
        shard_bytes: As in `quantize_checkpoint`.

    Returns:
        What was done.

    Raises:
        InvalidInput: The tool or the layout cannot be read (what was found is named), or tensors
            have wrong shapes, dtypes or codes.
        FileNotFoundError: The source is incomplete.
        FileExistsError: `out` exists.
        OSError: The disk is too small.
    """
    started = time.monotonic()
    out = destination(out)
    source = check_paths(source, out, overwrite)
    with opened(source) as found:
        work = plan_conversion(found, shard_bytes, to)
        after, _ = rewrite(work, found.directory, out, overwrite, "converting")
    return Converted(
        out=out,
        method=work.method,
        formats={name: x.scheme for name, x in work.layers.items() if x.scheme},
        notes=Counter(layer.note for layer in work.layers.values() if layer.note),
        decoded=work.decoded,
        dropped=work.dropped,
        unexpected=work.unexpected,
        bytes_before=work.source_bytes,
        bytes_after=after,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Conversion(Rewrite):
    """How another tool's checkpoint becomes ours. A unit is a quantized layer, or a tensor.

    Attributes:
        formats: The plan for config.json.
        method: The tool's name in config.json.
        layers: Its quantized layers by name.
        dense: The dtype of layers that are decoded.
        dropped: Tensors that are left out, and why.
        unexpected: Layers that transformers' model does not have under their names.
        decoded: Layers of the source that become dense, and why.
        placed: Whether transformers' model has all experts of its blocks that are stored.
    """

    stored: Mapping[str, Stored | Made]
    formats: Mapping[str, str | None]
    method: str
    layers: Mapping[str, Layer]
    dense: torch.dtype
    dropped: Mapping[str, str]
    unexpected: tuple[str, ...]
    decoded: Mapping[str, str]
    placed: bool

    @property
    def quantized(self) -> list[tuple[str, tuple[int, int]]]:
        return [(layer.scheme, layer.shape) for layer in self.layers.values() if layer.scheme]

    @property
    def new_config(self) -> dict[str, Any]:
        config = {k: v for k, v in self.config.items() if k not in QUANTIZATION_KEYS}
        if not config.get("torch_dtype"):  # else transformers takes that of any tensor
            config.setdefault("dtype", str(self.dense).removeprefix("torch."))
        if any(self.formats.values()):
            config["quantization_config"] = quantization_config(self.formats)
        return config

    def parts(self, unit: str) -> list[str]:
        return [*dict.fromkeys(self.layers[unit].tensors)] if unit in self.layers else [unit]

    def outputs(self, units: list[str]) -> dict[str, int]:
        out = {}
        for name in units:
            layer = self.layers.get(name)
            if layer is None:
                out[name] = self.stored[name].meta().nbytes
            elif layer.format is None:
                out[f"{name}.weight"] = math.prod(layer.shape) * self.dense.itemsize
            else:
                for key, (shape, entry) in tensor_shapes(layer.format, layer.shape).items():
                    dtype = layer.dtypes.get(key, entry.default_dtype)
                    out[f"{name}.{key}"] = math.prod(shape) * dtype.itemsize
        return out

    def write(self, unit: str, shard: ShardWriter) -> None:
        if unit not in self.layers:
            self.copy(unit, shard)
            return
        tensors = self.tensors(unit)
        self.check(unit, tensors)
        for key, tensor in tensors.items():
            shard.add(f"{unit}.{key}", tensor)

    def try_out(self, directory: Path) -> None:
        if self.placed:  # else transformers refuses it
            super().try_out(directory)

    def check(self, layer: str, tensors: Mapping[str, Tensor]) -> None:
        """InvalidInput where what a layer becomes holds NaN or inf: by the source's names."""
        if all(all_finite(t) for t in tensors.values() if t.is_floating_point()):
            return
        for name in self.parts(layer):
            stored = self.stored[name]
            check_finite(stored.read(), f"{stored.file}: {name}")
        for key, tensor in tensors.items():  # only in their product, or only in this dtype
            check_finite(tensor, f"{layer}.{key}, converted to {tensor.dtype}")

    def tensors(self, layer: str) -> dict[str, Tensor]:
        """What a quantized layer becomes, by the last part of its tensors' names."""
        weight = self.layers[layer].read()
        if isinstance(weight, Packed):
            return weight.tensors()
        return {"weight": weight.to(self.dense)}


@dataclass(frozen=True)
class Opened:
    """What another tool's checkpoint holds, by its headers.

    Attributes:
        source: The directory or file that users name.
        directory: With config.json and what else is no tensor.
        method: The tool's name.
        config: Of config.json.
        stored: The tensors by name.
        layers: The quantized layers by name.
        names: transformers' tables of the model's names.
        model: transformers' model, without memory, its experts one by one.
        left: Tensors that are not among `stored`, and why.
    """

    source: Path
    directory: Path
    method: str
    config: Mapping[str, Any]
    stored: Mapping[str, Stored | Made]
    layers: Mapping[str, Layer]
    names: Names
    model: nn.Module
    left: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def opened(source: Path) -> Iterator[Opened]:
    """Read all but weights. Of a GGUF file, the directory is made, and gone in the end."""
    if not is_gguf(source):
        config = read_json(source / "config.json")
        method, _ = method_of(source, config)  # before what its files may lack
        stored = one_by_one(stored_tensors(source))
        if method == "mlx":
            stored = mlx.one_by_one(stored)
        tables = cache(lambda: Names(bare_model(source)))
        layers = read_layers(source, config, stored, lambda n: name_of(tables(), n))
        names = tables()
        yield Opened(source, source, method, config, stored, layers, names, split(names.model))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / source.stem
        directory.mkdir()
        contents = read_model(source)
        found = open_model(contents, directory)
        write_tokenizer(contents, directory)
        yield Opened(source, directory, "gguf", *found)


def plan_conversion(
    found: Opened, shard_bytes: int, to: Spec | Plan | None = None, *, for_transformers: bool = True
) -> Conversion:
    """Decide everything by headers, config.json and small tensors, before any weight is read.

    Args:
        found: The checkpoint.
        shard_bytes: Of a file of the output.
        to: As in `convert_checkpoint`.
        for_transformers: Whether what transformers would make of a layer, or lack, counts.
    """
    source, stored, model, names = found.source, found.stored, found.model, found.names
    dense = beside(found.layers, stored)
    weights = {name.removesuffix(".weight") for name in dense if name.endswith(".weight")}
    where = places(names, found.layers.keys() | weights)
    model_name = {where.get(name, Place(name, name)): name for name, _ in model.named_modules()}
    own_name = {place.stored: name for place, name in model_name.items()}
    module_of = {key: model.get_submodule(name) for key, name in own_name.items()}
    schemes = rounded_to(to, {n: own_name.get(n) for n in found.layers}, embedding_layers(model))
    layers = fit_all(found.layers, module_of, names, schemes, for_transformers)
    dropped = needless(found, module_of)
    dtype = dense_dtype(found.config, (stored[name] for name in dense))
    check_owners(found, dropped)
    decoded = {name: layer.reason for name, layer in layers.items() if layer.format is None}
    if for_transformers:
        stored, layers = as_transformers_reads(names, own_name, stored, layers, dtype)
    of_model = {name: layers.get(place.stored) for place, name in model_name.items()}
    for head, own in tied_heads(model).items():  # which share the embeddings' codes
        of_model[head] = of_model.get(head) or of_model[own]
    kinds = {name: layer.scheme for name, layer in of_model.items() if layer}
    others = [
        n for n, x in layers.items() if x.reason == OTHERS or not (x.format or n in found.layers)
    ]
    unexpected = tuple(name for name in layers if name not in own_name and name not in others)
    kept = [name for name in beside(layers, stored) if name not in dropped]
    tell_strange(source, [name for name in kept if strays(names, name)])
    check_fit(source, as_they_are(names, kept), stored, names.state)
    kept += [f"{name}.weight" for name in others]
    if for_transformers:
        check_missing(source, lost_tensors(names, model, kept, kinds, unexpected), unexpected)
    untied = names.model.has_own_head or untied_heads(model, kinds)
    formats = plan_for(model, model_name, layers, kinds)
    settings = {"convert": found.method, "formats": [*map(list, formats.items())]}
    return Conversion(
        stored=stored,
        config=untied_config(found.config) if untied else found.config,
        formats=formats,
        shards=into_shards(stored, owners(layers), dropped, shard_bytes),
        manifest=manifest_of(source, stored, shard_bytes, **settings),
        unexpected=unexpected,
        method=found.method,
        layers=layers,
        dense=dtype,
        dropped={**dropped, **found.left},
        decoded=decoded,
        placed=not without_place(names, unexpected),
    )


def owners(layers: Mapping[str, Layer]) -> dict[str, str]:
    """Quantized layers by the names of their tensors."""
    return {tensor: name for name, layer in layers.items() for tensor in layer.tensors}


def beside(layers: Mapping[str, Layer], stored: Iterable[str]) -> list[str]:
    """Stored tensors that are no quantized layer's."""
    owned = owners(layers)
    return [name for name in stored if name not in owned]


def needless(found: Opened, module_of: Mapping[str, nn.Module]) -> dict[str, str]:
    """Tensors for attention, and biases of zeros, that the model lacks, and why they are left out.

    Raises:
        InvalidInput: Such a bias is not zero.
    """
    out = {
        name: OF_CACHE
        for name in found.stored
        if of_attention(name) and found.names.in_model(name)[0] not in found.names.state
    }
    for name in (f"{layer}.bias" for layer in found.layers):
        bias, module = found.stored.get(name), module_of.get(name.removesuffix(".bias"))
        if bias is not None and isinstance(module, nn.Linear) and module.bias is None:
            if bias.read().any():
                raise InvalidInput(f"{name}: not zero, but the model has no bias there")
            out[name] = "zeros, and the model has no bias there"
    return out


def check_owners(found: Opened, dropped: Container[str]) -> None:
    """InvalidInput for tensors that look like a quantized layer's, and are no known layer's."""
    for name in beside(found.layers, found.stored):
        if name in dropped:
            continue
        tensor = found.stored[name]
        packed = tensor.torch_dtype in PACKED and len(tensor.shape) > 1
        if tensor.torch_dtype in CODES or (packed and strays(found.names, name)):
            raise InvalidInput(
                f"{found.source}: {name} holds {tensor.dtype} of {tensor.shape}, and belongs to no "
                f"layer of {found.method} in a layout that anybit knows"
            )
        layer = owner(name, found.layers)
        if layer and name != f"{layer}.bias":
            raise InvalidInput(
                f"{found.source}: {found.method} has no tensor {name!r} beside "
                f"{found.layers[layer].tensors[0]!r} in a layout that anybit knows"
            )


def strays(names: Names, tensor: str) -> bool:
    """Whether a stored tensor is none of the model's, and nothing that its class knows to leave."""
    found, ignored = names.in_model(tensor)[0], ignored_unexpected(names.model)
    return found not in names.state and not ignored(tensor) and not ignored(found)


def read_layers(
    source: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    naming: Callable[[str], str] = str,
) -> dict[str, Layer]:
    """A checkpoint's quantized layers, as the tool's module reads them."""
    method, quantization = method_of(source, config)
    found: dict[str, Layer] = reader_of(method).layers(Given(quantization, stored, naming))
    if not found:
        codes = [n for n, t in stored.items() if t.torch_dtype in (*PACKED, *CODES)]
        raise InvalidInput(
            f"{source}: config.json says {method}, but no tensor is named like a quantized layer's "
            f"(there are {', '.join((codes or [*stored])[:3])}, ...); "
            + (
                "its codes have a layout that anybit does not know: quantize the unquantized model"
                if codes
                else "if its weights are dense, remove quantization_config from config.json"
            )
        )
    return found


def dense_dtype(config: Mapping[str, Any], others: Iterable[Stored | Made]) -> torch.dtype:
    """The model's dtype: by config.json, or that of most dense numbers."""
    named = DENSE.get(str(config.get("dtype") or config.get("torch_dtype")))
    sizes: Counter[torch.dtype] = Counter()
    for tensor in others:
        if tensor.torch_dtype in DENSE.values():
            sizes[tensor.torch_dtype] += tensor.nbytes
    return named or next((dtype for dtype, _ in sizes.most_common(1)), torch.float16)


def plan_for(
    model: nn.Module,
    places: Mapping[Place, str],
    layers: Mapping[str, Layer],
    kinds: Mapping[str, str | None],
) -> dict[str, str | None]:
    """A short plan that gives every layer its scheme: the commonest for "*", then the others.

    Args:
        model: Its experts one by one.
        places: The model's names of its modules.
        layers: The quantized layers by their names in the checkpoint.
        kinds: Their schemes by the model's.
    """
    embeddings = embedding_layers(model)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    schemes |= {
        place.saved: kinds.get(name)
        for place, name in places.items()
        if name in embeddings or is_linear(model.get_submodule(name))
    }
    words = {n for place, name in places.items() if name in embeddings for n in place}
    named = {name for name in schemes if is_head(name) or name in words}  # "*" is not theirs
    counts = Counter(s for name, s in schemes.items() if s and name not in named)
    common = counts.most_common(1)[0][0] if counts else None
    rest = {n: s for n, s in sorted(schemes.items()) if s != (None if n in named else common)}
    return {"*": common, **rest}
