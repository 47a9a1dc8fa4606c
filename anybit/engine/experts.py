"""The same projection of many experts, for tokens that lie sorted by expert."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from anybit.core.packed import Packed
from anybit.engine.weights import Weights, together
from anybit.kernels.backend import Activations, LayerSpec
from anybit.kernels.between import Routing, outside
from anybit.kernels.registry import choose
from anybit.nn.grouped import QuantExperts, Weight, group, merge


class Apart(nn.Module):
    """A product of experts that takes tokens as they are."""

    def take(self, x: Tensor, routing: Routing) -> Tensor | Activations:
        """A row for each choice of x (T, K)."""
        return outside(x).spread(x, routing)


class OneByOne(Apart):
    """Experts of any kind, one after the other; waits for the device, so no graph captures it."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """x (M, K), tokens starts[e] to starts[e + 1] for expert e -> (M, N)."""
        bounds = starts.tolist()
        busy = [(e, a, b) for e, (a, b) in enumerate(pairwise(bounds)) if a < b]
        parts = [self.layers[e](x[a:b]) for e, a, b in busy]
        return torch.cat(parts or [self.layers[0](x[:0])])


class DenseExperts(Apart):
    """bf16 experts as one product of torch, weight (experts, N, K)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=starts[1:])


def picked(
    scores: Tensor, by: Tensor, top: int, normalize: bool, least: float
) -> tuple[Tensor, Tensor]:
    """Scores (T, top) of the experts that are best by other numbers, and which these are.

    Args:
        scores: Of every expert, (T, experts).
        by: What they are picked by, of the same shape.
        top: How many are picked for a token.
        normalize: Whether theirs are divided by their sum.
        least: What is added to that sum.
    """
    chosen = by.topk(top, -1).indices
    weight = scores.gather(1, chosen)
    return weight / (weight.sum(-1, keepdim=True) + least) if normalize else weight, chosen


def biases_of(weights: Weights, names: list[list[str]], rows: list[int]) -> Tensor:
    """Biases (experts, N) of what `experts_of` makes."""
    return torch.stack(
        [
            torch.cat([weights.tensor(f"{n}.bias", (r,)) for n, r in zip(own, rows, strict=True)])
            for own in names
        ]
    )


def experts_of(
    weights: Weights, names: list[list[str]], rows: list[int], columns: int
) -> Apart | QuantExperts:
    """A module for the experts' layers: one product if their kind and their device allow.

    names: of each expert, layers (rows[i], columns) that are merged as in `Weights.linear`.
    """
    parts = weights.experts(names, rows, columns)
    merged = [one for own in parts if (one := merge([(w, kind) for w, _, kind in own]))]
    if len(merged) == len(parts):
        whole = dense(merged) or group(
            merged, weights.dtype, partial(backend_of, dtype=weights.dtype)
        )
        if whole is not None:
            return whole
    return OneByOne([together(own, weights.dtype, weights.keep) for own in parts])


def backend_of(packed: Packed, activation: str | None, dtype: torch.dtype) -> str:
    return choose(LayerSpec.of(packed, activation, dtype))


def dense(weights: list[Weight]) -> DenseExperts | None:
    """Dense experts as one product of torch, where it takes them."""
    found = [w for w, _ in weights if isinstance(w, Tensor)]
    if len(found) < len(weights) or not found[0].is_cuda or found[0].dtype != torch.bfloat16:
        return None
    # torch's product wants a Hopper GPU or later, and rows of whole 16 bytes.
    old = torch.cuda.get_device_capability(found[0].device) < (9, 0)
    if old or any(size % 8 for size in found[0].shape):
        return None
    return DenseExperts(torch.stack(found))
