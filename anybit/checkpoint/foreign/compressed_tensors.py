"""compressed-tensors checkpoints in the format "pack-quantized", 2 to 8 bits.

    W[n, k] = weight_scale[n, g] * (q[n, k] - zero[n, g]), g = k / group, or weight_g_idx[k]

weight_packed int32 (N, words) holds q + 2**(bits - 1) along K, low bits first; the zero points,
packed alike, lie along N. Up to version 0.18 a word holds whole codes only, so at 3, 5, 6 and 7
bits some of its bits are unused; from 0.19 on codes cross words. The number of words tells which.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    Layer,
    Part,
    option,
    parts,
    symmetric,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import fields, unpack
from anybit.checkpoint.foreign.gptq import column_order
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

TOOL = "compressed-tensors"
FORMAT = "pack-quantized"
BITS = (2, 3, 4, 5, 6, 7, 8)
STRATEGIES = ("group", "channel", "tensor")
DENSE_SINCE = (0, 19)  # the version from which codes cross words


def layers(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Layer]:
    """The quantized layers of a compressed-tensors checkpoint."""
    option(config, "format", (FORMAT,), TOOL, required=True)
    option(config, "quantization_status", ("compressed",), TOOL)
    option(config.get("sparsity_config") or {}, "format", ("dense",), f"{TOOL}: sparsity_config")
    if config.get("transform_config"):
        raise InvalidInput(f"{TOOL}: weights with a transform_config cannot be read")
    groups = config.get("config_groups")
    groups = [g for g in groups.values() if g.get("weights")] if isinstance(groups, dict) else []
    dense = tuple(map(int, re.findall(r"\d+", str(config.get("version", ""))))) >= DENSE_SINCE
    out = {}
    for part in parts("weight_packed", stored):
        group = group_of(part.name, groups)
        option(group, "format", (FORMAT,), f"{TOOL}: {part.name}")
        option(group, "input_activations", (None,), f"{TOOL}: {part.name}")
        out[part.name] = layer(part, group["weights"], dense)
    return out


def layer(part: Part, weights: Mapping[str, Any], dense: bool) -> Layer:
    """dense: codes cross words, where the number of words does not tell."""
    what = f"{TOOL}: {part.name}"
    bits = option(weights, "num_bits", BITS, what, required=True)
    option(weights, "type", ("int",), what)
    option(weights, "dynamic", (False,), what)
    strategy = option(weights, "strategy", STRATEGIES, what, required=True)
    shape = part.find("weight_shape", (torch.int64, torch.int32), (2,)).read().tolist()
    n, k = int(shape[0]), int(shape[1])
    group = weights.get("group_size") if strategy == "group" else k
    if min(n, k) < 1 or type(group) is not int or group < 1 or k % group:
        raise InvalidInput(f"{what}: a weight of {shape} cannot have groups of {group}")
    groups = k // group
    packed = part.find("weight_packed", (torch.int32,), (n, ANY))
    read_codes = reader(packed.shape[1], bits, k, dense, f"{part.name}.weight_packed")
    found = part.find("weight_scale", FLOATS)
    if strategy != "tensor" or found.shape not in ((), (1,), (1, 1)):
        found = part.find("weight_scale", FLOATS, (n, groups))
    order = None
    if part.has("weight_g_idx"):
        g_idx = part.find("weight_g_idx", (torch.int32, torch.int64), (k,)).read()
        order = column_order(g_idx, groups, part.name)
    return uniform(
        part,
        (n, k),
        bits,
        codes=lambda: read_codes(packed.read()),
        scale=lambda: found.read().reshape(-1, groups).expand(n, groups).contiguous(),
        zero=zero_points(part, bits, (n, groups), dense),
        groups=groups,
        dtypes={"scale": found.torch_dtype},
        order=order,
    )


def zero_points(
    part: Part, bits: int, shape: tuple[int, int], dense: bool
) -> Callable[[], Tensor] | None:
    """A function that reads zero points (N, groups) uint8; None when there are none but zeros."""
    if not part.has("weight_zero_point"):
        return None
    stored = part.find("weight_zero_point", (torch.int32, torch.int8))
    if stored.torch_dtype == torch.int8:  # not packed, and signed
        stored = part.find("weight_zero_point", (torch.int8,), shape)

        def zero() -> Tensor:
            return (stored.read().int() + 2 ** (bits - 1)).to(torch.uint8)
    else:
        n, groups = shape
        stored = part.find("weight_zero_point", (torch.int32,), (ANY, groups))
        read = reader(stored.shape[0], bits, n, dense, f"{part.name}.weight_zero_point")

        def zero() -> Tensor:
            return read(stored.read().T.contiguous()).T.contiguous()

    return None if symmetric(zero(), bits) else zero


def reader(words: int, bits: int, count: int, dense: bool, name: str) -> Callable[[Tensor], Tensor]:
    """How to unpack `count` codes from rows of so many words: (R, words) -> (R, count)."""
    crossing, whole = -(-count * bits // 32), -(-count // (32 // bits))
    if words not in (crossing, whole):
        raise InvalidInput(
            f"{name}: {words} words hold {count} codes of {bits} bits in no known layout; "
            f"expected {crossing}, or {whole} with unused bits"
        )
    if words == crossing and (dense or crossing != whole):
        return lambda t: unpack(t, bits, count)
    return lambda t: fields(t, bits)[:, :count].contiguous()


def group_of(name: str, groups: list[Any]) -> dict[str, Any]:
    """The config group of a layer: by its name before a pattern, before its class."""
    targets = {target: group for group in groups for target in group.get("targets") or ()}
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    for target in ordered:
        pattern = target.removeprefix("re:")
        try:
            if target == name or (pattern != target and re.match(pattern, name)):
                return dict(targets[target])
        except re.error as error:
            raise InvalidInput(f"{TOOL}: target {target!r} is no pattern: {error}") from None
    if "Linear" in targets:
        return dict(targets["Linear"])
    raise InvalidInput(f"{TOOL}: no config group is for {name}; there are {', '.join(ordered)}")
