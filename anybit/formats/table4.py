"""nf4, fp4bnb and iq4_nl: 4-bit codes of a fixed table, times a scale for each block.

nf4 holds quantiles of the normal distribution (QLoRA, appendix E); fp4bnb is bitsandbytes' own
float, which is not e2m1; iq4_nl is llama.cpp's table of whole numbers. Tables are in fp32, stored
with the weight like a codebook's, so every kernel that looks up codebooks reads them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.format import Entry, Grid, read_options, register
from anybit.core.groups import groups_of, store_scale
from anybit.formats.codebook import Codebook
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.tables import looked

POSITIVE = (
    0.0,
    0.0052083334885537624,
    0.6666666865348816,
    1.0,
    0.3333333432674408,
    0.5,
    0.1666666716337204,
    0.25,
)
IQ4 = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)
TABLES = {
    "iq4_nl": IQ4,
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4bnb": (*POSITIVE, *(-number for number in POSITIVE)),
}


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
        table = TABLES[self.table]
        numbers = torch.tensor(table, dtype=torch.float32, device=w.device).view(1, 16, 1)
        scale = groups_of(w, self.group).abs().amax(-1) / numbers.abs().max()
        return {"scale": store_scale(scale, zeros=0), "codebook": numbers}

    def hopper_decode(self, operand: str) -> Decoder | str:
        return looked(TABLES[self.table], self.group, operand)

    def _spec_parts(self) -> tuple[str, list[str]]:
        return self.table, self._options(skip=("m", "v", "b", "table"))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Table4":
        return cls(table=name, **read_options(cls, name, args, ("m", "v", "b", "table")))
