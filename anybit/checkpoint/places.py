"""Which layer of a model each layer of a checkpoint is, whatever a tool calls it."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from anybit.checkpoint.names import (
    Names,
    ignored_unexpected,
    is_merge,
    known_layout,
    missing_in,
    natural,
    targets_of,
)
from anybit.nn.experts import expert_layers, layers_of

EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Place(NamedTuple):
    """Where a layer of a model is stored.

    Attributes:
        saved: Its name in the model that was saved, which plans go by.
        stored: Its name in the checkpoint.
    """

    saved: str
    stored: str


def places(table: Names, layers: Iterable[str]) -> dict[str, Place]:
    """The places of a model's layers, by its names; experts are one by one.

    Args:
        table: Of the model.
        layers: Names in the checkpoint.
    """
    same = [Place(own, own) for own in sorted(layers, key=natural)]
    renamed = [Place(name_of(table, own), own) for _, own in same]
    out: dict[str, Place] = {}
    for each in (same, renamed):  # the surer come later, and win
        # A base model (AutoModel) has shorter names than the model that was saved, or longer.
        out |= {f"{table.base}.{place.saved}": place for place in each}
        out |= {place.saved.removeprefix(f"{table.base}."): place for place in each}
        out |= {place.saved: place for place in each}
    return out


def saved_names(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The names, in the model that was saved, of the stored layers that a model has.

    Args:
        model: Of transformers, its experts not taken apart.
        layers: Names in the checkpoint.
    """
    where = places(Names(model), layers)
    own = [*(name for name, _ in model.named_modules()), *expert_layers(model)]
    return {where[name].stored: where[name].saved for name in own if name in where}


def name_of(table: Names, layer: str) -> str:
    """The model's name for a stored layer by transformers' tables, the base model's aside."""
    from transformers.core_model_loading import rename_source_key

    weight = f"{layer}.weight"
    found, pattern = rename_source_key(weight, table.renamings, table.converters)
    if pattern is None:
        return str(found).removesuffix(".weight")
    converter: Any = next(c for c in table.converters if pattern in c.source_patterns)
    of, _, tensor = found.rpartition(".")
    number = EXPERT.search(layer)
    keys = next((known_layout(m).layers.get(tensor) for m in table.fused.values()), None) or ()
    if number and is_merge(converter) and len(keys) == len(converter.source_patterns):
        return f"{of}.{number[1]}.{keys[converter.source_patterns.index(pattern)]}"
    return table.renamed(weight).removesuffix(".weight")


def without_place(table: Names, layers: Iterable[str]) -> list[str]:
    """Stored layers of experts of a model's blocks that it has not, sorted.

    transformers would make up the experts in their place. A head for further tokens lies in a block
    of its own, and is missed by none.

    Args:
        table: Of the model.
        layers: Names in the checkpoint that are no layers of the model.
    """
    blocks = {table.base, *(name for name, _ in table.model.named_modules())}
    ignored = ignored_unexpected(table.model)

    def missed(layer: str) -> bool:
        own = table.renamed(layer)
        block = own.partition(".experts.")[0].rpartition(".")[0]
        there = block in blocks or f"{table.base}.{block}" in blocks
        return ".experts." in layer and there and not ignored(layer) and not ignored(own)

    return sorted(filter(missed, layers))


def missing(
    table: Names, model: nn.Module, stored: Iterable[str], coded: Iterable[str]
) -> list[str]:
    """Tensors of a model that no file holds, and that transformers would make up.

    Args:
        table: Of the model.
        model: Its experts one by one.
        stored: Names of dense tensors in the checkpoint.
        coded: The model's names of its quantized layers.
    """
    covered = {f"{name}.weight" for name in coded}
    for name in sorted(stored, key=natural):
        found, converter, _ = table.in_model(name)
        layer, _, end = name.rpartition(".")
        covered.add(f"{name_of(table, layer)}.{end}")
        targets = [found] if converter is None else targets_of(found, converter, table.state)
        covered |= {*targets}
        if converter is None or not is_merge(converter):  # else it is of one expert alone
            covered |= {one for target in targets for one in one_by_one(table, target)}
    return missing_in(model, covered)


def one_by_one(table: Names, tensor: str) -> set[str]:
    """The tensors of single experts that a fused one holds; of any other, none."""
    of, _, key = tensor.rpartition(".")
    if of not in table.fused:
        return set()
    keys = known_layout(table.fused[of]).layers.get(key.removesuffix("_bias"), ())
    end = "bias" if key.endswith("_bias") else "weight"
    layers = layers_of(table.fused[of])
    return {f"{of}.{layer}.{end}" for layer in layers if layer.rpartition(".")[2] in keys}
