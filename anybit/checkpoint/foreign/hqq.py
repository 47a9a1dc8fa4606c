"""HQQ checkpoints in safetensors: 1 to 6 and 8 bits, with zero points that are no integers.

    W = ((q - zero) * scale).reshape(N, K), q (N K / group, group) for axis 1

W_q holds q cut along dim 0 into equal parts that share words, the first part in the highest bits.
With axis 0, a group is a column of q (group, N K / group): weights of one column of W, and no
format of ours has groups across rows, so such layers are decoded.
"""

from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import FLOATS, Given, Layer, Part, check_codes, uniform
from anybit.errors import InvalidInput

# packing: (bits of a code, codes in a word, dtype of words)
PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}
UNREAD = (  # how the weight was quantized, and how HQQ multiplies with it
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "offload_meta",
    "optimize",
    "round_zero",
    "stores_quant_config",
    "unpack_view_dtype",
)


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an HQQ checkpoint. Each one says itself how it is stored."""
    return {part.name: layer(part) for part in given.parts("W_q")}


def layer(part: Part) -> Layer:
    packing = "".join(chr(c) for c in small(part, "packing", torch.uint8))
    if packing not in PACKINGS:
        raise InvalidInput(
            f"{part.name}: packing {packing!r} cannot be read, only {', '.join(PACKINGS)}"
        )
    for key in ("quant_scale", "quant_zero", "view_as_float"):
        if part.has(key) and any(small(part, key, torch.uint8)):
            raise InvalidInput(f"{part.name}: {key} is set, which cannot be read")
    shape = small(part, "shape", torch.int64)
    nbits = number(part, "nbits", torch.int32, torch.float32)
    group, axis = (int(number(part, key, torch.int32)) for key in ("group_size", "axis"))
    if len(shape) != 2 or min(shape) < 1 or group < 1 or shape[0] * shape[1] % group:
        raise InvalidInput(f"{part.name}: a weight of {shape} cannot have groups of {group}")
    if axis not in (0, 1) or not 1 <= nbits <= 8:
        raise InvalidInput(f"{part.name}: axis {axis} and {nbits} bits cannot be read")
    part.skip(*UNREAD)
    n, k = int(shape[0]), int(shape[1])
    bits = -int(-nbits // 1)  # 1.58 bits are 3 levels in 2 bits
    rows, columns = (n * k // group, group) if axis else (group, n * k // group)
    width, per, dtype = PACKINGS[packing]
    words = part.find("W_q", (dtype,), (-(-rows // per), columns))
    factors = (rows, 1) if axis else (1, columns)
    scale = part.find("scale", FLOATS, factors)
    zero = part.find("zero", FLOATS, factors)

    def codes() -> Tensor:
        w = words.read()
        parts = [(w >> width * i) & ((1 << width) - 1) for i in reversed(range(per))]
        q = torch.cat([part.to(torch.uint8) for part in parts])[:rows]
        return check_codes(q, 2**bits - 1, f"{part.name}.W_q")

    def decode() -> Tensor:
        q = codes().float().sub_(zero.read().float()).mul_(scale.read().float())
        return q.reshape(n, k)

    if axis == 0 or k % group:
        reason = "groups run across rows (axis=0)" if axis == 0 else f"K={k}, groups of {group}"
        return Layer((n, k), tuple(part.used), None, decode, reason)
    return uniform(
        part,
        (n, k),
        bits,
        codes=lambda: codes().view(n, k),
        scale=lambda: scale.read().view(n, -1),
        zero=lambda: zero.read().view(n, -1),
        groups=k // group,
        dtypes={"scale": scale.torch_dtype, "zero": zero.torch_dtype},
    )


def number(part: Part, key: str, *dtypes: torch.dtype) -> Any:
    """The only number of such a tensor."""
    numbers = small(part, key, *dtypes)
    if len(numbers) != 1:
        raise InvalidInput(f"{part.name}.{key}: expected one number, found {numbers}")
    return numbers[0]


def small(part: Part, key: str, *dtypes: torch.dtype) -> list[Any]:
    """The numbers of one of the small tensors that describe a layer."""
    stored = part.find(key, dtypes)
    if stored.nbytes > 64:
        raise InvalidInput(
            f"{part.name}.{key}: {stored.nbytes} bytes are no description of a layer"
        )
    return stored.read().flatten().tolist()
