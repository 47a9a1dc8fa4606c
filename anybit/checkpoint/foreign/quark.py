"""Quark checkpoints (AMD): MXFP4, MXFP6 in e2m3 or e3m2, FP8, and integers of 4 and 8 bits.

`<layer>.weight` holds elements and `<layer>.weight_scale` their scales; those of floats are in
`floats.py`. A layer's own settings come before those of all. Integers:

    W[n, k] = weight_scale[n, g] * (q[n, k] - weight_zero_point[n, g])

With groups, all three are stored transposed, (K, N) and (K / group, N); otherwise (N, K) and (N,).
Eight numbers of 4 bits are an int32 along the last axis, in AWQ's order if they are "reordered".
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.awq import ORDER
from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    TOKENS_STAY,
    Given,
    Layer,
    Part,
    option,
    symmetric,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import fields
from anybit.checkpoint.foreign.floats import checked, float_layer
from anybit.errors import InvalidInput

ELEMENTS = {
    "fp4": (2, 1),
    "fp6_e2m3": (2, 3),
    "fp6_e3m2": (3, 2),
    "fp8_e4m3": (4, 3),
    "fp8_e5m2": (5, 2),
}
INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
AXES = {"per_group": (1, -1), "per_channel": (0,), "per_tensor": ()}  # that scales run along
PER_TOKEN = {"int8": "int8", "fp8_e4m3": "fp8"}


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a Quark checkpoint."""
    export = given.config.get("export")
    order = (
        option(
            export if isinstance(export, dict) else {}, "pack_method", ("reorder", "order"), "quark"
        )
        == "reorder"
    )
    found = given.parts("weight_scale")
    return {
        part.name: layer(part, settings(given.config, part.name, given.naming(part.name)), order)
        for part in found
    }


def settings(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The settings of a layer, by its names in the checkpoint and in the model."""
    if config.get("layer_type_quant_config"):
        raise InvalidInput("quark: layer_type_quant_config, settings by class, cannot be read")
    for pattern, own in mapping(config.get("layer_quant_config"), "layer_quant_config").items():
        if any(fnmatchcase(name, pattern) for name in names):
            return mapping(own, f"layer_quant_config of {pattern}")
    return mapping(config.get("global_quant_config"), "global_quant_config")


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Settings that are an object, or nothing."""
    if not isinstance(value or {}, Mapping):
        raise InvalidInput(f"quark: {what} is {type(value).__name__}, not an object")
    return value or {}


def layer(part: Part, config: Mapping[str, Any], reordered: bool) -> Layer:
    weights = config.get("weight") or {}
    if isinstance(weights, list):  # NVFP4 in two steps
        weights = weights[0] if len(weights) == 1 else {"dtype": f"{len(weights)} steps"}
    weights = mapping(weights, f"weight of {part.name}")
    known = (*ELEMENTS, *INTEGERS)
    dtype = option(weights, "dtype", known, f"quark: {part.name}", required=True)
    part.skip("input_scale", "input_zero_point", "output_scale", "bias_scale")
    if dtype in INTEGERS:
        found = whole_numbers(part, weights, dtype, reordered)
    else:
        found = float_layer(part, "weight", "weight_scale", element=ELEMENTS[dtype])
    activation, note = activations(config.get("input_tensors"))
    return replace(found, activation=activation, note=note)


def activations(config: Any) -> tuple[str | None, str]:
    """What activations are quantized to as we do it, and what is done there and not here."""
    if not config:
        return None, ""
    if isinstance(config, dict) and config.get("is_dynamic") is True:
        per_token = config.get("qscheme") == "per_token"
        kind = PER_TOKEN.get(str(config.get("dtype")))
        if per_token and kind and config.get("symmetric") is not False:
            return kind, ""
    return None, TOKENS_STAY


def whole_numbers(part: Part, weights: Mapping[str, Any], dtype: str, reordered: bool) -> Layer:
    """A layer of integers."""
    what = f"quark: {part.name}"
    bits, signed = INTEGERS[dtype], dtype.startswith("int")
    scheme = option(weights, "qscheme", tuple(AXES), what, required=True)
    if AXES[scheme]:
        option(weights, "ch_axis", AXES[scheme], what)
    word = torch.int32 if bits == 4 else torch.int8 if signed else torch.uint8
    each = 8 if bits == 4 else 1
    data = part.find("weight", (word,), (ANY, ANY))
    rows, columns = data.shape[0], data.shape[1] * each
    grouped = scheme == "per_group"
    n, k = (columns, rows) if grouped else (rows, columns)
    scale = part.find("weight_scale", FLOATS, (ANY, n) if grouped else None)
    groups = scale.shape[0] if grouped else 1
    sizes = ((n,), (n, 1)) if scheme == "per_channel" else ((), (1,))
    if not groups or k % groups or not (grouped or scale.shape in sizes):
        raise InvalidInput(f"{what}: {scheme} scales of {scale.shape} do not fit {(n, k)} weights")
    checked(scale, f"{part.name}.weight_scale")
    flip = 1 << (bits - 1) if signed else 0

    def unpacked(tensor: Tensor) -> Tensor:
        """(R, columns) uint8, as unsigned codes."""
        if bits == 4:
            return fields(tensor, bits, ORDER if reordered else None) ^ flip
        return tensor.view(torch.uint8) ^ flip

    zero: Callable[[], Tensor] | None = None
    if part.has("weight_zero_point"):
        zeros = part.find("weight_zero_point", (torch.int32, torch.int8, torch.uint8))
        alone = zeros.shape in ((), (1,)) and n * groups > 1
        fits = zeros.torch_dtype == word and zeros.shape in packings(n, groups, each)
        if not (alone or fits):
            raise InvalidInput(
                f"{what}.weight_zero_point: {zeros.dtype} of {zeros.shape} do not fit {(n, groups)}"
            )

        def zero() -> Tensor:
            if not alone:
                rows = zeros.read().reshape(groups if grouped else 1, -1)
                return unpacked(rows).T.contiguous()
            number = int(zeros.read()) + flip
            if not 0 <= number < 2**bits:
                raise InvalidInput(f"{what}.weight_zero_point: {number - flip} in {bits} bits")
            return torch.full((n, groups), number, dtype=torch.uint8)

    if zero is None and not signed:
        raise InvalidInput(f"{what}.weight_zero_point is missing, which {dtype} needs")

    def codes() -> Tensor:
        q = unpacked(data.read())
        return q.T.contiguous() if grouped else q

    def scales() -> Tensor:
        s = scale.read()
        return (s.T if grouped else s.reshape(-1, 1).expand(n, 1)).contiguous()

    if zero is not None and symmetric(zero(), bits):
        zero = None
    return uniform(part, (n, k), bits, codes, scales, zero, groups, {"scale": scale.torch_dtype})


def packings(n: int, groups: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of zero points (groups, N), `each` in a word."""
    words = -(-n // each)
    return ((groups, words), (words,), (words, 1)) if groups == 1 else ((groups, words),)
