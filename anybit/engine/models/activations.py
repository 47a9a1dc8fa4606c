"""Activations, by transformers' names for them."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch.nn.functional as F
from torch import Tensor

from anybit.engine.models import UnknownModel

SILU = ("silu", "swish")  # two names of one function
GELU = "gelu_pytorch_tanh"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(SILU, F.silu),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@lru_cache
def activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """An activation by transformers' name for it; UnknownModel where that has none."""
    if known := ACTIVATIONS.get(name or ""):
        return known
    from transformers.activations import ACT2FN  # it takes a second

    if name not in ACT2FN:
        raise UnknownModel(f"hidden_act={name!r} is unknown; known: {', '.join(ACT2FN)}")
    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found
