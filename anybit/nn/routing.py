"""Tokens on their way through experts: sorted by expert, multiplied, and combined again.

`mixture` is what the engine, vLLM and the layers of transformers' models call. On a GPU, each step
around the two products is one kernel (`kernels/triton/routing.py`); the functions here define them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from anybit.kernels.backend import Activations, has_triton


class Routing(NamedTuple):
    """Where tokens lie when they are sorted by the experts that they meet.

    Attributes:
        starts: (experts + 1,) int32. Expert e has rows starts[e] to starts[e + 1]; those behind
            the last are no expert's.
        rows: (T, top) int32, of each token's choices.
        owners: (T * top,) int32, the expert of each row; `experts` where it is none.
    """

    starts: Tensor
    rows: Tensor
    owners: Tensor


class Product(Protocol):
    """One projection of all experts."""

    def take(self, x: Tensor, routing: Routing) -> Tensor | Activations:
        """x (T, K) -> a row for each choice, sorted, as the product wants them."""

    def __call__(self, x: Tensor | Activations, starts: Tensor) -> Tensor:
        """Rows sorted by expert (M, K) -> (M, N); rows that are no expert's hold anything."""


def mixture(
    x: Tensor,
    weight: Tensor,
    chosen: Tensor,
    experts: int,
    first: Product,
    last: Product,
    between: Callable[[Tensor, Routing], Any],
    bias: Tensor | None = None,
) -> Tensor:
    """The sum of what the chosen experts make of each token.

    Args:
        x: Tokens (T, K).
        weight: Of each choice (T, top).
        chosen: Experts (T, top); a number that is none of 0 to experts - 1 counts nothing.
        experts: How many there are.
        first: The projection of tokens.
        last: That of what `between` makes of its outputs.
        between: From outputs of `first` to inputs of `last`, row by row.
        bias: (experts, N) of `last`, or None.

    Returns:
        (T, N) in the dtype of x. It is summed in fp32, in the order of choices.
    """
    routing = sort(chosen, experts)
    y = first(first.take(x, routing), routing.starts)
    return combine(last(between(y, routing), routing.starts), routing, weight, bias)


def kernels(*tensors: Tensor) -> Any:
    """The module whose kernels take these, or None: torch's operators also have gradients.

    And run on any GPU; Triton launches on the current one.
    """
    if not tensors[0].is_cuda or not has_triton():
        return None
    if tensors[0].device.index != torch.cuda.current_device():
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    return import_module("anybit.kernels.triton.routing")


def choose(logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights in fp32 and numbers of the `top` likeliest experts, both (T, top).

    logits: Of a router, (T, experts). normalize: whether a token's weights add up to 1; they are
    the softmax over all experts otherwise.
    """
    if (fused := kernels(logits)) is not None:
        weight, chosen = fused.choose(logits, top, normalize)
        return weight, chosen
    weight, chosen = logits.float().softmax(-1).topk(top, -1)
    return weight / weight.sum(-1, keepdim=True) if normalize else weight, chosen


def sort(chosen: Tensor, experts: int) -> Routing:
    """Give each choice a row: by expert, then by token."""
    if (fused := kernels(chosen)) is not None:
        return Routing(*fused.sort(chosen, experts))
    flat = chosen.flatten()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    owners, order = flat.sort(stable=True)
    ids = torch.arange(experts + 1, device=flat.device)
    starts = torch.searchsorted(owners, ids.to(owners.dtype), out_int32=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return Routing(starts, rows.view(chosen.shape).int(), owners.int())


def spread(x: Tensor, routing: Routing, activation: str | None = None) -> Tensor | Activations:
    """x (T, K) -> a row for each choice; on a GPU quantized on the way, if `activation` says so."""
    if (fused := kernels(x)) is not None:
        out: Tensor | Activations = fused.spread(x, routing.rows, routing.starts, activation)
        return out
    order = torch.empty(routing.rows.numel(), dtype=torch.int64, device=x.device)
    flat = routing.rows.flatten().long()
    order[flat] = torch.arange(len(flat), device=x.device)
    return x[order // routing.rows.shape[1]]


def combine(y: Tensor, routing: Routing, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows (M, N) of all choices -> the weighted sum of each token's (T, N)."""
    starts, rows, owners = routing
    if (fused := kernels(y, weight)) is not None:
        out: Tensor = fused.combine(y, rows, starts, owners, weight, bias)
        return out
    dtype, y = y.dtype, y.float()
    if bias is not None:
        y = y + bias.float()[owners.clamp(max=len(bias) - 1).long()]
    here = (rows < starts[-1])[..., None]
    if not len(y):  # no choice is an expert's
        return y.new_zeros(len(rows), y.shape[1]).to(dtype)
    each = torch.where(here, y[rows.long().clamp(max=len(y) - 1)], 0)
    return (each * weight.float()[..., None]).sum(1).to(dtype)
