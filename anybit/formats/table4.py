"""nf4 and fp4bnb: 4-bit codes of a fixed table, times the largest magnitude of a block.

nf4 holds quantiles of the normal distribution (QLoRA, appendix E); fp4bnb is bitsandbytes' own
float, which is not e2m1. The table is that of bitsandbytes in fp32, stored with the weight like a
codebook's, so every kernel that looks up codebooks reads it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.format import Entry, Grid, groups_of, read_options, register, store_scale
from anybit.formats.codebook import Codebook

POSITIVE = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
            0.1666666716337204, 0.25)  # fmt: skip
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4bnb": (*POSITIVE, *(-number for number in POSITIVE)),
}  # fmt: skip


@register(*TABLES)
@dataclass(frozen=True)
class Table4(Codebook):
    """One of `TABLES`, with a scale for every block of columns.

    The grid holds "scale" and "codebook" (1, 16, 1), the same for every weight.

    Attributes:
        table: Its name, which is the format's.
        group: Columns that share a scale; 0 means the whole row.
    """

    m: int = 1
    v: int = 1
    b: int = 4
    group: int = 64
    table: str = "nf4"

    rowwise = True  # the table is fixed
    lookup = None  # and nothing to learn

    def entries(self) -> dict[str, Entry]:
        return super().entries() | {"codebook": Entry(torch.float32, table=(1, 16, 1))}

    def fit(self, w: Tensor) -> Grid:
        numbers = torch.tensor(TABLES[self.table], device=w.device).view(1, 16, 1)
        return {"scale": store_scale(groups_of(w, self.group).abs().amax(-1)), "codebook": numbers}

    def _spec_parts(self) -> tuple[str, list[str]]:
        return self.table, self._options(skip=("m", "v", "b", "table"))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Table4":
        return cls(table=name, **read_options(cls, name, args, ("m", "v", "b", "table")))
