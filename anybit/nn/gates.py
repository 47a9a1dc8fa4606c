"""Small layers that decide what a model remembers, and which experts it asks.

An error in a decay is multiplied from token to token, and one in a router takes another expert.
Together they hold about a thousandth of the weights.
"""

from collections.abc import Iterator

from torch import nn

from anybit.nn.experts import Experts, holds_experts

DECAY = "A_log"  # (heads,), or (channels, states) in Mamba 1; all families call it so


def gates(model: nn.Module) -> set[str]:
    """Names of the linear layers that make decays, step sizes and gates of heads, and routers."""
    out = set[str]()
    for name, module in model.named_modules():
        decay = getattr(module, DECAY, None) if not name.endswith("experts") else None
        if isinstance(decay, nn.Parameter):
            per_head = decay.ndim != 2
            count = decay.numel() if per_head else len(decay)
            for key, (n, k) in linears(module):
                small = n in (count, 2 * count) and n < k if per_head else n == count and k < n
                out |= {f"{name}.{key}"} if small else set()
        for key, experts in module.named_children():
            count = count_of(experts)
            if count:
                beside = ((k, n) for k, (n, _) in linears(module) if not k.startswith(f"{key}."))
                out |= {f"{name}.{k}" for k, n in beside if n == count}
    return out


def linears(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes (N, K) of the linear layers within a module."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            yield name, (layer.out_features, layer.in_features)


def count_of(module: nn.Module) -> int:
    """How many experts a module holds; 0: none."""
    if isinstance(module, Experts):
        return len(module)
    return len(module._parameters["down_proj"]) if holds_experts(module) else 0  # type: ignore[arg-type]
