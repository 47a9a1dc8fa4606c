"""compressed-tensors checkpoints: integers of 1 to 8 bits, packed or not, and small floats.

"pack-quantized" and "int-quantized":

    W[n, k] = weight_scale[n, g] * (q[n, k] - zero[n, g]), g = k / group, or weight_g_idx[k]

weight_packed int32 (N, words) holds q + 2**(bits - 1) along K, low bits first; the zero points,
packed alike, lie along N. Up to version 0.18 a word holds whole codes only, so at 3, 5, 6 and 7
bits some of its bits are unused; from 0.19 on codes cross words. The number of words tells which.
Codes of "int-quantized" are an int8 for each. The float formats are those of `floats.py`; NVFP4's
scales are divided by weight_global_scale.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    Given,
    Layer,
    Part,
    block_of,
    check_codes,
    option,
    symmetric,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import fields, unpack, unsigned
from anybit.checkpoint.foreign.floats import float_layer
from anybit.checkpoint.foreign.gptq import column_order
from anybit.errors import InvalidInput

TOOL = "compressed-tensors"
FORMAT = "pack-quantized"
INTEGERS = (FORMAT, "int-quantized", "naive-quantized")
FLOATING = (
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
MIXED = "mixed-precision"
FORMATS = tuple(dict.fromkeys((*INTEGERS, *FLOATING)))
BITS = (2, 3, 4, 5, 6, 7, 8)
ELEMENTS = {4: (2, 1), 6: (2, 3), 8: (4, 3)}  # of floats, by their bits
STRATEGIES = ("group", "channel", "tensor")
OUTPUTS = "outputs were quantized by fixed scales there, and are not here"
UNORDERED = -1  # in weight_g_idx of layers that were not calibrated: columns are in order
DENSE_SINCE = (0, 19)  # the version from which codes cross words


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a compressed-tensors checkpoint."""
    config = given.config
    option(config, "format", (*FORMATS, MIXED), TOOL, required=True)
    option(config, "quantization_status", ("compressed",), TOOL)
    option(config.get("sparsity_config") or {}, "format", ("dense",), f"{TOOL}: sparsity_config")
    option(config, "moe_sparsity_config", (None,), TOOL)  # blocks lack some of the experts
    groups = config.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, dict) else []
    if strange := next((g for g in groups if not isinstance(g, dict)), None):
        raise InvalidInput(f"{TOOL}: config_groups has {strange!s:.80}, and not settings")
    groups = [g for g in groups if g.get("weights")]
    dense = tuple(map(int, re.findall(r"\d+", str(config.get("version", ""))))) >= DENSE_SINCE
    out = {}
    for part in given.parts("weight_scale"):
        group = group_of(part.name, given.naming(part.name), groups)
        what = f"{TOOL}: {part.name}"
        floats = option(group["weights"], "type", ("int", "float"), what) == "float"
        own = group.get("format") or config["format"]
        if own != MIXED:
            option({"format": own}, "format", FLOATING if floats else INTEGERS, what)
        part.skip("input_scale", "input_zero_point", "input_global_scale")
        part.skip("output_scale", "output_zero_point")
        found = (
            float_weight(part, group["weights"]) if floats else layer(part, group["weights"], dense)
        )
        activation, note = activations(group.get("input_activations"))
        if group.get("output_activations"):
            note = "; ".join(filter(None, (note, OUTPUTS)))
        out[part.name] = replace(found, activation=activation, note=note)
    return out


def activations(config: Any) -> tuple[str | None, str]:
    """What activations are quantized to as we do it, and what is done there and not here."""
    if not config:
        return None, ""
    bits, kind = config.get("num_bits"), config.get("type")
    per_token = config.get("dynamic") is True and config.get("strategy") == "token"
    if per_token and bits == 8 and config.get("symmetric", True):
        return ("fp8" if kind == "float" else "int8"), ""
    return None, (
        f"activations were quantized to {kind}{bits} by {config.get('strategy')} there, and stay "
        "in 16 bits here"
    )


def float_weight(part: Part, weights: Mapping[str, Any]) -> Layer:
    """A layer of small floats."""
    what = f"{TOOL}: {part.name}"
    bits = option(weights, "num_bits", (4, 6, 8), what, required=True)
    option(weights, "dynamic", (False,), what)
    option(weights, "symmetric", (True,), what)
    blocked = weights.get("strategy") == "block"
    part.skip("weight_shape")
    return float_layer(
        part,
        "weight" if part.has("weight") else "weight_packed",
        "weight_scale",
        element=ELEMENTS[bits],
        block=block_of(weights, "block_structure", what) if blocked else None,
        number="weight_global_scale",
        divide=True,
    )


