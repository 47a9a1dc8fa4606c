"""All that layers may launch in vLLM is compiled before it says that it is ready.

vLLM warms up with some numbers of tokens, and requests bring others, for which a layer may launch
another kernel. So layers enter vLLM's own registry of kernels to be compiled, which it goes through
before it captures graphs.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.utils import jit_monitor

from anybit.integrations.vllm_products import Experts, Multiply
from anybit.kernels import compilations
from anybit.kernels.ahead import build_for
from anybit.kernels.backend import Backend, LayerSpec, Needs
from anybit.kernels.registry import get_backend
from anybit.nn.multiplier import Frozen

logger = init_logger(__name__)
Call = Callable[[], object]


class Layers:
    """What vLLM takes for one kernel: all kinds of anybit's layers, each of them once."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Callable[[], list[Call]]] = {}

    def get_warmup_keys(
        self, kind: Hashable, calls: Callable[[], list[Call]]
    ) -> Sequence[Hashable]:
        """The kinds of what was registered; as vLLM calls it."""
        self.found[kind] = calls
        return [kind]

    def compile_many(self, kinds: Iterable[Hashable]) -> None:
        """Compile the kernels of all kinds side by side; as vLLM calls it."""
        start, every = perf_counter(), [self.found.pop(kind) for kind in kinds]
        with torch.inference_mode():
            errors = build_for([call for calls in every for call in calls()])
        for error in errors:
            logger.warning("a kernel is left to its first use: %s", error)
        seconds = perf_counter() - start
        logger.info("anybit: kernels for all numbers of tokens are there, after %.1f s", seconds)


LAYERS: Any = Layers()
_late = 0


def compilations_after_ready(_worker: Any = None) -> int:
    """Kernels of anybit that this process has compiled or loaded since vLLM was ready.

    Of all of vLLM's workers: `llm.collective_rpc(compilations_after_ready)`.
    """
    return _late


def late(name: str) -> None:
    """Warn of a kernel that a request waits for, of each once; vLLM says when it was ready."""
    global _late
    if jit_monitor.is_active():
        _late += 1
        logger.warning_once("anybit: a request waited for a kernel: %s", name)


def register(part: nn.Module, biased: bool) -> None:
    """Have vLLM compile what a part of a layer may launch, if that depends on its tokens."""
    compilations.watch(late)
    most = most_tokens()
    if most and isinstance(part, Multiply) and get_backend(part.backend).does(Backend.needs):
        kind = part.scheme, part.prepared.shape, part.backend, part.dtype, biased
        around = tuple(tensor is not None for tensor in part.around)
        JitWarmupRegistry.register(LAYERS, (*kind, around), partial(of_part, part, biased, most))


def register_experts(method: Any, layer: Any) -> None:
    """Have vLLM compile what a layer of experts may launch, as `register` does."""
    compilations.watch(late)
    both: list[Experts] = [layer.w13, layer.w2]
    products = [each.product for each in both if each.product is not None]
    most = most_tokens()
    compiled = [product for product in products if product.kernels.does(Backend.needs)]
    if most and len(compiled) == len(both):
        shapes = tuple(product.prepared.shape for product in products)
        kind = "experts", products[0].scheme, shapes, both[0].dtype, both[0].count
        calls = partial(of_experts, method, layer, products, most)
        JitWarmupRegistry.register(LAYERS, kind, calls)
        return
    for each in both:
        for part in each.modules():
            register(part, False)


def of_part(part: Multiply, biased: bool, most: int) -> list[Call]:
    """Calls that take every kernel of a part of a layer."""
    bias = torch.zeros(part.n, dtype=part.dtype, device=part.device) if biased else None

    def multiply(count: int) -> Tensor:
        x = torch.zeros(count, part.in_features, dtype=part.dtype, device=part.device)
        return part(x, bias)

    needs = needs_of(part, get_backend(part.backend), part.dtype, most)
    return every(multiply, most, needs)


def of_experts(method: Any, layer: Any, products: list[Any], most: int) -> list[Call]:
    """Calls that take every kernel of a layer of experts."""
    dtype, device = layer.w13.dtype, products[0].device
    top = method.moe.experts_per_token

    def run(count: int) -> Tensor:
        x = torch.zeros(count, products[0].prepared.shape[1], dtype=dtype, device=device)
        chosen = torch.zeros(count, top, dtype=torch.int32, device=device)
        out: Tensor = method.apply(layer, x, chosen.float(), chosen)
        return out

    needs = [needs_of(each, each.kernels, dtype, most, experts=True) for each in products]
    return every(run, most, *needs)


def needs_of(
    weights: Frozen, backend: Backend, dtype: torch.dtype, most: int, experts: bool = False
) -> Needs:
    """What a backend says of weights that it has prepared."""
    fmt, shape, activation, *_ = weights.prepared
    layer = LayerSpec(fmt, activation, shape, weights.device, dtype, decoded=False)
    return backend.needs(layer, most, experts)


def every(run: Callable[[int], object], most: int, *needs: Needs) -> list[Call]:
    """Calls that take what backends need, and all that is launched beside products.

    Of that there are kernels for numbers up to powers of two, and for those divisible by 16.
    """
    powers = [1 << i for i in range(most.bit_length())]
    tokens = {*powers, *(power + 1 for power in powers), most}
    tokens |= {count for each in needs for count in each.tokens}
    calls = [call for each in needs for call in each.calls]
    return [*calls, *(partial(run, count) for count in sorted(tokens) if count <= most)]


def most_tokens() -> int:
    """Of a step of the model that vLLM builds now; 0: it builds none."""
    config = get_current_vllm_config_or_none()
    return 0 if config is None else int(config.scheduler_config.max_num_batched_tokens)
