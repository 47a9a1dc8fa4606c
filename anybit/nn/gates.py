"""Small layers that decide what a model remembers, and which experts or tokens it asks.

An error in a decay is multiplied from token to token, and one in a router takes another expert.
Together they hold about a thousandth of the weights.
"""

import re
from collections.abc import Iterator

from torch import nn

from anybit.nn.experts import Experts, holds_experts

DECAY = "A_log"  # (heads,), or (channels, states) in Mamba 1; all families call it so
HEADS = re.compile(r"(^|_)heads$")  # num_heads, n_heads, num_v_heads
SMALL = 16  # times as many inputs as outputs, or the other way round


def gates(model: nn.Module) -> set[str]:
    """Names of the linear layers that make decays, step sizes and gates of heads, and routers."""
    out, heads = set[str](), dict[str, set[int]]()
    for name, module in model.named_modules():
        numbers = {v for k, v in vars(module).items() if HEADS.search(k) and type(v) is int}
        heads[name] = numbers or heads.get(name.rpartition(".")[0], set())
        found = {*of_decays(module)} if not name.endswith("experts") else set()
        for key, child in module.named_children():
            if count := count_of(child):
                found |= {*routers(module, key, count)}
            if isinstance(child, nn.Linear) and child.out_features * SMALL <= child.in_features:
                found |= {key} if child.out_features in heads[name] else set()
        out |= {f"{name}.{key}" for key in found}
    return out


def of_decays(module: nn.Module) -> Iterator[str]:
    """Names of the layers within a module that make its decays: one a head, or of low rank."""
    decay = getattr(module, DECAY, None)
    if not isinstance(decay, nn.Parameter):
        return
    shapes = dict(linears(module))
    if decay.ndim == 2:  # one a channel
        yield from (key for key, (n, k) in shapes.items() if n == len(decay) and k < n)
        return
    count = decay.numel()
    ranks = {k for n, k in shapes.values() if n % count == 0 and k * SMALL <= n}
    for key, (n, k) in shapes.items():
        if (n in (count, 2 * count) and n < k) or min(n, k) in ranks:
            yield key


def routers(block: nn.Module, experts: str, count: int) -> Iterator[str]:
    """Names of the layers beside a block's experts that have an output for each: no MLP has one."""
    for name, child in block.named_children():
        found = [] if name == experts else [*linears(child)]
        if len(found) == 1 and found[0][1][0] == count:
            yield ".".join(filter(None, (name, found[0][0])))


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
