"""AutoRound checkpoints (Intel): the layouts of other tools under a name of their own.

`packing_format` says which: GPTQ's with zero points minus 1 or without, AWQ's, or the floats of
compressed-tensors. `extra_config` gives layers bits of their own, by name or by a pattern.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from anybit.checkpoint.foreign import awq, gptq
from anybit.checkpoint.foreign.base import TOKENS_STAY, Given, Layer, Part, option
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
