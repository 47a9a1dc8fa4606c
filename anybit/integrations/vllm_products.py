"""The products of anybit's layers in vLLM, once their weights are loaded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none

from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.integrations.vllm_fusion import quantize
from anybit.kernels.backend import LayerSpec
from anybit.kernels.between import Routing
from anybit.kernels.registry import choose, get_backend, refusals
from anybit.nn import op as ops
from anybit.nn.around import Around
from anybit.nn.grouped import QuantExperts, Weight, group, merge
from anybit.nn.multiplier import Frozen, Multiplier
from anybit.nn.routing import mixture


def parameters(weights: Frozen) -> nn.ParameterList:
    """A backend's tensors as parameters, so that vLLM and its compiler see them."""
    return nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in weights.prepared.layout)


class Multiply(Multiplier):
    """A weight in the layout of the kernel that multiplies with it, where vLLM sees it."""

    _save_to_state_dict = nn.Module._save_to_state_dict  # by which vLLM offloads layers

    def __init__(
        self,
        packed: Packed,
        activation: str | None,
        backend: str | None,
        dtype: torch.dtype,
        name: str,
    ):
        stored = packed.stored()
        backend = chosen(stored, activation, backend, dtype, name)
        prepared = get_backend(backend).prepare(stored, activation, dtype)
        super().__init__(backend, prepared, Around.of(packed.grid))
        self.layout, self.n, self.dtype = parameters(self), packed.shape[0], dtype

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        x, inside = self.around.before(x), self.around.inside(bias)
        given = (list(self.layout), inside, self.scheme, self.n, self.backend)
        if self.activation is None:
            y = ops.linear(x, *given)
        else:  # apart, so that compiled graphs can quantize earlier
            codes, scale, sums = quantize(x, self.activation)
            y = ops.linear(codes, *given, scale, sums, x.dtype)
        return self.around.after(y, bias)


class Dense(nn.Module):
    """A weight that is not quantized, beside others that are."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.n = len(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.memory = (self.weight.data,)

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
        for weight, activation in side_by_side(weights)
    )


def refill(parts: nn.ModuleList, weights: list[Weight], name: str) -> None:
    """Put other weights of the same kinds where those of `build` lie.

    Modules' own tensors may be away meanwhile: vLLM takes them out while it reloads.
    """
    for part, (weight, activation) in zip(parts, side_by_side(weights), strict=True):
        if isinstance(part, Multiply) and isinstance(weight, Packed):
            part.fill(Multiplier.by(part.backend, weight, activation, part.dtype))
        elif isinstance(part, Dense) and isinstance(weight, Tensor):
            part.memory[0].copy_(weight)
        else:
            raise InvalidInput(f"{name}: other weights than those in the engine; load them anew")


def side_by_side(weights: list[Weight]) -> list[Weight]:
    """All weights as one if they can be."""
    merged = merge(weights)
    return weights if merged is None else [merged]


def chosen(
    packed: Packed, activation: str | None, backend: str | None, dtype: torch.dtype, name: str
) -> str:
    """The backend of a weight: the configured one, or the first that takes it."""
    layer = LayerSpec.of(packed, activation, dtype, decoded=backend == "dense")
    if backend is None:
        backend = choose(layer)
    else:
        answers = refusals(layer)
        if answers[backend] is not None:
            others = [other for other, answer in answers.items() if answer is None]
            raise InvalidInput(
                f"{name}: backend {backend!r} refuses it: {answers[backend]}; leave the backend "
                f"out, or choose {' or '.join(others)}"
            )
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        # Compiled graphs name the backend; this makes vLLM's cache keep them apart.
        config.additional_config.setdefault("anybit", {})[name] = backend
    return backend


class Experts(nn.Module):
    """One projection of every expert, or its gate and up side by side."""

    def __init__(
        self, weights: list[list[Weight]], backend: str | None, dtype: torch.dtype, name: str
    ):
        super().__init__()
        self.count, self.backend, self.dtype, self.name = len(weights), backend, dtype, name
        self.product = self._grouped(weights)
        if self.product is None:
            self.experts = nn.ModuleList(
                build(parts, backend, dtype, f"{name}.{at}") for at, parts in enumerate(weights)
            )
        else:
            self.layout = parameters(self.product)

    def _grouped(self, weights: list[list[Weight]]) -> QuantExperts | None:
        """All experts as one product, if they can be."""
        merged = [one for parts in weights if (one := merge(parts))]
        if len(merged) < len(weights):
            return None

        def choose(packed: Packed, kind: str | None) -> str:
            return chosen(packed, kind, self.backend, self.dtype, self.name)

        return group(merged, self.dtype, choose)

    def fill(self, weights: list[list[Weight]]) -> None:
        """Other weights of the same kinds in the memory of these; as `refill`."""
        if self.product is None:
            for parts, own in zip(self.experts, weights, strict=True):
                assert isinstance(parts, nn.ModuleList)
                refill(parts, own, self.name)
            return
        fresh = self._grouped(weights)
        assert fresh is not None
        self.product.fill(fresh)

    @property
    def grouped(self) -> bool:
        """Whether one launch multiplies all of them."""
        return self.product is not None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """x (M, K) through one expert -> (M, N)."""
        if self.product is not None:
            after = torch.arange(self.count + 1, device=x.device) > expert
            return self.product(x, after.int() * len(x))
        parts: Any = self.experts[expert]
        return torch.cat([part(x, None) for part in parts], -1)


def one_by_one(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Experts,
    w2: Experts,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Each expert for the tokens that chose it.

    Finding them waits for the device, which neither a CUDA graph nor a compiled one can: there
    every expert sees every token, and those that did not choose it count nothing.
    """
    out = x.new_zeros(x.shape, dtype=torch.float32)
    everyone = torch.compiler.is_compiling() or (
        x.is_cuda and torch.cuda.is_current_stream_capturing()
    )
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
    """All experts at once, over tokens sorted by expert; those of other ranks count nothing."""
    assert w13.product is not None
    assert w2.product is not None

    def between(y: Tensor, routing: Routing) -> Tensor:
        return activate(y)

    return mixture(x, weights, ids, w13.count, w13.product, w2.product, between)
