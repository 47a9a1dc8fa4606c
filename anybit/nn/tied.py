"""Layers that share their weight with another module, and heads that get one of their own."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput

ATTENTION = 4  # linear layers of a block, at least: its attention's, or Q, K and V in one and MLP's


def output_embeddings(model: nn.Module) -> set[str]:
    """The names of a transformers model's output embeddings; the head, or heads in a list."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        found = find() if find else None
    except (NotImplementedError, AttributeError):  # a model without
        found = None
    heads = set() if found is None else set(found.modules())
    return {name for name, module in model.named_modules() if module in heads}


def task_heads(model: nn.Module) -> set[str]:
    """Linear layers behind the base of a transformers model without output embeddings.

    They classify, score, or find answers; blocks behind the base do not. Of a model whose base has
    no known place, those of its own layers that have an output for each label, and those called
    "head" with one for each word, as transducers of speech have.
    """
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if labels is None:
        return set()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if isinstance(base, nn.Module):
        inside = (f"{model.base_model_prefix}.", *blocks(model))
        return {name for name in linears if not name.startswith(inside)}
    words = getattr(model.config, "vocab_size", None) or math.inf
    return {
        name
        for name, m in linears.items()
        if ("." not in name and m.out_features == labels)
        or (name.rpartition(".")[2] == "head" and m.out_features >= words)
    }


def blocks(model: nn.Module) -> Iterator[str]:
    """Starts of the names of modules in lists of blocks, which have at least attention's layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            layers = [sum(isinstance(m, nn.Linear) for m in one.modules()) for one in module]
            if min(layers) >= ATTENTION:
                yield f"{name}."


def tied_heads(model: nn.Module) -> dict[str, str]:
    """Layers whose weight is an embedding's as well -> that embedding."""
    embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    tied = tied_layers(model).items()
    return {name: other for name, other in tied if other in embeddings and name not in embeddings}


def tied_layers(model: nn.Module) -> dict[str, str]:
    """Layers whose weights are shared, or will be after loading -> the layer shared with."""
    keys = getattr(model, "all_tied_weights_keys", {})
    pairs = [(layer_of(a), layer_of(b)) for a, b in keys.items()]
    return shared_weights(model) | dict(pairs) | {b: a for a, b in pairs}


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight is another module's as well (tied embeddings) -> that module."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = dict(module._parameters).get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return {
        name: next(other for other in names if other != name)
        for names in owners.values()
        if len(names) > 1
        for name in names
    }


def untied_heads(model: Any, schemes: Mapping[str, str | None]) -> dict[str, str]:
    """Which output heads can, and are to, get a weight of their own.

    That is so in transformers' models whose `tie_word_embeddings` ties no other layer: they are
    loaded with a head of its own where it is False.

    Args:
        model: It may be on the meta device.
        schemes: Of the layers that are to be quantized.

    Returns:
        The embeddings whose weight they share, by name.
    """
    ties = getattr(model, "all_tied_weights_keys", {})
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    outputs, tied = output_embeddings(model), tied_heads(model)
    heads = {n: w for n, w in tied.items() if n in outputs and {n, w} & schemes.keys()}
    if heads.keys() != {layer_of(key) for key in ties} or sharing_heads(model, schemes):
        return {}
    return heads


def sharing_heads(model: nn.Module, schemes: Mapping[str, str | None]) -> dict[str, str]:
    """Layers that go on sharing an embedding's weight, since both get one format.

    Args:
        model: It may be on the meta device.
        schemes: Of the layers that are to be quantized.

    Returns:
        The embeddings, by the layers' names.
    """
    heads = tied_heads(model)
    return {} if ties_others(model, heads) else layers_that_share(heads, schemes)


def ties_others(model: nn.Module, heads: Mapping[str, str]) -> bool:
    """Whether weights are tied that are none of these heads'."""
    return (
        not {layer_of(key) for key in getattr(model, "all_tied_weights_keys", {})} <= heads.keys()
    )


def layers_that_share(tied: Mapping[str, str], schemes: Mapping[str, str | None]) -> dict[str, str]:
    """Those of layers with an embedding's weight that get its format -> the embeddings."""
    formats = {name: scheme and parse_scheme(scheme)[0] for name, scheme in schemes.items()}
    return {
        name: words
        for name, words in tied.items()
        if formats.get(name) and formats[name] == formats.get(words)
    }


def check_ties(
    schemes: Iterable[str], shared: Mapping[str, str], sharing: Mapping[str, str]
) -> None:
    """Raise InvalidInput for a layer to quantize that has its weight from another.

    Args:
        schemes: The layers, embeddings last.
        shared: The others, by name.
        sharing: Heads that go on sharing codes, of `sharing_heads`.
    """
    for name in reversed([*schemes]):
        if name in shared and name not in {*sharing, *sharing.values()}:
            raise InvalidInput(
                f"{name} shares its weight with {shared[name]}; untie them first, as `anybit "
                f"quantize` does where a head alone shares it, or keep it: {{'*': ..., '{name}': "
                "None}"
            )


@contextmanager
def untied(model: Any, heads: Mapping[str, str]) -> Iterator[None]:
    """Give heads copies of the weights that they share; an exception inside takes that back.

    Args:
        model: A model with weights.
        heads: What `untied_heads` has found.
    """
    if not heads:
        yield
        return
    parts = [m for m in model.modules() if hasattr(m, "all_tied_weights_keys")]
    before = [dict(m.all_tied_weights_keys) for m in parts]
    for name in heads:
        head = model.get_submodule(name)
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    for part in parts:
        part.all_tied_weights_keys = {}
    model.config.tie_word_embeddings = False
    try:
        yield
    except BaseException:
        for part, keys in zip(parts, before, strict=True):
            part.all_tied_weights_keys = keys
        model.config.tie_word_embeddings = True
        raise


def forget_ties(model: nn.Module, heads: Mapping[str, str]) -> None:
    """Keep transformers from tying heads by itself: their weights are codes, which it cannot tie.

    The configuration still says that they are tied, as files then are.
    """
    for part in model.modules() if heads else ():
        if hasattr(part, "all_tied_weights_keys"):
            part.all_tied_weights_keys = part._tied_weights_keys = {}  # type: ignore[assignment]


def tie_again(model: nn.Module) -> None:
    """Undo `forget_ties`."""
    for part in model.modules():
        if vars(part).pop("_tied_weights_keys", None) is not None:
            find: Any = part.get_expanded_tied_weights_keys
            part.all_tied_weights_keys = find(all_submodels=True)


def untie(config: Any) -> None:
    """Say in a configuration of transformers that heads have weights of their own."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says so, also where that of its text model does."""
    text = {
        key: untied_config(value)
        for key, value in config.items()
        if isinstance(value, dict) and value.get("tie_word_embeddings")
    }
    return {**config, **text, "tie_word_embeddings": False}


def layer_of(key: str) -> str:
    """The layer that a weight's name belongs to; the name itself if it is no weight."""
    return key.removesuffix(".weight")
