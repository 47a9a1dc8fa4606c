"""transformers' attention, handed over: every layer calls what the step at hand does instead."""

from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anybit.kernels.attention import Mask

NAME = "anybit"  # by which transformers knows it


class Step(Protocol):
    """What attention does in one forward pass of a model."""

    def mask(self, of: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
        """What layers get as their mask (1, 1, queries, keys)."""

    def attend(self, call: "Call") -> Tensor:
        """The output (1, T, heads, dim of V) of a layer, contiguous."""


class Call(NamedTuple):
    """A layer's attention: Q, K and V (1, heads, T, dim), and what transformers hands over."""

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    scale: float
    options: dict[str, Any]


current: ContextVar[Step] = ContextVar("step")


def attention_of_step(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return current.get().attend(Call(module, q, k, v, attention_mask, scale, options)), None


def mask_of_step(
    batch_size: int, q_length: int, kv_length: int, mask_function: Mask, device: Any, **rest: Any
) -> Tensor:
    return current.get().mask(mask_function, q_length, kv_length, torch.device(device))


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_of_step)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_of_step)
