"""bitsandbytes checkpoints: nf4 and fp4, with or without double quantization, and int8.

    W.flatten()[i] = quant_map[q[i]] * absmax[i / blocksize]

weight uint8 holds two codes in a byte, the first in the high half; what is no tensor of floats is
JSON in a uint8 tensor. Doubly quantized, absmax is uint8 and stands for
nested_quant_map[absmax[j]] * nested_absmax[j / nested_blocksize] + nested_offset.

Of int8, weight is int8 (N, K) and SCB fp32 (N,): W[n, k] = weight[n, k] * SCB[n] / 127.
"""

import json
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import ANY, Given, Layer, Part, option, uniform
from anybit.checkpoint.foreign.bitfields import unsigned
from anybit.checkpoint.foreign.floats import checked
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.formats.codebook import Codebook
from anybit.formats.table4 import TABLES, Table4

NAMES = {"nf4": "nf4", "fp4": "fp4bnb"}  # of their types, and ours
LARGEST_STATE = 1 << 16
OUTLIERS = "activations but for outliers were quantized to int8 there, and stay in 16 bits here"
STORAGE = ("uint8", "bfloat16", "float16", "float32")  # what the bytes of codes are called


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a bitsandbytes checkpoint."""
    if given.config.get("load_in_8bit"):
        return {part.name: rows_of_int8(part) for part in given.parts("SCB")}
    option(given.config, "bnb_4bit_quant_storage", STORAGE, "bitsandbytes")
    return {part.name: layer(part) for part in given.parts("weight.absmax")}


def rows_of_int8(part: Part) -> Layer:
    """A layer of int8. Its scales, SCB / 127, are rounded to fp32."""
    weight = part.find("weight", (torch.int8,), (ANY, ANY))
    largest = part.find("SCB", (torch.float32,), (weight.shape[0],))
    checked(largest, f"{part.name}.SCB")
    if part.has("weight_format"):
        order = part.find("weight_format", (torch.uint8,), ()).read()
        if order:  # col32, col_turing, col_ampere: of versions before 0.44, on GPUs
            raise InvalidInput(
                f"{part.name}.weight_format: is {int(order)}, the order of one kind of GPU; load "
                "the model with bitsandbytes 0.44 or later, and save it again"
            )

    def codes() -> Tensor:
        return unsigned(weight.read(), 8)

    def scale() -> Tensor:
        return largest.read()[:, None] / 127

    shape = (weight.shape[0], weight.shape[1])
    found = uniform(part, shape, 8, codes, scale, None, 1, {"scale": torch.float32})
    return replace(found, note=OUTLIERS)


def layer(part: Part) -> Layer:
    state = quant_state(part)
    (n, k), block = state["shape"], state["blocksize"]
    count = -(-n * k // block)
    weight = part.find("weight", tuple(getattr(torch, name) for name in STORAGE))
    if math.prod(weight.shape) * weight.torch_dtype.itemsize != -(-n * k // 2):
        raise InvalidInput(
            f"{part.name}: weight is {weight.dtype} of {weight.shape}, and the layer's codes take "
            f"{-(-n * k // 2)} bytes"
        )
    table = part.find("weight.quant_map", (torch.float32,), (16,))
    nested = "nested_blocksize" in state
    absmax = part.find("weight.absmax", (torch.uint8 if nested else torch.float32,), (count,))
    if nested:
        outer = part.find(
            "weight.nested_absmax", (torch.float32,), (-(-count // state["nested_blocksize"]),)
        )
        levels = part.find("weight.nested_quant_map", (torch.float32,), (256,))

    def scale() -> Tensor:
        if not nested:
            return absmax.read()
        each = outer.read()[torch.arange(count) // state["nested_blocksize"]]
        return levels.read()[absmax.read().int()] * each + torch.tensor(state["nested_offset"])

    def codes() -> Tensor:
        pairs = weight.read().flatten().view(torch.uint8)
        return torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[: n * k].view(n, k)

    def read() -> Packed:
        grid = {"scale": scale().view(n, -1), "codebook": table.read().view(1, 16, 1)}
        return Packed.from_codes(fmt, (n, k), codes(), grid)

    def decode() -> Tensor:
        return table.read()[codes().int()] * scale()[torch.arange(n * k) // block].view(n, k)

    used = tuple(part.used)
    if k % block:
        reason = f"K={k} is no multiple of the block of {block}: blocks reach over the ends of rows"
        return Layer((n, k), used, None, decode, reason)
    name = NAMES[state["quant_type"]]
    same = torch.equal(table.read(), torch.tensor(TABLES[name]))
    fmt = Table4(group=block, table=name) if same else Codebook(1, 1, 4, block)
    dtypes = {"scale": torch.float32, "codebook": torch.float32}
    return Layer((n, k), used, fmt, read, dtypes=dtypes)


def quant_state(part: Part) -> dict[str, Any]:
    """The JSON beside the weight, checked as far as sizes depend on it."""
    found = [kind for kind in NAMES if part.has(f"weight.quant_state.bitsandbytes__{kind}")]
    if len(found) != 1:
        raise InvalidInput(
            f"{part.name}: has {len(found)} quant_states of {', '.join(NAMES)}, not 1"
        )
    stored = part.find(f"weight.quant_state.bitsandbytes__{found[0]}", (torch.uint8,))
    try:
        if stored.nbytes > LARGEST_STATE:
            raise InvalidInput(f"{stored.nbytes} bytes")
        state = json.loads(bytes(stored.read().tolist()))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        if len(sizes) != 4 or not all(type(s) is int and s > 0 for s in sizes):
            raise InvalidInput(f"shape and block sizes are {sizes}")
        state["quant_type"] = found[0]
        state["nested_offset"] = float(state.get("nested_offset", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{part.name}: its quant_state cannot be read: {error!r}") from None
    return state
