"""transformers' "gemma" checkpoints: integers of 2, 4 and 8 bits, one scale a row, embeddings too.

    W[n, k] = weight_scale[n] * q[n, k]

weight is int8 (N, K), or uint8 (N, K bits / 8) of q + 2**(bits - 1), low bits first. Embeddings are
`embedding_quantized` and `embedding_scale` (words, blocks). `module_quant_configs` says the bits of
layers by patterns of their names.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import ANY, FLOATS, Given, Layer, Part, option, uniform
from anybit.checkpoint.foreign.bitfields import unsigned
from anybit.checkpoint.foreign.floats import checked
from anybit.core.planes import unpack
from anybit.errors import InvalidInput

TOOL = "gemma"
BITS = (4, 2, 8)
KEYS = (("weight", "weight_scale"), ("embedding_quantized", "embedding_scale"))
SCALES = ("input_activation_scale", "output_activation_scale")
NOTE = "activations were quantized to int8 by fixed scales there, and stay in 16 bits here"


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a "gemma" checkpoint."""
    out = {}
    for weight, scale in KEYS:
        for part in given.parts(scale):
            bits = bits_of(given.naming(part.name), given.config)
            out[part.name] = layer(part, weight, scale, bits)
    return out


def bits_of(name: str, config: Mapping[str, Any]) -> int:
    """Bits of a layer, by the first pattern of the config that is found first in its name."""
    own = config.get("module_quant_configs") or {}
    if not isinstance(own, dict) or not all(isinstance(inner, dict) for inner in own.values()):
        raise InvalidInput(
            f"{TOOL}: module_quant_configs: {own!r:.80}; objects by patterns are known"
        )
    joined = "|".join(f"(?P<g{i}>{pattern})" for i, pattern in enumerate(own))
    try:
        found = re.search(joined, name) if own else None
    except re.error as error:
        raise InvalidInput(f"{TOOL}: module_quant_configs: {joined!r}: {error}") from None
    settings: Mapping[str, Any] = config
    if found is not None:
        group = next(g for g, text in found.groupdict().items() if text is not None)
        settings = {"num_bits": config.get("num_bits")} | [*own.values()][int(group[1:])]
    return int(option(settings, "num_bits", BITS, f"{TOOL}: {name}"))


def layer(part: Part, key: str, scale_key: str, bits: int) -> Layer:
    """One layer. key, scale_key: of its tensors."""
    weight = part.find(key, (torch.int8 if bits == 8 else torch.uint8,), (ANY, ANY))
    n, k = weight.shape[0], weight.shape[1] * 8 // bits
    scale = part.find(scale_key, FLOATS, (n, ANY))
    checked(scale, f"{part.name}.{scale_key}")
    groups = scale.shape[1]
    if k % groups:
        raise InvalidInput(f"{part.name}.{scale_key}: {groups} blocks do not divide {k} columns")
    used = [part.find(name, FLOATS) for name in SCALES if part.has(name)]
    note = NOTE if any(tensor.read().any() for tensor in used) else ""

    def codes() -> Tensor:
        data = weight.read()
        if bits == 8:
            return unsigned(data, bits)
        words = torch.nn.functional.pad(data, (0, -data.shape[1] % 4)).view(torch.int32)
        return unpack((words,), bits, k)

    dtypes = {"scale": scale.torch_dtype}
    found = uniform(part, (n, k), bits, codes, scale.read, None, groups, dtypes)
    return replace(found, note=note)
