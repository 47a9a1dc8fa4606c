"""MLX's checkpoints for Macs, "affine": integers with a factor and a shift for each group.

    W[n, k] = scales[n, k // group_size] * q[n, k] + biases[n, k // group_size]

weight uint32 (N, K bits / 32) is a stream of codes along K, low bits first, which cross words at 3,
5 and 6 bits. config.json says "quantization" with sizes, and what differs for layers by their
names. Experts of a block lie in one tensor (experts, N, ...), <block>.switch_mlp.<projection>;
`one_by_one` shows each as a layer of its own, under the names of published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

import torch

from anybit.checkpoint.foreign.base import ANY, FLOATS, Given, Layer, Part, affine, option
from anybit.checkpoint.foreign.bitfields import unpack
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

TOOL = "mlx"
BITS = (4, 2, 3, 5, 6, 8)
STACKED = ".switch_mlp."


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a checkpoint of MLX."""
    own = {}
    for part in given.parts("scales"):
        name = part.name
        if ".experts." in name and f"{name}.scales" in given.stored:  # by the name of their stack
            block, _, expert = name.partition(".experts.")
            name = block + STACKED + expert.partition(".")[2]
        special = given.config.get(name)
        own[part.name] = layer(
            part, {**given.config, **(special if isinstance(special, dict) else {})}
        )
    return own


def layer(part: Part, config: Mapping[str, Any], base: str = "biases") -> Layer:
    """One layer. base: the name of its shifts."""
    what = f"{TOOL}: {part.name}"
    option(config, "mode", ("affine",), what)
    bits = option(config, "bits", BITS, what)
    group = config.get("group_size", 64)
    weight = part.find("weight", (torch.uint32,), (ANY, ANY))
    n, k = weight.shape[0], weight.shape[1] * 32 // bits
    if type(group) is not int or group < 1 or k % group or weight.shape[1] * 32 % bits:
        raise InvalidInput(
            f"{what}: {weight.shape[1]} words of codes of {bits} bits have no groups of {group}"
        )
    factor = part.find("scales", FLOATS, (n, k // group))
    shift = part.find(base, (factor.torch_dtype,), (n, k // group))

    def codes() -> torch.Tensor:
        return unpack(weight.read().view(torch.int32), bits, k)

    return affine(part, (n, k), bits, group, codes, factor.read, shift.read, factor.torch_dtype)


def one_by_one(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The stored tensors, those of all experts cut into one for each."""
    out = {}
    for name, tensor in stored.items():
        block, found, key = name.partition(STACKED)
        if not found:
            out[name] = tensor
            continue
        for e, one in enumerate(tensor.each()):
            out[f"{block}.experts.{e}.{key}"] = one
    return out
