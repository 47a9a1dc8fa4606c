"""The same projection of many experts, for tokens that lie sorted by expert."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anybit.dispatch import choose, get_backend
from anybit.engine.weights import Part, Weights, merge, together
from anybit.format import Packed


class OneByOne(nn.Module):
    """Experts of any kind, one after the other; waits for the device, so no graph captures it."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """x (M, K), tokens starts[e] to starts[e + 1] for expert e -> (M, N)."""
        bounds = starts.tolist()
        busy = [(e, a, b) for e, (a, b) in enumerate(pairwise(bounds)) if a < b]
        return torch.cat([self.layers[e](x[a:b]) for e, a, b in busy])


class DenseExperts(nn.Module):
    """bf16 experts as one product of torch, weight (experts, N, K)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=starts[1:])


class QuantExperts(nn.Module):
    """Experts of one format as one product of a backend that has `linear_experts`."""

    def __init__(
        self, kernels: Any, experts: list[Packed], activation: str | None, dtype: torch.dtype
    ):
        super().__init__()
        self.kernels, self.format, self.activation = kernels, experts[0].format, activation
        self.out_features = experts[0].shape[0]
        self.prepared = kernels.prepare_experts(experts, activation, dtype)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        args = (starts, self.format, self.out_features, self.activation)
        return self.kernels.linear_experts(x, self.prepared, *args)


def experts_of(
    weights: Weights, names: list[list[str]], rows: list[int], columns: int
) -> nn.Module:
    """A module for the experts' layers: one product if their kind and their device allow.

    names: of each expert, layers (rows[i], columns) that are merged as in `Weights.linear`.
    """
    parts = [weights.parts(own, rows, columns) for own in names]
    merged = [one for own in parts if (one := merge(own))]
    if len(merged) == len(parts):
        grouped = dense(merged) or quantized(merged, weights.dtype)
        if grouped is not None:
            return grouped
    return OneByOne([together(own, weights.dtype) for own in parts])


def dense(parts: list[Part]) -> nn.Module | None:
    found = [w for w, _, _ in parts if isinstance(w, Tensor)]
    if len(found) < len(parts) or not found[0].is_cuda or found[0].dtype != torch.bfloat16:
        return None
    # torch's product wants a Hopper GPU or later, and rows of whole 16 bytes.
    old = torch.cuda.get_device_capability(found[0].device) < (9, 0)
    if old or any(size % 8 for size in found[0].shape):
        return None
    return DenseExperts(torch.stack(found))


def quantized(parts: list[Part], dtype: torch.dtype) -> nn.Module | None:
    packed = [w for w, _, _ in parts if isinstance(w, Packed)]
    kinds = {(w.format, w.shape) for w in packed}
    notations = {activation for _, _, activation in parts}
    if len(packed) < len(parts) or len(kinds) > 1 or len(notations) > 1 or packed[0].format.order:
        return None
    first, activation = packed[0], parts[0][2]
    backend = choose(first.format, activation, first.shape, first.planes[0].device, dtype)
    kernels: Any = get_backend(backend)
    if not hasattr(kernels, "linear_experts") or len(packed) > kernels.tiles.MOST_EXPERTS:
        return None
    return QuantExperts(kernels, packed, activation, dtype)
