"""BitNet checkpoints: -1, 0 and 1, four to a byte, and one scale.

weight uint8 (N / 4, K): bits 2 i and 2 i + 1 of row r are the code of row r + i N / 4, its number
plus 1. W = number * weight_scale for transformers' "autobitlinear", and number / weight_scale for
"bitlinear". Activations are quantized to int8, per token.
"""

import torch

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    Given,
    Layer,
    Part,
    check_codes,
    option,
)
from anybit.checkpoint.foreign.floats import checked
from anybit.core.packed import Packed
from anybit.formats.integer import Integer

PER_BYTE = 4


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a BitNet checkpoint."""
    config = given.config
    kind = option(config, "linear_class", ("bitlinear", "autobitlinear"), "bitnet")
    option(config, "quantization_mode", ("offline",), "bitnet")
    option(config, "use_rms_norm", (False,), "bitnet")  # of a layer's inputs
    return {part.name: layer(part, kind == "bitlinear") for part in given.parts("weight_scale")}


def layer(part: Part, divide: bool) -> Layer:
    weight = part.find("weight", (torch.uint8,), (ANY, ANY))
    found = part.find("weight_scale", FLOATS, (1,))
    checked(found, f"{part.name}.weight_scale")
    n, k = weight.shape[0] * PER_BYTE, weight.shape[1]
    fmt = Integer(2)  # whose codes stand for -2 to 1

    def read() -> Packed:
        words = weight.read()
        codes = torch.cat([words >> 2 * i & 3 for i in range(PER_BYTE)])
        check_codes(codes, 2, f"{part.name}.weight")
        scale = found.read().float()
        scale = (1 / scale if divide else scale).expand(n, 1).contiguous()
        return Packed.from_codes(fmt, (n, k), codes + 1, {"scale": scale})

    dtypes = {"scale": torch.float32}
    return Layer((n, k), tuple(part.used), fmt, read, dtypes=dtypes, activation="int8")
