"""K or V in 4 bits: the definition, in plain torch.

A head's numbers x are c * scale + low with codes c from 0 to 15, and scale and low in fp16 for each
group of channels of each token. Byte i holds the codes of channels i and i + D / 2, the
first in its low bits, so that unpacked bytes are the two halves of a head, as rotary embeddings
have them; a group lies in one half.

Some channels of K are far larger than others in most models. So K is rotated by a Hadamard matrix
first, which spreads them over many channels; products with a query that is rotated, too, stay
the same. V has no such channels and is left as it is. A large bias of K, the same in all tokens,
takes the codes' range all the same: such layers get more bits (`KvFormat.with_bias`).
"""

import torch
from torch import Tensor

from anybit.kernels.kv.format import Numbers, zeros
from anybit.kernels.reference import over

MOST = 15.0  # code
# fp16 has nothing smaller; zeros, whose range is none, need a scale to be divided by.
LEAST_SCALE = 2.0**-24


class Int4(Numbers):
    """Codes of 4 bits. group: channels that share a scale, at most; rotated: as K is."""

    packs, kind, side_by_side, most_bias = 2, "int4", True, 4.0

    def __init__(self, group: int, rotated: bool = False) -> None:
        super().__init__(torch.uint8)
        self.group, self.rotated = group, rotated

    def empty_scale(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        blocks, heads, size, dim = shape
        return zeros((blocks, heads, groups_of(dim, self.group), size, 2), torch.half, device)

    def turn(self, x: Tensor) -> Tensor:
        return spread(x) if self.rotated else x

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return encode(x, groups_of(x.shape[-1], self.group))

    def decode(self, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scale is not None
        return decode(codes, scale).to(dtype)


def groups_of(dim: int, most: int) -> int:
    """Groups of equal size, of `most` channels at most, that heads have: few in each half."""
    half = dim // 2
    return 2 * next(n for n in range(1, half + 1) if half % n == 0 and half // n <= most)


def spread(x: Tensor) -> Tensor:
    """Rotate x (..., D) by a Hadamard matrix, in fp32; its own inverse.

    The halves are added and subtracted, and channels of each half in runs of the largest power of
    two that divides it. Stage by stage, so that a kernel can do the same to the bit.
    """
    half = x.shape[-1] // 2
    run = half & -half
    x, stride = x.float(), 1
    while stride < run:
        x = butterfly(x, stride)
        stride *= 2
    return butterfly(x, half) * spread_scale(2 * half)


def butterfly(x: Tensor, stride: int) -> Tensor:
    """Sums of channels that lie `stride` apart, and their differences."""
    a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
    return torch.stack((a + b, a - b), -2).flatten(-3)


def spread_scale(dim: int) -> float:
    """What makes `spread` a rotation of heads of this dimension."""
    half = dim // 2
    return float((2 * (half & -half)) ** -0.5)


def encode(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Codes (..., D / 2) uint8 of x (..., D), and scales and lows (..., groups, 2) fp16."""
    x = x.float().unflatten(-1, (groups, -1))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = over(high - low, MOST).clamp_min(LEAST_SCALE)
    grid = torch.cat((scale, low), -1).half()
    scale, low = grid.float().split(1, -1)
    codes = ((x - low) / scale).round().clamp(0, MOST).to(torch.uint8).flatten(-2)
    a, b = codes.chunk(2, -1)
    return a | b << 4, grid


def decode(codes: Tensor, grid: Tensor) -> Tensor:
    """What codes (..., D / 2) mean, (..., D) fp32; see `encode`."""
    scale, low = grid.float().split(1, -1)
    x = unpack(codes).float().unflatten(-1, (grid.shape[-2], -1))
    return (x * scale + low).flatten(-2)


def unpack(codes: Tensor) -> Tensor:
    """Bytes (..., D / 2) to codes (..., D)."""
    return torch.cat((codes & 15, codes >> 4), -1)