def layer(part: Part, weights: Mapping[str, Any], dense: bool) -> Layer:
    """dense: codes cross words, where the number of words does not tell."""
    what = f"{TOOL}: {part.name}"
    bits = option(weights, "num_bits", (1, *BITS), what, required=True)
    option(weights, "type", ("int",), what)
    option(weights, "dynamic", (False,), what)
    strategy = option(weights, "strategy", STRATEGIES, what, required=True)
    if part.has("weight"):
        n, k = part.find("weight", (torch.int8,), (ANY, ANY)).shape
    else:
        n, k = part.find("weight_shape", (torch.int64, torch.int32), (2,)).read().tolist()
    group = weights.get("group_size") if strategy == "group" else k
    if min(n, k) < 1 or type(group) is not int or group < 1 or k % group:
        raise InvalidInput(f"{what}: a weight of {(n, k)} cannot have groups of {group}")
    groups = k // group
    codes = codes_of(part, bits, (n, k), dense)
    found = part.find("weight_scale", FLOATS)
    if strategy != "tensor" or found.shape not in ((), (1,), (1, 1)):
        found = part.find("weight_scale", FLOATS, (n, groups))
    order = None
    if part.has("weight_g_idx"):
        g_idx = part.find("weight_g_idx", (torch.int32, torch.int64), (k,)).read()
        if not (g_idx == UNORDERED).all():
            order = column_order(g_idx, groups, part.name)
    return uniform(
        part,
        (n, k),
        bits,
        codes=codes,
        scale=lambda: found.read().reshape(-1, groups).expand(n, groups).contiguous(),
        zero=zero_points(part, bits, (n, groups), dense),
        groups=groups,
        dtypes={"scale": found.torch_dtype},
        order=order,
    )


def codes_of(part: Part, bits: int, shape: tuple[int, int], dense: bool) -> Callable[[], Tensor]:
    """A function that reads codes (N, K) uint8: packed words, or signed bytes."""
    n, k = shape
    if not part.has("weight"):
        packed = part.find("weight_packed", (torch.int32,), (n, ANY))
        read = reader(packed.shape[1], bits, k, dense, f"{part.name}.weight_packed")
        return lambda: read(packed.read())
    plain = part.find("weight", (torch.int8,), shape)

    def codes() -> Tensor:
        numbers = plain.read().to(torch.int16) + 2 ** (bits - 1)
        if numbers.numel() and int(numbers.min()) < 0:
            raise InvalidInput(f"{part.name}.weight: holds numbers below those of {bits} bits")
        return check_codes(numbers, 2**bits - 1, f"{part.name}.weight").to(torch.uint8)

    return codes


def zero_points(
    part: Part, bits: int, shape: tuple[int, int], dense: bool
) -> Callable[[], Tensor] | None:
    """A function that reads zero points (N, groups) uint8; None when there are none but zeros."""
    if not part.has("weight_zero_point"):  # of 1 bit, -1 and 0: our `int1` without is -1 and 1
        return None if bits > 1 else lambda: torch.ones(shape, dtype=torch.uint8)
    stored = part.find("weight_zero_point", (torch.int32, torch.int8))
    if stored.torch_dtype == torch.int8:  # not packed, and signed
        stored = part.find("weight_zero_point", (torch.int8,), shape)

        def zero() -> Tensor:
            return unsigned(stored.read(), bits)
    else:
        n, groups = shape
        stored = part.find("weight_zero_point", (torch.int32,), (ANY, groups))
        read = reader(stored.shape[0], bits, n, dense, f"{part.name}.weight_zero_point")

        def zero() -> Tensor:
            return read(stored.read().T.contiguous()).T.contiguous()

    return None if bits > 1 and symmetric(zero(), bits) else zero


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


def kinds(own: str) -> tuple[str, ...]:
    """Classes that a layer may be of, by its name in the model: what is known before it is made."""
    words = re.search("embed|wte$", own.rpartition(".")[2])
    return ("Embedding", "Linear") if words else ("Linear",)


def group_of(name: str, own: str, groups: list[Any]) -> dict[str, Any]:
    """The config group of a layer: by its name before a pattern, before its class.

    name, own: in the checkpoint, and in the model.
    """
    targets = {target: group for group in groups for target in group.get("targets") or ()}
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    for target in ordered:
        pattern = target.removeprefix("re:")
        try:
            if target in (own, name) or (
                pattern != target and (re.match(pattern, own) or re.match(pattern, name))
            ):
                return dict(targets[target])
        except re.error as error:
            raise InvalidInput(f"{TOOL}: target {target!r} is no pattern: {error}") from None
    for kind in kinds(own):
        if kind in targets:
            return dict(targets[kind])
    raise InvalidInput(f"{TOOL}: no config group is for {name}; there are {', '.join(ordered)}")
