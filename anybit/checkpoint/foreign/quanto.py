"""Checkpoints of optimum-quanto: integers of 2, 4 and 8 bits, and fp8.

    W[n, k] = _scale[n] * _data[n, k]                       8 bits
    W.view(-1, group)[i] = _scale[i] * q[i] - _shift[i]     2 and 4 bits

weight._data is int8 or e4m3 (N, K); of fewer bits weight._data._data uint8, where the low bits of
all bytes, then the next, are the codes of rows of (N K / group, group). quanto_qmap.json names the
layers. The shape of a layer is the model's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    Given,
    Layer,
    Part,
    affine,
    option,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import unsigned
from anybit.checkpoint.foreign.floats import checked, float_layer
from anybit.errors import InvalidInput

TOOL = "quanto"
NOTE = "activations were quantized by fixed scales there, and stay in 16 bits here"
BITS = {"qint8": 8, "qint4": 4, "qint2": 2, "qfloat8": 0, "qfloat8_e4m3fn": 0}


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a checkpoint of quanto."""
    out = {}
    for part in given.parts("weight._scale"):
        own = given.config.get("layers", {}).get(part.name)
        if not isinstance(own, dict):
            raise InvalidInput(f"{TOOL}: quanto_qmap.json does not name {part.name}")
        bits = BITS[option(own, "weights", tuple(BITS), f"{TOOL}: {part.name}", required=True)]
        part.skip("input_scale", "output_scale")
        note = "" if own.get("activations", "none") == "none" else NOTE
        out[part.name] = replace(layer(part, bits), note=note)
    return out


def layer(part: Part, bits: int) -> Layer:
    """One layer. bits: Of its integers; 0 for fp8."""
    if bits == 0:
        return float_layer(part, "weight._data", "weight._scale")
    scale = part.find("weight._scale", FLOATS, (ANY, 1))
    checked(scale, f"{part.name}.weight._scale")
    if bits == 8:
        data = part.find("weight._data", (torch.int8,), (scale.shape[0], ANY))

        def signed() -> Tensor:
            return unsigned(data.read(), bits)

        shape = (data.shape[0], data.shape[1])
        dtypes = {"scale": scale.torch_dtype}
        return uniform(part, shape, bits, signed, scale.read, None, 1, dtypes)
    packed = part.find("weight._data._data", (torch.uint8,), (ANY, ANY))
    shift = part.find("weight._shift", (scale.torch_dtype,), scale.shape)
    rows, group = scale.shape[0], packed.shape[1]
    if packed.shape[0] != -(-rows * bits // 8):
        raise InvalidInput(
            f"{part.name}.weight._data._data: {packed.shape} holds no codes of {bits} bits for "
            f"{rows} groups"
        )

    def cut(shape: tuple[int, int]) -> Layer:
        n, k = shape
        if k % group or n * k != rows * group:
            raise InvalidInput(
                f"{part.name}: config.json asks for a weight of {shape}, the checkpoint holds "
                f"{rows} groups of {group}"
            )

        def codes() -> Tensor:
            words = packed.read()
            fields = [words >> at & 2**bits - 1 for at in range(0, 8, bits)]
            return torch.cat(fields)[:rows].reshape(shape)

        def factor() -> Tensor:
            return scale.read().reshape(n, -1)

        def base() -> Tensor:
            return -shift.read().reshape(n, -1)

        return affine(part, shape, bits, group, codes, factor, base, scale.torch_dtype)

    return replace(cut((rows, group)), cut=cut)
