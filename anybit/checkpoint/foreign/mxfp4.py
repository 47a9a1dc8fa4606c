"""GPT-OSS's checkpoints: the experts of a block in MXFP4, everything else dense.

`<experts>.gate_up_proj_blocks` uint8 (experts, N, K / 32, 16) holds e2m1 numbers, the first of two
in the low half of a byte, and `..._scales` uint8 (experts, N, K / 32) exponents of 2, plus 127.
Biases are (experts, N). `one_by_one` shows every expert as a layer of its own.
"""

from collections.abc import Mapping

from anybit.checkpoint.foreign.base import Given, Layer
from anybit.checkpoint.foreign.floats import float_layer
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.nn.experts import FUSED

KEYS = {
    f"{name}_{end}": (name, key)
    for name in FUSED
    for end, key in (("blocks", "blocks"), ("scales", "scales"), ("bias", "bias"))
}


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a checkpoint like GPT-OSS's."""
    return {part.name: float_layer(part, "blocks", "scales") for part in given.parts("blocks")}


def one_by_one(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The stored tensors, those of all experts cut into one for each where they are MXFP4."""
    out = {}
    for name, tensor in stored.items():
        experts, _, key = name.rpartition(".")
        coded = key in KEYS and f"{experts}.{KEYS[key][0]}_blocks" in stored
        if not coded or not experts.endswith(".experts"):
            out[name] = tensor
            continue
        if len(tensor.shape) < 2 or not tensor.shape[0]:
            raise InvalidInput(f"{name}: a tensor of {tensor.shape} holds no experts")
        projection, own = KEYS[key]
        for e, one in enumerate(tensor.each()):
            out[f"{experts}.{e}.{projection}.{own}"] = one
    return out
