"""`anybit convert`: checkpoints of other tools, streamed tensor by tensor into ours.

A tool is one module with one function, `layers(config, stored)`, which says by headers, config and
a few small tensors what every layer becomes; see `layer.py`. What is exact is kept in codes.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit import __version__
from anybit.experts import published
from anybit.files import ShardWriter, Stored, check_absent, megabytes, read_json, stored_tensors
from anybit.foreign.layer import Layer, owner
from anybit.format import Packed, tensor_shapes
from anybit.quantize import METHOD, is_head, quantization_config
from anybit.stream import SHARD_BYTES, Work, fingerprint, into_shards, run, skeleton, unit_sizes

# quant_method in config.json: the module that reads such checkpoints.
READERS = {
    "gptq": "anybit.foreign.gptq",
    "awq": "anybit.foreign.awq",
    "hqq": "anybit.foreign.hqq",
    "aqlm": "anybit.foreign.aqlm",
    "compressed-tensors": "anybit.foreign.compressed_tensors",
    "bitsandbytes": "anybit.foreign.bitsandbytes",
}
KV_SCALES = (".k_scale", ".v_scale")  # theirs are per tensor, and mean something else here
DENSE = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` did.

    formats: layers and the formats that hold them exactly. decoded: layers that are dense now, in
    the model's dtype, and why. dropped: biases of zeros that the model has no place for, and scales
    of the KV cache. strangers: layers that transformers' model has not under their names, such as
    experts that it stores in another shape.
    """

    out: Path
    method: str
    formats: Mapping[str, str]
    decoded: Mapping[str, str]
    dropped: tuple[str, ...]
    strangers: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        counts = Counter(self.formats.values())
        what = [f"{count} layers are {spec}" for spec, count in counts.most_common()]
        if self.decoded:
            what.append(f"{len(self.decoded)} layers are dense now")
        if self.dropped:
            what.append(f"{len(self.dropped)} tensors left out, such as {self.dropped[0]}")
        lines = [
            f"{self.out}: from {self.method}, {', '.join(what)}; "
            f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)} in "
            f"{self.seconds:.3g} s"
        ]
        for reason, count in Counter(self.decoded.values()).items():
            names = [name for name, why in self.decoded.items() if why == reason]
            others = f" and {count - 1} others" if count > 1 else ""
            lines.append(f"decoded, as no format of anybit holds it: {names[0]}{others}: {reason}")
        if self.strangers:
            lines.append(
                f"not in transformers' model, and kept: {len(self.strangers)} layers, such as "
                f"{self.strangers[0]}"
            )
        return "\n".join(lines)


