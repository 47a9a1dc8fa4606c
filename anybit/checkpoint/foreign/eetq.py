"""EETQ's checkpoints: int8 with a scale for each output, in the order of its kernels.

    W[n, k] = weight_scales[n] * q[n, k]

weight int8 (K, N) holds q + 128 as CUTLASS's kernels for sm_75 and newer read it: bytes of columns
n and n + 1 interleaved every 64 rows k, 16 rows in the order of one `mma`, and the inner two bytes
of each four exchanged.
"""

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import ANY, Given, Layer, Part, uniform
from anybit.checkpoint.foreign.floats import checked
from anybit.errors import InvalidInput

TILE = 64  # rows k of a column that lie together
ROWS = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])  # stored, of 16
PLACES = [0, 2, 1, 3]  # stored, of 4 bytes


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a checkpoint of EETQ."""
    return {part.name: layer(part) for part in given.parts("weight_scales")}


def layer(part: Part) -> Layer:
    weight = part.find("weight", (torch.int8,), (ANY, ANY))
    k, n = weight.shape
    scale = part.find("weight_scales", (torch.float16,), (n,))
    checked(scale, f"{part.name}.weight_scales")
    if k % TILE or n % 2:
        raise InvalidInput(
            f"{part.name}.weight: {weight.shape} is no whole number of {TILE} inputs and 2 outputs"
        )

    def codes() -> Tensor:
        return in_order(weight.read().view(torch.uint8), n, k)

    def scales() -> Tensor:
        return scale.read()[:, None]

    return uniform(part, (n, k), 8, codes, scales, None, 1, {})


def in_order(data: Tensor, n: int, k: int) -> Tensor:
    """Codes (N, K) uint8 of the stored bytes."""
    data = data.reshape(-1, 4)[:, PLACES]
    data = data.reshape(n // 2, k // TILE, 2, TILE).transpose(1, 2)
    stored = data.reshape(n, k // 16, 16)
    out = torch.empty_like(stored)
    out[:, :, ROWS] = stored
    return out.reshape(n, k)
