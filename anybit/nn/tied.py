"""Layers that share their weight with another module, and heads that get one of their own."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def output_embeddings(model: nn.Module) -> set[str]:
    """The names of a transformers model's output embeddings; the head, or heads in a list."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        found = find() if find else None
    except (NotImplementedError, AttributeError):  # a model without
        found = None
    heads = set() if found is None else set(found.modules())
    return {name for name, module in model.named_modules() if module in heads}


def tied_to_embeddings(model: nn.Module) -> set[str]:
    """The names of layers whose weight is an embedding's as well."""
    embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    return {name for name, other in tied_layers(model).items() if other in embeddings}


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


def untied_heads(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Which of the named layers are output heads that can get a weight of their own.

    That is so in transformers' models whose `tie_word_embeddings` ties no other layer: they are
    loaded with a head of its own where it is False.

    Args:
        model: It may be on the meta device.
        names: Layers that are to be quantized.

    Returns:
        The embeddings whose weight they share, by name.
    """
    ties = getattr(model, "all_tied_weights_keys", {})
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    heads = output_embeddings(model) & tied_to_embeddings(model) & set(names)
    tied = tied_layers(model)
    return {name: tied[name] for name in heads} if heads == {layer_of(key) for key in ties} else {}


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