def convert_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool | None = None,
) -> Converted:
    """Convert another tool's quantized checkpoint (safetensors) to one of anybit's.

    Dequantized weights equal the tool's own formula in fp32, bit for bit; layers that no format of
    ours can hold are decoded to the model's dtype, and named in the result. Memory, resuming,
    overwrite and shard_bytes: as in `quantize_checkpoint`.

    Raises ValueError for a tool or a layout that cannot be read (it names what was found), and for
    tensors of wrong shapes, dtypes or codes; FileNotFoundError and FileExistsError as
    `quantize_checkpoint` does.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out).absolute()
    check_absent(out, overwrite)
    if source.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} would replace its own source {source}; choose another directory")
    work = plan_conversion(source, shard_bytes)
    after, _ = run(work, source, out, overwrite, show_progress, "converting")
    return Converted(
        out=out,
        method=work.method,
        formats={name: x.format.spec for name, x in work.layers.items() if x.format},
        decoded={name: x.reason for name, x in work.layers.items() if x.format is None},
        dropped=work.dropped,
        strangers=work.strangers,
        bytes_before=work.source_bytes,
        bytes_after=after,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Conversion(Work):
    """What becomes what. Shards list layers by name, and all other tensors by theirs."""

    method: str
    layers: Mapping[str, Layer]
    dense: torch.dtype
    dropped: tuple[str, ...]

    @property
    def new_config(self) -> dict[str, Any]:
        config = {k: v for k, v in self.config.items() if k != "quantization_config"}
        if any(self.formats.values()):
            config["quantization_config"] = quantization_config(self.formats)
        return config

    def nbytes(self, name: str) -> int:
        return sum(self.stored[n].nbytes for n in self.parts(name))

    def parts(self, name: str) -> set[str]:
        return set(self.layers[name].tensors) if name in self.layers else {name}

    def outputs(self, names: list[str]) -> dict[str, int]:
        out = {}
        for name in names:
            layer = self.layers.get(name)
            if layer is None:
                out[name] = self.stored[name].nbytes
            elif layer.format is None:
                out[f"{name}.weight"] = math.prod(layer.shape) * self.dense.itemsize
            else:
                for key, (shape, entry) in tensor_shapes(layer.format, layer.shape).items():
                    dtype = torch.int32 if entry is None else entry.default_dtype
                    size = layer.dtypes.get(key, dtype).itemsize
                    out[f"{name}.{key}"] = math.prod(shape) * size
        return out

    def write(self, name: str, shard: ShardWriter) -> None:
        if name not in self.layers:
            shard.copy(name, self.stored[name])
            return
        weight = self.layers[name].read()
        if isinstance(weight, Packed):
            for key, tensor in weight.tensors().items():
                shard.add(f"{name}.{key}", tensor)
        else:
            shard.add(f"{name}.weight", weight.to(self.dense))


def plan_conversion(source: Path, shard_bytes: int) -> Conversion:
    """Decide everything by headers, config.json and small tensors, before any weight is read."""
    stored, config = stored_tensors(source), read_json(source / "config.json")
    method, found = read_layers(source, config, stored)
    model = skeleton(source)
    model_type = config.get("model_type")
    modules = {published(name, model_type): m for name, m in model.named_modules()}
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    dropped = dict.fromkeys(name for name in stored if name.endswith(KV_SCALES))
    for name, layer in found.items():
        linear = linears.get(name)
        if linear is None and name in modules:  # it would be initialized at random
            raise ValueError(
                f"{name} is a {type(modules[name]).__name__} in {type(model).__name__}, and only "
                "linear layers can be converted; use this model with the tool that quantized it"
            )
        if linear is not None and tuple(linear.weight.shape) != layer.shape:
            raise ValueError(
                f"{name}: config.json asks for a weight of {tuple(linear.weight.shape)}, the "
                f"checkpoint holds one of {layer.shape}"
            )
        bias = stored.get(f"{name}.bias")
        if linear is not None and linear.bias is None and bias is not None:
            if bias.read().any():
                raise ValueError(f"{name}.bias: not zero, but the model has no bias there")
            dropped[f"{name}.bias"] = None
    unit_of = {tensor: name for name, layer in found.items() for tensor in layer.tensors}
    for name in stored:
        layer_of = owner(name, found)
        if layer_of and name not in unit_of and name != f"{layer_of}.bias":
            raise ValueError(
                f"{source}: {method} has no tensor {name!r} beside "
                f"{found[layer_of].tensors[0]!r} in a layout that anybit knows"
            )
    formats = plan_for(dict.fromkeys(linears) | specs(found))
    dense = DENSE.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float16)
    manifest = {
        "anybit": __version__,
        "convert": method,
        "formats": [list(pair) for pair in formats.items()],
        "source": fingerprint(source, stored),
        "shard_bytes": shard_bytes,
    }
    return Conversion(
        stored=stored,
        config=config,
        formats=formats,
        schemes={},
        shards=into_shards(unit_sizes(stored, unit_of, dropped), shard_bytes),
        manifest=manifest,
        strangers=tuple(name for name in found if name not in linears),
        unmatched=(),
        method=method,
        layers=found,
        dense=dense,
        dropped=tuple(dropped),
    )


def read_layers(
    source: Path, config: Mapping[str, Any], stored: Mapping[str, Stored]
) -> tuple[str, dict[str, Layer]]:
    """The tool that quantized a checkpoint, and its quantized layers."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise ValueError(
            f"{source} is not quantized: its config.json has no quantization_config; quantize it "
            "with `anybit quantize`"
        )
    method = quantization.get("quant_method")
    if method == METHOD:
        raise ValueError(f"{source} is a checkpoint of anybit already; load it with anybit.load")
    if method not in READERS:
        raise ValueError(
            f"{source} is quantized with {method!r}, which cannot be read; known: "
            f"{', '.join(READERS)}"
        )
    found: dict[str, Layer] = import_module(READERS[method]).layers(quantization, stored)
    if not found:
        raise ValueError(
            f"{source}: config.json says {method}, but no tensor is named like a quantized layer's "
            f"(there are {', '.join(list(stored)[:3])}, ...)"
        )
    return method, found


def specs(layers: Mapping[str, Layer]) -> dict[str, str | None]:
    return {name: layer.format.spec if layer.format else None for name, layer in layers.items()}


def plan_for(schemes: Mapping[str, str | None]) -> dict[str, str | None]:
    """A short plan that gives every layer its scheme: the commonest for "*", then the others."""
    counts = Counter(s for name, s in schemes.items() if s and not is_head(name))
    common = counts.most_common(1)[0][0] if counts else None
    rest = {n: s for n, s in sorted(schemes.items()) if s != (None if is_head(n) else common)}
    return {"*": common, **rest}
