"""Quantize a checkpoint of any size without ever holding the model: one tensor at a time."""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anybit.checkpoint.architecture import (
    bare_model,
    dense_config,
    empty_model,
    quantized_already,
)
from anybit.checkpoint.foreign.ready import dense_directory
from anybit.checkpoint.layout import (
    Layout,
    Tensors,
    check_fit,
    check_missing,
    layout,
    left_out,
    tell_strange,
    transposed,
)
from anybit.checkpoint.rewrite import (
    SHARD_BYTES,
    Rewrite,
    check_paths,
    into_shards,
    manifest_of,
    rewrite,
)
from anybit.core.packed import tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.directory import destination, megabytes, read_json, stated_quantization
from anybit.files.safetensors import ShardWriter, Stored, stored_tensors
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import expert_layers
from anybit.nn.linear import check_finite, is_conv1d
from anybit.nn.model import dense_layers, linear_schemes, outline_of
from anybit.nn.plan import Plan, Spec, quantization_config
from anybit.nn.tied import sharing_heads, untie, untied_config, untied_heads
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.embeddings import quantize_embedding
from anybit.quantizers.quantize import quantized_plan
from anybit.quantizers.rtn import RTN

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` or `calibrate_checkpoint` did.

    Attributes:
        out: The directory that was written.
        schemes: Schemes of the quantized layers, by name.
        kept: Tensors that were copied as they are.
        unexpected: Those of `kept` that fit no parameter of the model.
        dropped: Tensors of the source that are not in the output, and why.
        weights: Number of weights that were quantized.
        bytes_before: Of all tensors of the source.
        bytes_after: Of all tensors of the output.
        shards: Number of the output's files.
        resumed: How many of them an earlier run had finished.
        seconds: Time that this run took.
    """

    out: Path
    schemes: Mapping[str, str]
    kept: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: Mapping[str, str]
    weights: int
    bytes_before: int
    bytes_after: int
    shards: int
    resumed: int
    seconds: float

    def __str__(self) -> str:
        counts = Counter(self.schemes.values()).most_common()
        each = f" ({', '.join(f'{n} {scheme}' for scheme, n in counts)})" * (len(counts) > 1)
        return (
            f"{self.out}: {len(self.schemes)} layers with {self.weights / 1e6:.4g} million weights "
            f"quantized{each}, {len(self.kept)} tensors kept, {left_out(self.dropped)}; "
            f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)} in "
            f"{self.seconds:.3g} s"
        )


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    spec: Spec | Plan,
    quantizer: Quantizer | None = None,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Quantize a transformers checkpoint in safetensors from one directory to another.

    The result is that of `quantize_`. Peak memory is that of the imports (0.5 GB) and a few copies
    of the largest tensor, whatever the size of the model. The tokenizer and other files are copied.
    A run that was killed goes on where it stopped when it is started again.

    Args:
        source: Directory of a dense model, or org/name of the hub.
        out: Directory to write.
        spec: As in `quantize_`.
        quantizer: A data-free quantizer; `RTN()` by default. For calibrated ones there is
            `calibrate_checkpoint`.
        overwrite: Replace a checkpoint in `out`, and an unfinished run of other settings.
        shard_bytes: How much of the source goes into one file, which is what a kill may cost.

    Returns:
        What was done.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: The source is incomplete.
        InvalidInput: The source is damaged or quantized already, the spec does not fit it (as in
            `quantize_`), the quantizer needs calibration, or `OUT.partial` holds an unfinished run
            of other settings.
        OSError: The disk is too small.
    """
    started = time.monotonic()
    out, quantizer = destination(out), quantizer or RTN()
    if quantizer.needs:
        raise InvalidInput(
            f"{type(quantizer).__name__} needs calibration; use calibrate_checkpoint, or a "
            "data-free quantizer (RTN, Clip, HQQ)"
        )
    source = dense_directory(check_paths(source, out, overwrite))
    work = plan_quantization(source, spec, quantizer, shard_bytes)
    _, resumed = rewrite(work, source, out, overwrite, "quantizing")
    return report_of(work, out, resumed, started)


def report_of(work: "Quantization", out: Path, resumed: int, started: float) -> Report:
    """What a finished run did, which began at a time of `time.monotonic`."""
    written = stored_tensors(out)
    lost = [n for n in work.stored if not work.outputs([n]).keys() <= written.keys()]
    return Report(
        out=out,
        schemes={work.names[name].removesuffix(".weight"): s for name, s in work.schemes.items()},
        kept=tuple(name for name in work.stored if name not in work.schemes),
        unexpected=work.unexpected,
        dropped={**work.dropped, **dict.fromkeys(lost, "not written")},
        weights=sum(math.prod(work.stored[name].shape) for name in work.schemes),
        bytes_before=work.source_bytes - sum(work.stored[f"{n}.weight"].nbytes for n in work.heads),
        bytes_after=sum(tensor.nbytes for tensor in written.values()),
        shards=len({tensor.file for tensor in written.values()}),
        resumed=resumed,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Quantization(Rewrite):
    """A plan resolved against a dense checkpoint. A unit is a tensor.

    Attributes:
        quantizer: Chooses the codes.
        formats: The plan for config.json.
        schemes: Schemes of the tensors to quantize, by name.
        names: The model's names for tensors that are one of its own as they are.
        unexpected: Tensors that fit no parameter of the model.
        model: On the meta device.
        heads: Output heads that get a weight of their own -> the embeddings that had it.
        embeddings: Names of those of the tensors to quantize that are embeddings.
        dropped: Tensors that are left out, and why.
    """

    stored: Mapping[str, Tensors]
    quantizer: Quantizer
    formats: Mapping[str, str | None]
    schemes: Mapping[str, str]
    names: Mapping[str, str]
    unexpected: tuple[str, ...]
    model: Any
    heads: Mapping[str, str]
    embeddings: frozenset[str]
    dropped: Mapping[str, str]

    @property
    def new_config(self) -> dict[str, Any]:
        return {**self.config, "quantization_config": quantization_config(self.formats)}

    @property
    def quantized(self) -> list[tuple[str, tuple[int, int]]]:
        shapes = ((s, self.stored[name].shape) for name, s in self.schemes.items())
        return [(scheme, (shape[0], shape[1])) for scheme, shape in shapes]

    @property
    def how(self) -> str:
        return type(self.quantizer).__name__

    def outputs(self, units: list[str]) -> dict[str, int]:
        each = (outputs(name, self.stored[name], self.schemes.get(name)) for name in units)
        return {name: size for part in each for name, size in part.items()}

    def write(self, unit: str, shard: ShardWriter) -> None:
        scheme = self.schemes.get(unit)
        if unit in self.unexpected:
            self.copy(unit, shard)
            return
        weight = self.stored[unit].read()
        check_finite(weight, unit)
        if scheme is None:
            shard.add(unit, weight)
            return
        fmt, embedding = parse_scheme(scheme)[0], unit in self.embeddings
        quantize = quantize_embedding if embedding else quantize_weight
        packed = quantize(self.quantizer, weight, fmt)
        for key, tensor in packed.tensors().items():
            shard.add(f"{unit.removesuffix('weight')}{key}", tensor)


def plan_quantization(
    source: Path,
    spec: Spec | Plan,
    quantizer: Quantizer,
    shard_bytes: int = SHARD_BYTES,
    as_in_model: bool = False,
) -> Quantization:
    """Decide by headers and config.json what becomes of every tensor.

    Args:
        source: Directory of a dense model.
        spec: As in `quantize_`.
        quantizer: Chooses the codes.
        shard_bytes: How much of the source goes into one file.
        as_in_model: Also make dense tensors what they are in the model, where transformers makes
            them of others.

    Raises:
        FileNotFoundError: The source is incomplete.
        InvalidInput: The source is damaged or quantized already, the plan does not fit its
            layers, or its tensors do not fit its config.json.
    """
    config = dense_config(source)
    model, tensors = bare_model(source), stored_tensors(source)
    given = tensors
    vars(model.config).pop("quantization_config", None)
    planned, formats = quantized_plan(outline_of(model), spec, quantizer)
    heads, sharing = untied_heads(model, planned), sharing_heads(model, planned)
    if heads or model.has_own_head:
        config = untied_config(config)
    if heads:
        given = tensors | heads_of_their_own(tensors, model, heads)
        untie(model.config)
        model = empty_model(source, type(model), model.config)
    layers = linear_schemes(model, formats)
    found = layout(given, model, lambda name: as_in_model or name.removesuffix(".weight") in layers)
    twice = {f"{head}.weight": f"{words} has its weight" for head, words in sharing.items()}
    dropped = {name: twice[own] for name, own in found.names.items() if own in twice}
    found = found.without(twice).named_for_codes(model, layers)
    check_layout(source, found, model)
    where = {name.removesuffix(".weight"): key for key, name in found.names.items()}
    coded = {layer: where[layer] for layer in layers if layer not in sharing}
    settings = {"formats": [*map(list, formats.items())], "quantizer": repr(quantizer)}
    return Quantization(
        stored={**found.stored, **weights_of(model, coded, found.stored)},
        config=config,
        shards=into_shards(found.stored, {}, (), shard_bytes),
        manifest=manifest_of(source, tensors, shard_bytes, **settings),
        quantizer=quantizer,
        formats=formats,
        schemes={name: layers[layer] for layer, name in coded.items()},
        names=found.names,
        unexpected=found.unexpected,
        model=model,
        heads=heads,
        embeddings=frozenset(where[name] for name in embedding_layers(model).keys() & layers),
        dropped=dropped,
    )


def check_layout(source: Path, found: Layout, model: Any) -> None:
    """InvalidInput where tensors are not those of a dense model; a warning of those it leaves."""
    check_missing(source, found.missing, found.unexpected)
    check_fit(source, found.names, found.stored, model.state_dict())
    stated = stated_quantization(source, read_json(source / "config.json"))
    if found.unexpected and stated:  # what lies beside weights that are codes
        raise quantized_already(source, stated)
    tell_strange(source, [*found.unexpected])


def weights_of(
    model: Any, layers: Mapping[str, str], stored: Mapping[str, Tensors]
) -> dict[str, Tensors]:
    """Weights (N, K) of layers to quantize, by their names in the checkpoint.

    Args:
        model: On the meta device.
        layers: Those names, by the layers'.
        stored: The checkpoint's tensors.

    Raises:
        InvalidInput: One is not what the model's config.json says.
    """
    out, experts = {}, expert_layers(model)
    shapes = dense_layers(model) | embedding_layers(model)
    for layer, name in layers.items():
        one, shape = stored[name], tuple(shapes[layer])
        if layer not in experts and is_conv1d(model.get_submodule(layer)):
            one = transposed(one)
        if one.shape != shape or one.torch_dtype not in WEIGHT_DTYPES:
            raise InvalidInput(
                f"{name}: config.json asks for floats of shape {shape}, {one.file.name} "
                f"holds {one.dtype} of {one.shape}"
            )
        out[name] = one
    return out


def heads_of_their_own(
    tensors: Mapping[str, Stored], model: Any, heads: Mapping[str, str]
) -> dict[str, Stored]:
    """Stored tensors of embeddings, by the names of the heads that share them."""
    found = layout(tensors, model, lambda name: False)
    where = {name: key for key, name in found.names.items()}
    shared = {f"{head}.weight": where.get(f"{words}.weight") for head, words in heads.items()}
    return {head: tensors[key] for head, key in shared.items() if key is not None}


def outputs(name: str, stored: Tensors, scheme: str | None) -> dict[str, int]:
    """Names and bytes of the tensors that one of the source becomes."""
    if scheme is None:
        return {name: stored.nbytes}
    sizes = tensor_shapes(parse_scheme(scheme)[0], (stored.shape[0], stored.shape[1]))
    return {
        f"{name.removesuffix('weight')}{key}": math.prod(shape) * entry.default_dtype.itemsize
        for key, (shape, entry) in sizes.items()
    }
