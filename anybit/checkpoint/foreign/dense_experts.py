"""Experts of a block in which none is quantized: as transformers reads them.

Beside experts in codes, dense ones keep names of their own. Without codes, nothing but
transformers' tables tells what a tensor is, so it is stored under a name that they know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import Layer
from anybit.checkpoint.names import Names, is_merge, known_layout
from anybit.checkpoint.rewrite import Source
from anybit.nn.experts import layers_of


class Dense(Source, Protocol):
    """A dense tensor of the source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its numbers."""

    @property
    def dtype(self) -> str:
        """The source's name for it."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """What its numbers are read as."""

    def meta(self) -> Tensor:
        """The same without numbers."""


@dataclass(frozen=True)
class Decoded:
    """A quantized layer that becomes dense, as a tensor (N, K) of `torch_dtype`."""

    layer: Layer
    nbytes: int
    torch_dtype: torch.dtype

    def read(self) -> Tensor:
        return self.layer.dense().to(self.torch_dtype)


@dataclass(frozen=True)
class Fused:
    """The tensor of all experts of a block.

    Attributes:
        experts: The tensors of each, one below the other.
        turned: Whether the model has them transposed.
        shape: Of the model's tensor.
        torch_dtype: What it is written in.
        first: A tensor that tells where it came from.
    """

    experts: Sequence[Sequence[Dense | Decoded]]
    turned: bool
    shape: tuple[int, ...]
    torch_dtype: torch.dtype
    first: Dense

    @property
    def file(self) -> Path:
        return self.first.file

    @property
    def dtype(self) -> str:
        return self.first.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.experts for part in parts)

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    def read(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.torch_dtype)
        for e, parts in enumerate(self.experts):
            one = torch.cat([part.read() for part in parts])
            out[e] = one.T if self.turned and one.ndim == 2 else one
        return out


def as_transformers_reads(
    names: Names,
    own: Mapping[str, str],
    stored: Mapping[str, Any],
    layers: Mapping[str, Layer],
    dtype: torch.dtype,
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The tensors and layers of a checkpoint, those of experts without codes as above.

    Args:
        names: Of the model.
        own: The model's names of the layers by those in the checkpoint, experts one by one.
        stored: The checkpoint's tensors.
        layers: Its layers in codes of another tool.
        dtype: Of layers that are decoded.
    """
    there = {name: key for key, name in own.items()}
    new_name, fused = dict[str, str](), dict[str, Fused]()
    for of, module in names.fused.items():
        layout = known_layout(module)
        block = (there.get(f"{of}.{layer}", "") for layer in layers_of(module))
        if any(layer in layers and layers[layer].format for layer in block):
            continue
        for tensor in layout.tensors:
            count, target = len(module._parameters[tensor]), f"{of}.{tensor}"
            keys = layout.layers[tensor.removesuffix("_bias")]
            end = "bias" if tensor.endswith("_bias") else "weight"
            each = [[there.get(f"{of}.{e}.{key}", "") for key in keys] for e in range(count)]
            flat = [layer for one in each for layer in one]
            if not all(layer in layers or f"{layer}.{end}" in stored for layer in flat):
                continue
            if all(names.in_model(f"{layer}.{end}")[0] == target for layer in flat):
                continue
            known = published_names(names, target, len(keys), count)
            if known:
                new_name |= {
                    f"{layer}.{end}": name
                    for one, known_names in zip(each, known, strict=True)
                    for layer, name in zip(one, known_names, strict=True)
                }
                continue
            parts = [[part_of(x, end, stored, layers, dtype) for x in one] for one in each]
            name, first = f"{flat[0]}.{end}", parts[0][0]
            sources = layers[flat[0]].tensors if flat[0] in layers else (name,)
            fused[sources[0]] = Fused(
                parts,
                layout.transposed,
                tuple(module._parameters[tensor].shape),
                first.torch_dtype,
                stored[sources[0]],
            )
            new_name |= {f"{layer}.{end}": names.stored(target) for layer in flat}
    return moved(stored, layers, new_name, fused)


def published_names(names: Names, target: str, keys: int, count: int) -> list[list[str]]:
    """Names for each expert's parts of a fused tensor that transformers merges; [] if it has none.

    Args:
        names: Of the model.
        target: The model's name for the fused tensor.
        keys: How many layers of an expert it holds.
        count: Of experts.
    """
    for converter in names.converters:
        pattern = converter.target_patterns[0]
        if not is_merge(converter) or len(converter.source_patterns) != keys:
            continue
        if not target.endswith(pattern):
            continue
        start = target.removesuffix(pattern)
        ends = [source.replace("\\", "") for source in converter.source_patterns]
        out = [
            [names.before(start + end.replace("*", str(e), 1)) for end in ends]
            for e in range(count)
        ]
        if all(names.in_model(name)[0] == target for one in out for name in one):
            return out
    return []


def part_of(
    name: str, end: str, stored: Mapping[str, Any], layers: Mapping[str, Layer], dtype: torch.dtype
) -> Any:
    """A dense tensor, or a layer in codes that becomes one."""
    if name not in layers or end == "bias":
        return stored[f"{name}.{end}"]
    nbytes = sum(stored[tensor].nbytes for tensor in layers[name].tensors)
    return Decoded(layers[name], nbytes, dtype)


def moved(
    stored: Mapping[str, Any],
    layers: Mapping[str, Layer],
    new_name: Mapping[str, str],
    fused: Mapping[str, Fused],
) -> tuple[dict[str, Any], dict[str, Layer]]:
    """Tensors and layers by their new names, in the same order.

    Args:
        stored: Tensors.
        layers: Those of them that are in codes.
        new_name: Of tensors, and of the weights of layers, that get another.
        fused: What takes the place of several, by the first tensor that it is read from.
    """
    gone = {name.removesuffix(".weight") for name in new_name} & layers.keys()
    unit = {tensor: f"{name}.weight" for name in gone for tensor in layers[name].tensors}
    merged = {new_name[unit.get(name, name)] for name in fused}
    out: dict[str, Any] = {}
    for name, tensor in stored.items():
        new = new_name.get(unit.get(name, name))
        if new in merged:
            if name in fused:
                out[new] = fused[name]
        else:
            out[name if new is None or name in unit else new] = tensor
    kept = {name: layer for name, layer in layers.items() if name not in gone}
    renamed = {name: new_name[f"{name}.weight"] for name in layers if name in gone}
    kept |= {
        new.removesuffix(".weight"): layers[name]
        for name, new in renamed.items()
        if new not in merged
    }
    return out, kept
