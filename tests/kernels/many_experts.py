"""700 experts, more than the kernels' tables have spans, of three different weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.reference import operand_weight

INDEX = torch.arange(700) % 3  # which weight an expert has
# Three to a span. Some have no tokens, some more than a tile; the last one is alone.
COUNTS = torch.zeros(700, dtype=torch.int32)
COUNTS[[0, 2, 3, 299, 300, 698, 699]] = torch.tensor([2, 9, 1, 3, 17, 1, 4], dtype=torch.int32)
STARTS = torch.cat([torch.zeros(1, dtype=torch.int32), COUNTS.cumsum(0).int()])
TOKENS = int(STARTS[-1])


def layout_of_all(layout: Sequence[Tensor]) -> list[Tensor]:
    """The layout of all experts, from that of the three weights."""
    return [part.unflatten(0, (3, -1))[INDEX].flatten(0, 1) for part in layout]


def products(codes: Tensor, scale: Tensor, some: list[Packed], dtype: torch.dtype) -> Tensor:
    """What the tokens (TOKENS, K) must become, fp64."""
    weights = torch.stack([operand_weight(weight, dtype) for weight in some])
    owner = INDEX[torch.repeat_interleave(torch.arange(700), COUNTS)]
    return torch.einsum("mk,mnk->mn", codes.double(), weights[owner].double()) * scale[:, None]
