"""Weights that are multiplied together: side by side as one, or of many experts in one product."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from anybit.core.packed import Packed, stack
from anybit.kernels.ahead import Uncompiled
from anybit.kernels.backend import Activations, Backend, LayerSpec, Prepared, octaves
from anybit.kernels.between import Routing, outside
from anybit.kernels.registry import get_backend
from anybit.nn.around import Around
from anybit.nn.multiplier import Frozen
from anybit.nn.sharding import same

Weight = tuple[Tensor | Packed, str | None]  # and what its activations are quantized to


def merge(weights: Sequence[Weight]) -> Weight | None:
    """Weights on top of each other as one; None when they differ in kind or have tables."""
    tensors, activations = zip(*weights, strict=True)
    if len(weights) == 1:
        return weights[0]
    if not same(list(tensors)) or len(set(activations)) > 1:
        return None
    packed = [w for w in tensors if isinstance(w, Packed)]
    return (stack(packed) if packed else torch.cat(tensors)), activations[0]


class QuantExperts(Frozen):
    """One projection of all experts, multiplied at once."""

    def __init__(self, kernels: Backend, prepared: Prepared, around: Around):
        super().__init__(prepared, around)
        self.kernels = kernels

    def take(self, x: Tensor, routing: Routing) -> Tensor | Activations:
        """A row for each choice of x (T, K); where kernels can, rotated and quantized before."""
        around, family = self.around, outside(x)
        if self.activation is None:
            return family.spread(x, routing)
        x = x if around.order is not None else around.before(x)
        rows = family.spread(x, routing, self.activation)
        assert isinstance(rows, Activations)
        return rows._replace(rotated=around.rotate_in is not None)

    def forward(self, x: Tensor | Activations, starts: Tensor) -> Tensor:
        """x (M, K), rows starts[e] to starts[e + 1] for expert e -> (M, N)."""
        around = self.around
        if isinstance(x, Tensor):
            x = around.before(x)
        elif around.order is not None:
            x = x._replace(codes=around.before(x.codes))
        try:
            y = self.kernels.linear_experts(x, starts, self.prepared)
        except Uncompiled:
            rows = x if isinstance(x, Tensor) else x.codes
            y = rows.new_zeros(len(rows), self.prepared.shape[0], dtype=x.dtype)
        return around.after(y, None)


def group(
    experts: Sequence[Weight], dtype: torch.dtype, choose: Callable[[Packed, str | None], str]
) -> QuantExperts | None:
    """The weights of many experts as one product.

    Args:
        experts: the weight of each.
        dtype: of the activations.
        choose: the name of the backend for a weight and what its activations are quantized to.

    Returns:
        None when the experts differ in kind or in their rotations, or their backend multiplies one
        after the other.
    """
    packed = [w for w, _ in experts if isinstance(w, Packed)]
    kinds = {(w.format, w.shape) for w in packed}
    activations = {activation for _, activation in experts}
    if len(packed) < len(experts) or len(kinds) > 1 or len(activations) > 1:
        return None
    first, activation = packed[0], experts[0][1]
    around = Around.of(first.grid)
    if not all(
        torch.equal(one.grid[name], tensor)
        for name, tensor in around._asdict().items()
        for one in packed
        if tensor is not None
    ):
        return None
    stored = [one.stored() for one in packed]
    widest = max(stored, key=partial(octaves, activation=activation))  # the hardest to multiply
    kernels = get_backend(choose(widest, activation))
    if not kernels.takes_experts(LayerSpec.of(widest, activation, dtype)):
        return None
    return QuantExperts(kernels, kernels.prepare_experts(stored, activation, dtype), around)
