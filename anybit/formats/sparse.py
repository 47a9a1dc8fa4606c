"""1:2 sparsity with 7 bits (GemLite's case study): one weight of every two neighbours survives.

A code is a byte for a pair along K: 7 bits for the larger weight, and the top bit for its place (1
means the first of the two, as in GemLite). The cost is that of int4; what is kept, is kept well.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.format import Format, Grid, grouped, groups_of, register, store_scale, ungroup

if TYPE_CHECKING:
    from anybit.kernels.triton import lang

MIDDLE = 64  # the 7-bit code of 0
LARGEST = 63


@register("sparse")
@dataclass(frozen=True)
class Sparse(Format):
    """Pairs of which the weight of larger magnitude is kept, as W = (q - 64) * scale.

    group: columns that share a scale; 0 means the whole row.
    """

    group: int = 0

    bits = 8
    width = 2
    operand = "int8"

    def fit(self, w: Tensor) -> Grid:
        low, high = groups_of(w, self.group).aminmax(dim=-1)
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
