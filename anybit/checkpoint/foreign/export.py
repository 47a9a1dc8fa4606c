"""`anybit export`: checkpoints of ours as compressed-tensors, which other engines read.

Only what that format says exactly is written: integers of 2 to 8 bits with a scale, and if need be
an integer zero point, per group or per row. See `compressed_tensors.py` for the layout; codes cross
words, as its versions from 0.19 on write and read them.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit.checkpoint.architecture import meta_model
from anybit.checkpoint.foreign.base import check_codes
from anybit.checkpoint.foreign.bitfields import pack
from anybit.checkpoint.foreign.compressed_tensors import BITS, DENSE_SINCE, FORMAT, TOOL
from anybit.checkpoint.rewrite import (
    SHARD_BYTES,
    Rewrite,
    check_paths,
    fingerprint,
    into_shards,
    rewrite,
    unit_sizes,
)
from anybit.core.packed import Packed, is_codes, tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.directory import megabytes, read_json
from anybit.files.safetensors import ShardWriter, Stored, stored_tensors
from anybit.formats.integer import Integer
from anybit.nn.experts import published
from anybit.nn.plan import METHOD, patterns_for, stored_plan
from anybit.version import __version__

TARGETS = (TOOL,)
KV_SCALES = (".k_scale", ".v_scale")  # ours are per channel, and mean nothing there


@dataclass(frozen=True)
class Exported:
    """What `export_checkpoint` did.

    Attributes:
        out: The directory that was written.
        layers: Number of quantized layers.
        dropped: Tensors that the other layout has no place for.
        bytes_after: Of all tensors of the output.
        seconds: Time that this run took.
    """

    out: Path
    layers: int
    dropped: tuple[str, ...]
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        left = f", {len(self.dropped)} scales of the KV cache left out" if self.dropped else ""
        return (
            f"{self.out}: {self.layers} layers as {TOOL} ({FORMAT}){left}; "
            f"{megabytes(self.bytes_after)} in {self.seconds:.3g} s"
        )


def export_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = TOOL,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool | None = None,
) -> Exported:
    """Write an anybit checkpoint in another tool's layout, with the same weights bit for bit.

    Memory and resuming: as in `quantize_checkpoint`.

    Args:
        source: Directory of a checkpoint of anybit.
        out: Directory to write.
        to: The other tool, one of `TARGETS`.
        overwrite: As in `quantize_checkpoint`.
        shard_bytes: As in `quantize_checkpoint`.
        show_progress: As in `quantize_`.

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
    source, out = Path(source), Path(out).absolute()
    check_paths(source, out, overwrite)
    work = plan_export(source, shard_bytes)
    after, _ = rewrite(work, source, out, overwrite, show_progress, "exporting")
    return Exported(out, len(work.layers), work.dropped, after, time.monotonic() - started)


@dataclass(frozen=True)
class Export(Rewrite):
    """How our checkpoint becomes another tool's. A unit is a quantized layer, or a tensor.

    Attributes:
        layers: Formats and shapes (N, K) of the quantized layers, by name.
        kept: Linear layers that stay dense.
        dropped: Tensors that are left out.
    """

    layers: Mapping[str, tuple[Integer, tuple[int, int]]]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def new_config(self) -> dict[str, Any]:
        return {**self.config, "quantization_config": quantization_config(self.layers, self.kept)}

    def parts(self, unit: str) -> list[str]:
        if unit not in self.layers:
            return [unit]
        return [f"{unit}.{key}" for key in tensor_shapes(*self.layers[unit])]

    def outputs(self, units: list[str]) -> dict[str, int]:
        out = {}
        for name in units:
            if name not in self.layers:
                out[name] = self.stored[name].nbytes
                continue
            fmt, (n, k) = self.layers[name]
            scale = self.stored[f"{name}.scale"]
            out[f"{name}.weight_packed"] = n * math.ceil(k * fmt.bits / 32) * 4
            out[f"{name}.weight_scale"] = scale.nbytes
            out[f"{name}.weight_shape"] = 16
            if fmt.zero:
                words = math.ceil(n * fmt.bits / 32)
                out[f"{name}.weight_zero_point"] = words * scale.shape[1] * 4
        return out

    def write(self, unit: str, shard: ShardWriter) -> None:
        if unit not in self.layers:
            as_it_is = self.stored[unit]
            assert isinstance(as_it_is, Stored)
            shard.copy(unit, as_it_is)
            return
        fmt, shape = self.layers[unit]
        tensors = {key: self.stored[f"{unit}.{key}"].read() for key in tensor_shapes(fmt, shape)}
        packed = Packed.from_tensors(fmt, shape, tensors, unit)
        shard.add(f"{unit}.weight_packed", pack(packed.codes(), fmt.bits))
        shard.add(f"{unit}.weight_scale", packed.grid["scale"])
        shard.add(f"{unit}.weight_shape", torch.tensor(shape))
        if fmt.zero:
            along_n = pack(packed.grid["zero"].T.contiguous(), fmt.bits)
            shard.add(f"{unit}.weight_zero_point", along_n.T.contiguous())


