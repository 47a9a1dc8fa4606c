"""AutoRound checkpoints (Intel): the layouts of other tools under a name of their own.

`packing_format` says which: GPTQ's with zero points minus 1 or without, AWQ's, or the floats of
compressed-tensors. `extra_config` gives layers bits of their own, by name or by a pattern.

MXINT4, which `data_type` alone tells from MXFP4: a sign above three bits of fourths, two to a byte,

    W[n, k] = (-1)**sign * fourths / 4 * 2**(weight_scale[n, k / 32] - 127)
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign import awq, gptq
from anybit.checkpoint.foreign.base import ANY, TOKENS_STAY, Given, Layer, Part, option, uniform
from anybit.checkpoint.foreign.floats import FP8, float_layer
from anybit.errors import InvalidInput

TOOL = "auto-round"
GPTQ = {  # and whether zero points are stored minus 1
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round": False,
    "auto_round:gptqmodel": False,
}
AWQ = ("auto_round:auto_awq", "auto_round:awq")
FLOATS = ("auto_round:llm_compressor", "auto_round:fp8_static", "auto_round:fp8")
SPECIAL = re.compile(r"[*+?^$|()\[\]{}\\]")  # of patterns, and not of names


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an AutoRound checkpoint."""
    config = given.config

    def bits(part: Part, known: tuple[int, ...]) -> int:
        return bits_of(config, (part.name, given.naming(part.name)), known)

    layout = option(config, "packing_format", (*GPTQ, *AWQ, *FLOATS), TOOL)
    if "mx_int" in str(config.get("data_type")):
        return {p.name: fourths(p, bits(p, (4,))) for p in given.parts("weight_scale")}
    if layout in FLOATS:
        return {
            part.name: float_weight(part, bits(part, (4, 8)))
            for part in given.parts("weight_scale")
        }
    found = given.parts("qweight")
    if layout in AWQ:
        return {part.name: awq.layer(part) for part in found if bits(part, (4,))}
    first = GPTQ[layout]
    other = next(name for name, less_1 in GPTQ.items() if less_1 != first)
    other = f"packing_format: {other}" if config.get("sym") is True else ""
    return {
        part.name: gptq.layer(part, bits(part, gptq.BITS), False, first, False, other)
        for part in found
    }


def bits_of(config: Mapping[str, Any], names: tuple[str, str], known: tuple[int, ...]) -> int:
    """The bits of a layer, by its own settings or by those of all.

    names: in the checkpoint, and in the model.
    """
    extra = config.get("extra_config")
    bits = config.get("bits")
    for pattern, own in extra.items() if isinstance(extra, dict) else ():
        if isinstance(own, dict) and "bits" in own and any(matches(pattern, n) for n in names):
            bits = own["bits"]
            if pattern in names:
                break
    return int(option({"bits": bits}, "bits", known, f"{TOOL}: {names[0]}", required=True))


def matches(pattern: str, name: str) -> bool:
    """Whether a key of `extra_config` is a layer's name, or a pattern that is found in it."""
    if not SPECIAL.search(pattern):
        return pattern == name
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise InvalidInput(f"{TOOL}: extra_config has {pattern!r}, no pattern: {error}") from None


def fourths(part: Part, bits: int) -> Layer:
    """A layer of MXINT4, as integers in units of a fourth."""
    packed = part.find("weight_packed", (torch.uint8,), (ANY, ANY))
    n, k = packed.shape[0], 2 * packed.shape[1]
    if k % 32:
        raise InvalidInput(f"{TOOL}: {part.name}: groups of 32 do not divide {k} columns")
    scale = part.find("weight_scale", (torch.uint8,), (n, k // 32))
    if int(scale.read().max()) == 255:
        raise InvalidInput(f"{part.name}.weight_scale: holds NaN; the checkpoint is damaged")

    def codes() -> Tensor:
        data = packed.read()
        both = torch.stack((data & 15, data >> 4), -1).flatten(1)
        return torch.where(both > 7, 16 - both, 8 + both)

    def scales() -> Tensor:
        return torch.exp2(scale.read().float() - 129)

    dtypes = {"scale": torch.float32}
    return uniform(part, (n, k), bits, codes, scales, None, k // 32, dtypes)


def float_weight(part: Part, bits: int) -> Layer:
    """A layer in the layout of compressed-tensors."""
    key = "weight" if part.has("weight") else "weight_packed"
    known = tuple(FP8) if bits == 8 else (torch.uint8,)
    part.find(key, known)
    part.used.clear()
    scaled = part.has("input_scale") or part.has("input_global_scale")
    part.skip("input_scale", "input_global_scale")
    if part.has("weight_zp"):
        raise InvalidInput(f"{TOOL}: {part.name} has zero points for floats, which cannot be read")
    found = float_layer(part, key, "weight_scale", number="weight_global_scale", divide=True)
    return replace(found, note=TOKENS_STAY if scaled else "")
