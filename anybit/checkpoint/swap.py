"""Empty layers in the place of a model's own, which a checkpoint's tensors will fill."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from anybit.checkpoint.names import Names
from anybit.checkpoint.places import Place, places, without_place
from anybit.core.packed import Packed, is_codes, tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.nn.embedding import QuantEmbedding, embedding_layers
from anybit.nn.experts import expert_layers, split
from anybit.nn.linear import QuantLinear
from anybit.nn.model import is_linear, replace, under_all_names, weight_of
from anybit.nn.plan import Plan, canonical, patterns_for
from anybit.nn.quantized import Quantized
from anybit.nn.tied import forget_ties, sharing_heads, tied_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def swap_for_stored(
    model: "PreTrainedModel", formats: Plan, stored: Mapping[str, Stored]
) -> tuple[dict[str, Quantized], dict[str, str]]:
    """Empty layers, of the dtypes that are stored, for the quantized layers of a checkpoint.

    Args:
        model: On the meta device, its experts not taken apart.
        formats: The checkpoint's plan.
        stored: Its tensors.

    Returns:
        The layers by name, and the model's names of stored tensors, theirs and those of experts, by
        those in the checkpoint.

    Raises:
        InvalidInput: The plan, the model and the checkpoint's tensors do not agree.
    """
    coded = {key.rpartition(".")[0] for key in stored if is_codes(key)}
    layers = coded | {key.removesuffix(".weight") for key in stored if key.endswith(".weight")}
    table = Names(model)
    whole = places(table, layers)
    fused = expert_layers(model)
    split(model, [name for name in fused if name in whole])
    words = embedding_layers(model)
    tied = {head: own for head, own in tied_heads(model).items() if own in words}
    linear = {n: m for n, m in model.named_modules() if is_linear(m) or n in words}
    where = {name: whole.get(name, Place(name, name)) for name in linear}
    for head, own in tied.items():  # its codes are stored once
        if where[own].stored in coded and head in where and where[head].stored not in layers:
            where[head] = Place(where[head].saved, where[own].stored)
    absent = {name for name, (_, own) in where.items() if own not in layers}
    new = absent & new_layers(model) if absent else set()
    out, placed, names = dict[str, Quantized](), set[str](), dict[str, str]()
    for name, module in linear.items():
        there, own = where[name]
        if name in new:
            continue
        patterns = patterns_for(there, formats, name in words)
        scheme = formats[patterns[-1]] if patterns else None
        if (scheme is not None) != (own in coded):
            raise InvalidInput(
                f"{name}: config.json says {scheme or 'not quantized'}, but the checkpoint holds "
                f"{'codes' if own in coded else 'no codes'} for it; copy it again"
            )
        placed.add(own)
        if scheme is not None:
            layer = stored_layer(canonical(scheme), module, own, stored)
            out[name] = layer
            if name not in tied or where[tied[name]].stored != own:
                names |= {f"{own}.{key}": f"{name}.{key}" for key in layer.names}
        if name in fused and own in layers:  # transformers' table would merge what is not codes
            ends = [f".{key}" for key in ("weight", "bias") if f"{own}.{key}" in stored]
            names |= {own + end: name + end for end in ends}
    if experts := without_place(table, coded - placed):  # else made up, with a mere warning
        raise InvalidInput(
            f"{len(experts)} layers of experts, such as {experts[0]}, are quantized one by one, "
            f"and transformers' {type(model).__name__} has no such layers; anybit.LLM and vLLM "
            "have, where they know the model"
        )
    return out, names


def stored_layer(scheme: str, old: nn.Module, name: str, stored: Mapping[str, Stored]) -> Quantized:
    """An empty layer in the place of `old`, of the dtypes that the checkpoint has under `name`."""
    fmt, activation = parse_scheme(scheme)
    weight = old.weight if isinstance(old, nn.Embedding) else weight_of(old)
    shape = cast(tuple[int, int], tuple(weight.shape))
    keys = (key for key in tensor_shapes(fmt, shape) if f"{name}.{key}" in stored)
    tensors = {key: stored[f"{name}.{key}"].meta() for key in keys}
    return in_place_of(old, Packed.from_tensors(fmt, shape, tensors, name), activation)


def in_place_of(old: nn.Module, packed: Packed, activation: str | None) -> Quantized:
    """The quantized layer of an unquantized one's kind."""
    if isinstance(old, nn.Embedding):
        return QuantEmbedding.instead_of(old, packed)
    return QuantLinear.instead_of(old, packed, activation)


def put(model: nn.Module, layers: Mapping[str, Quantized]) -> Mapping[str, str]:
    """Put layers into a model, by name.

    Returns:
        The heads that share the codes of embeddings, and the names of those.
    """
    heads = sharing_heads(model, {name: layer.scheme for name, layer in layers.items()})
    forget_ties(model, heads)
    with under_all_names(model):
        for name, layer in layers.items():
            replace(model, name, layer)
    share(model, heads)
    return heads


def share(model: nn.Module, heads: Mapping[str, str]) -> None:
    """Let heads hold the tensors of embeddings, by their names."""
    for head, words in heads.items():
        layer, owner = model.get_submodule(head), model.get_submodule(words)
        assert isinstance(layer, Quantized)
        assert isinstance(owner, Quantized)
        layer.share(owner)


def new_layers(model: "PreTrainedModel") -> set[str]:
    """Linear layers that the class which was saved has not, such as a classifier for a new task.

    transformers gives them random weights, says so, and leaves it to the user to train them.
    """
    import transformers

    names = getattr(model.config, "architectures", None) or [""]
    saved = getattr(transformers, names[0], None)
    if not isinstance(saved, type) or not issubclass(saved, transformers.PreTrainedModel):
        return set()
    if saved is type(model) or not isinstance(model.config, saved.config_class or ()):
        return set()
    with torch.device("meta"):
        known = {name for name, _ in saved(model.config).named_modules()}
    prefix = f"{model.base_model_prefix}."
    known |= {prefix + name for name in known} | {name.removeprefix(prefix) for name in known}
    return {name for name, m in model.named_modules() if is_linear(m) and name not in known}
