"""1:2 sparsity with 7 bits (GemLite's case study): one weight of every two neighbours survives.

A code is a byte for a pair along K: 7 bits for the larger weight, and the top bit for its place (1
means the first of the two, as in GemLite, whose pairs are 32 columns apart). The cost is that of
int4; what is kept, is kept well.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.core.format import Format, Grid, register
from anybit.core.groups import extremes, grouped, groups_of, store_scale, ungroup
from anybit.kernels.cute.decode import BIAS, LIFT, MANTISSA, Decoder, HalfDecoder
from anybit.kernels.cute.lang import LANES, Word, bytes_of

if TYPE_CHECKING:
    from anybit.kernels.triton import lang

MIDDLE = 64  # the 7-bit code of 0
LARGEST = 63


@dataclass(frozen=True)
class SparseDecoder(HalfDecoder):
    """Bytes of a pair of columns: 7 bits of a number, and whether it is the first of the two.

    The operand is fp16, bf16 or uint8; the column without a weight gets the middle code.
    """

    @cached_property
    def instructions(self) -> int:
        words, groups = 4, max(self.entries, 2 * bool(self.entries))
        return words * 5 + self.slot * (1 + self.finishing) + groups * self.preparing // 2

    def stored(self, codes: Tensor) -> Tensor:
        flipped = codes ^ MIDDLE  # so that a masked byte is the middle after another flip
        return torch.stack((flipped & 15, flipped >> 4), -1).flatten(-2)

    def order(self) -> Tensor:
        return torch.arange(LANES * self.bits)

    def gather(self, words: list[Word], i: int) -> Word:
        each = 32 // self.slot // 2  # bytes of a register
        word = words[i // (4 // each)]
        first = bytes_of(word, 0xBA98)  # all bits of the bytes whose top bit is set
        ones, middle = 0x01010101 * (2 * MIDDLE - 1), 0x01010101 * MIDDLE
        low = (word & first & ones) ^ middle
        high = (word & (first ^ 0xFFFFFFFF) & ones) ^ middle
        b = i * each % 4
        if self.slot == 8:
            return bytes_of(low, b | 4 + b << 4 | 1 + b << 8 | 5 + b << 12, high)
        # Top bits, of which a byte is filled, are zero.
        return bytes_of(low, b | 8 + b << 4 | 4 + b << 8 | 12 + b << 12, high)


@register("sparse")
@dataclass(frozen=True)
class Sparse(Format):
    """Pairs of which the weight of larger magnitude is kept, as W = (q - 64) * scale.

    Attributes:
        group: Columns that share a scale; 0 means the whole row.
    """

    group: int = 0

    bits = 8
    width = 2
    operand = "int8"

    def fit(self, w: Tensor) -> Grid:
        low, high = extremes(groups_of(w, self.group))
        return {"scale": store_scale(torch.maximum(high, -low) / LARGEST)}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        scaled = ungroup(grouped(w, grid["scale"]) / grid["scale"].float()[..., None])
        first, second = scaled[:, 0::2], scaled[:, 1::2]
        place = first.abs() > second.abs()
        value = torch.where(place, first, second).round_().clamp_(-LARGEST, LARGEST)
        return (value + MIDDLE + 128 * place).to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        code = torch.arange(256, device=codes.device)
        value, first = (code & 127).float() - MIDDLE, code >= 128
        pairs = torch.stack((value * first, value * ~first), dim=-1)
        return pairs.index_select(0, codes.flatten().int()).view(codes.shape[0], -1)

    def triton_decode(self, at: Any) -> Any:
        value = lang.field(at, 0, 7, 64)
        first = value * lang.field(at, 7, 1)
        return lang.pair(first, value - first)

    def hopper_decode(self, operand: str) -> Decoder | str:
        places = (0, 1, 2, 3)  # of each weight's half of the pair's byte
        if operand == "int8":
            if self.group:
                return "group scales cannot be multiplied into int8 products"
            return SparseDecoder("uint8", places, middle=MIDDLE)
        if operand not in MANTISSA:
            return "sparse pairs have no decoder to fp8"
        shift = BIAS[operand] - 1 + MANTISSA[operand]
        return SparseDecoder(
            operand,
            places,
            shift=shift,
            group=self.group,
            lift=min(shift, LIFT[operand]),
            center=MIDDLE,
        )
