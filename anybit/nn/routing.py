"""Tokens on their way through experts: sorted by expert, multiplied, and combined again."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from anybit.kernels.backend import Activations
from anybit.kernels.between import Routing, outside


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
    routing = outside(chosen).sort(chosen, experts)
    y = first(first.take(x, routing), routing.starts)
    y = last(between(y, routing), routing.starts)
    return outside(y, weight).combine(y, routing, weight, bias)
