"""Small layers that decide what a model remembers, and which experts or tokens it asks.

An error in a decay is multiplied from token to token, and one in a router takes another expert.
Together they hold about a thousandth of the weights.
"""

import math
import re
from collections.abc import Iterator, Mapping

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
        decay = getattr(module, DECAY, None)
        found = set[str]()
        if isinstance(decay, nn.Parameter) and not name.endswith("experts"):
            found |= {*of_decays(tuple(decay.shape), dict(linears(module)))}
        for key, child in module.named_children():
            if count := count_of(child):
                found |= {*routers(module, key, count)}
            if isinstance(child, nn.Linear) and child.out_features * SMALL <= child.in_features:
                found |= {key} if child.out_features in heads[name] else set()
        out |= {f"{name}.{key}" for key in found}
    return out


def of_decays(decay: tuple[int, ...], layers: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Names of the layers that make decays of this shape: one a head, or of low rank.

    layers: Shapes (N, K) of those of the decays' module, by name.
    """
    count = math.prod(decay)
    if len(decay) == 2:  # one a channel
        yield from (key for key, (n, k) in layers.items() if n == decay[0] and k < n)
        return
    ranks = {k for n, k in layers.values() if n % count == 0 and k * SMALL <= n}
    for key, (n, k) in layers.items():
        if (n in (count, 2 * count) and n < k) or min(n, k) in ranks:
            yield key


def gates_named(
    tensors: Mapping[str, tuple[int, ...]], layers: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """As `gates`, by the shapes of tensors and layers, where no router is a linear layer."""
    own: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in layers.items():
        module, _, key = name.rpartition(".")
        own.setdefault(module, {})[key] = shape
    decays = {n.rpartition(".")[0]: s for n, s in tensors.items() if n.endswith(f".{DECAY}")}
    return {f"{at}.{k}" for at, shape in decays.items() for k in of_decays(shape, own.get(at, {}))}


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
