"""The products of anybit's layers in vLLM, once their weights are loaded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none

from anybit import ops
from anybit.dispatch import choose, get_backend, refusals, scheme_name
from anybit.format import Packed
from anybit.quantizers.rtn import stack
from anybit.sharding import same

Weight = tuple[Tensor | Packed, str | None]  # a weight and its activation notation


class Multiply(nn.Module):
    """A weight in the layout of the kernel that multiplies with it."""

    order: Tensor | None

    def __init__(
        self,
        packed: Packed,
        activation: str | None,
        backend: str | None,
        dtype: torch.dtype,
        name: str,
    ):
        super().__init__()
        stored = packed.stored()
        self.n = packed.shape[0]
        self.scheme = scheme_name(stored.format, activation)
        self.backend = chosen(stored, activation, backend, dtype, name)
        kernels = get_backend(self.backend)
        prepared = kernels.prepare(stored, activation, dtype)
        prepared = kernels.release(prepared) or prepared
        self.prepared = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in prepared)
        self.register_buffer("order", packed.grid.get("order"))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return ops.linear(x, list(self.prepared), bias, self.scheme, self.n, self.backend)


class Dense(nn.Module):
    """A weight that is not quantized, beside others that are."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.n = len(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


def build(
    weights: list[Weight], backend: str | None, dtype: torch.dtype, name: str
) -> nn.ModuleList:
    """Modules whose outputs side by side are those of the weights."""
    return nn.ModuleList(
        Multiply(weight, activation, backend, dtype, name)
        if isinstance(weight, Packed)
        else Dense(weight.to(dtype))
        for weight, activation in merge(weights)
    )


def merge(weights: list[Weight]) -> list[Weight]:
    """Weights on top of each other as one, if they are dense or share a format without tables."""
    tensors, activations = zip(*weights, strict=True)
    if len(weights) == 1 or not same(list(tensors)) or len(set(activations)) > 1:
        return weights
    packed = [w for w in tensors if isinstance(w, Packed)]
    return [(stack(packed) if packed else torch.cat(tensors), activations[0])]


def chosen(
    packed: Packed, activation: str | None, backend: str | None, dtype: torch.dtype, name: str
) -> str:
    """The backend of a weight: the configured one, or the first that takes it."""
    device = packed.planes[0].device
    if backend is None:
        backend = choose(packed.format, activation, packed.shape, device, dtype)
    else:
        answers = refusals(packed.format, activation, packed.shape, device, dtype)
        if answers[backend] is not None:
            others = [other for other, answer in answers.items() if answer is None]
            raise ValueError(
                f"{name}: backend {backend!r} refuses it: {answers[backend]}; leave the backend "
                f"out, or choose {' or '.join(others)}"
            )
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        # Compiled graphs name the backend; this makes vLLM's cache keep them apart.
        config.additional_config.setdefault("anybit", {})[name] = backend
    return backend


class Experts(nn.Module):
    """One projection of every expert, or its gate and up side by side.

    grouped: whether one launch multiplies all of them.
    """

    def __init__(
        self, weights: list[list[Weight]], backend: str | None, dtype: torch.dtype, name: str
    ):
        super().__init__()
        self.count = len(weights)
        self.grouped = self.group(weights, backend, dtype, name)
        if not self.grouped:
            self.experts = nn.ModuleList(
                build(parts, backend, dtype, f"{name}.{at}") for at, parts in enumerate(weights)
            )

    def group(
        self, weights: list[list[Weight]], backend: str | None, dtype: torch.dtype, name: str
    ) -> bool:
        """Lay all weights out for a grouped product, or False when there is none for them."""
        merged = [weight for parts in weights for weight in merge(parts)]
        packed = [w for w, _ in merged if isinstance(w, Packed) and not w.format.order]
        kinds = {(w.format, w.shape) for w in packed} | {a for _, a in merged}
        if not len(weights) == len(merged) == len(packed) or len(kinds) > 2:
            return False
        weight, activation = packed[0], merged[0][1]
        kernels: Any = get_backend(chosen(weight, activation, backend, dtype, name))
        if not hasattr(kernels, "linear_experts") or len(packed) > kernels.tiles.MOST_EXPERTS:
            return False
        prepared = kernels.prepare_experts(packed, activation, dtype)
        self.prepared = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in prepared)
        self.kernels, self.format = kernels, weight.format
        self.n, self.activation = weight.shape[0], activation
        return True

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """x (M, K) through one expert -> (M, N)."""
        parts: Any = self.experts[expert]
        return torch.cat([part(x, None) for part in parts], -1)

    def all(self, x: Tensor, starts: Tensor) -> Tensor:
        """x (M, K), sorted by expert, -> (M, N); expert e has rows starts[e] to starts[e + 1]."""
        return self.kernels.linear_experts(
            x, list(self.prepared), starts, self.format, self.n, self.activation
        )


def one_by_one(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Experts,
    w2: Experts,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Each expert for the tokens that chose it.

    Finding them waits for the device, which a CUDA graph cannot: while one is captured, every
    expert sees every token, and those that did not choose it count nothing.
    """
    out = x.new_zeros(x.shape, dtype=torch.float32)
    everyone = x.is_cuda and torch.cuda.is_current_stream_capturing()
    for expert in range(w13.count):
        hit = ids == expert
        share = torch.where(hit, weights.float(), 0).sum(1, keepdim=True)
        rows: Any = slice(None) if everyone else hit.any(1).nonzero().flatten()
        if everyone or len(rows):
            out[rows] += share[rows] * w2(activate(w13(x[rows], expert)), expert).float()
    return out.to(x.dtype)


def all_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Experts,
    w2: Experts,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """All experts in two launches, over tokens sorted by expert; other ranks' come last."""
    m, count = ids.shape
    experts = w13.count
    flat = torch.where(ids < 0, experts, ids).flatten()
    flat, order = flat.sort(stable=True)
    starts = torch.searchsorted(flat, torch.arange(experts + 1, device=x.device)).int()
    y = w2.all(activate(w13.all(x[order // count], starts)), starts)
    y = torch.where((flat < experts)[:, None], y.float(), 0)  # other ranks' rows were not written
    each = torch.empty_like(y)
    each[order] = y
    return (each.view(m, count, -1) * weights.float()[..., None]).sum(1).to(x.dtype)
