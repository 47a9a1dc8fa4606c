"""Which layers of a model launch what the others launch as well.

To find out what a step lacks, a pass over all layers would visit most kernels as often as there are
layers. A layer is left out where another one has its modules, sizes and states, behind one that is
like the one behind which it stands.
"""

import copy
from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from anybit.engine.models.layers import Decoder, mixers_of
from anybit.kernels.state import LayerState

PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type,
    type(None),
    FunctionType,
    BuiltinFunctionType,
    MethodType,
)
DEEP = 4  # objects inside of each other that are looked into


def without_repeats(
    model: Decoder, states: Sequence[LayerState]
) -> tuple[Decoder, list[LayerState]]:
    """A model with fewer layers that launches all that the given one does, and their states.

    Args:
        model: Which stays as it is; the other one has its modules.
        states: What its layers remember, in the order in which they run.
    """
    layers = [*model.layers]
    given, of_layers = iter(states), []
    for layer in layers:
        of_layers.append([next(given) for _ in mixers_of(layer)])
    kinds = [
        (look(layer), look(rope), look(own))
        for layer, rope, own in zip(layers, model.ropes, of_layers, strict=True)
    ]
    kept = [*first_pairs(kinds)]
    few = copy.copy(model)
    few._modules = {**model._modules, "layers": nn.ModuleList([layers[i] for i in kept])}
    few.ropes = [model.ropes[i] for i in kept]
    return few, [*(s for i in kept for s in of_layers[i]), *given]


def first_pairs(kinds: Sequence[Any]) -> list[int]:
    """Places among which each kind stands behind each one behind which it stands among all.

    The last place is one of them.
    """
    seen, kept = set(), {len(kinds) - 1}
    for i, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        if pair not in seen:
            seen.add(pair)
            kept |= {max(i - 1, 0), i}
    return sorted(kept)


def look(value: Any, deep: int = DEEP) -> Any:
    """What a value is but for the numbers in its tensors; it can be compared and hashed."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    if not deep:
        return type(value)
    if isinstance(value, dict):
        return tuple((str(k), look(v, deep - 1)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(look(each, deep - 1) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(look(each, deep - 1) for each in value)
    if isinstance(value, partial):
        return partial, look((value.func, value.args, value.keywords), deep)
    if isinstance(value, nn.Module):
        return type(value), tuple(
            (name, type(m), *(look(v, DEEP - 1) for k, v in vars(m).items() if k != "_modules"))
            for name, m in value.named_modules()
        )
    return type(value), look(getattr(value, "__dict__", {}), deep)