def plan_export(source: Path, shard_bytes: int) -> Export:
    """Which layer becomes what; InvalidInput when one of them cannot."""
    stored, config = stored_tensors(source), read_json(source / "config.json")
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != METHOD:
        raise InvalidInput(f"{source} is no checkpoint of anybit; quantize or convert it first")
    plan = stored_plan(quantization)
    modules = meta_model(source).named_modules()
    model_type = config.get("model_type")
    linears = {published(n, model_type): m for n, m in modules if isinstance(m, nn.Linear)}
    layers: dict[str, tuple[Integer, tuple[int, int]]] = {}
    reasons: dict[str, str] = {}
    for name in dict.fromkeys(key.rpartition(".")[0] for key in stored if is_codes(key)):
        matches = patterns_for(name, plan)
        scheme = plan[matches[-1]] if matches else None
        if name not in linears or scheme is None:
            what = "its model has no such layer" if name not in linears else "it names no format"
            raise InvalidInput(f"{source}: has codes for {name}, but by config.json {what}")
        shape = (linears[name].out_features, linears[name].in_features)
        exact = integers(scheme, name, shape, stored)
        if isinstance(exact, Integer):
            layers[name] = (exact, shape)
        else:
            reasons[name] = exact
    if reasons:
        name = next(iter(reasons))
        raise InvalidInput(
            f"{source}: {len(reasons)} of {len(reasons) + len(layers)} layers cannot be exported "
            f"exactly, the first is {name}: {reasons[name]}"
        )
    dropped = tuple(name for name in stored if name.endswith(KV_SCALES))
    owner = {f"{name}.{key}": name for name in layers for key in tensor_shapes(*layers[name])}
    manifest = {
        "anybit": __version__,
        "export": TOOL,
        "source": fingerprint(source, stored),
        "shard_bytes": shard_bytes,
    }
    return Export(
        stored=stored,
        config=config,
        shards=into_shards(unit_sizes(stored, owner, dropped), shard_bytes),
        manifest=manifest,
        layers=layers,
        kept=tuple(name for name in linears if name not in layers),
        dropped=dropped,
    )


def integers(
    scheme: str, name: str, shape: tuple[int, int], stored: Mapping[str, Stored]
) -> Integer | str:
    """The format of a layer that compressed-tensors can express exactly, or why it cannot."""
    fmt, activation = parse_scheme(scheme)
    if activation is not None:
        return f"{scheme} quantizes activations, by another rule than {TOOL}"
    if not isinstance(fmt, Integer) or fmt.bits not in BITS:
        return f"{scheme} is not among the integers of 2 to 8 bits, which {TOOL} has"
    if fmt.order:
        return f"the columns of a group lie apart (act-order), which {TOOL} reads no more"
    keys = tensor_shapes(fmt, shape)
    metas = {key: stored[f"{name}.{key}"].meta() for key in keys if f"{name}.{key}" in stored}
    Packed.from_tensors(fmt, shape, metas, name)
    if fmt.zero:
        zero = stored[f"{name}.zero"]
        if zero.torch_dtype != torch.uint8:
            return f"its zero points are {zero.dtype}, {TOOL} has integers"
        check_codes(zero.read(), 2**fmt.bits - 1, f"{name}.zero")
    return fmt


def quantization_config(
    layers: Mapping[str, tuple[Integer, tuple[int, int]]], kept: tuple[str, ...]
) -> dict[str, Any]:
    """Groups name their layers, but the last, of the commonest format, is for all others."""
    counts = Counter(fmt for fmt, _ in layers.values()).most_common()
    groups = {}
    for i, (fmt, _) in enumerate(reversed(counts), 1):
        names = [name for name, (other, _) in layers.items() if other == fmt]
        groups[f"group_{i}"] = {
            "targets": names if i < len(counts) else ["Linear"],
            "weights": {
                "num_bits": fmt.bits,
                "type": "int",
                "symmetric": not fmt.zero,
                "strategy": "group" if fmt.group else "channel",
                "group_size": fmt.group or None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
    return {
        "quant_method": TOOL,
        "format": FORMAT,
        "quantization_status": "compressed",
        "version": ".".join(map(str, (*DENSE_SINCE, 0))),
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }
