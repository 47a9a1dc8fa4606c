"""Tile sizes of the Triton kernels: data, measured, and the function that looks them up.

The numbers come from sweeps on an H200 over the layers of Llama-3-8B. Other GPUs use them too, with
fewer stages where shared memory is smaller; `anybit tune` finds those of one's own GPU.
"""

from dataclasses import dataclass, replace
from itertools import product

MOST_SPLIT = 8


@dataclass(frozen=True)
class Tile:
    """One program's work and resources.

    kernel: "gemm" (tensor cores), or "dense" (decode once, then cuBLAS).
    rows, tokens: outputs and tokens of a tile. split: programs that share a tile along K.
    cut, steps: an iteration is `steps` pieces, `cut` of which make a granule of the layout.
    warps, stages: a program's warps, and loads in flight.
    """

    kernel: str = "gemm"
    rows: int = 64
    tokens: int = 16
    split: int = 1
    steps: int = 1
    warps: int = 4
    stages: int = 4
    cut: int = 1


@dataclass(frozen=True)
class Row:
    """A line of a table: the tile for up to `tokens` tokens.

    programs: how many of them fill the GPU; K is split until there are so many.
    """

    tokens: int
    tile: Tile
    programs: int = 0


ALWAYS = 1 << 30
DENSE = Row(ALWAYS, Tile("dense"))
MIDDLE = (
    Row(32, Tile(rows=128, tokens=32, warps=4, stages=3), 224),
    Row(64, Tile(rows=128, tokens=64, warps=8, stages=3), 150),
)
TABLES: dict[str, tuple[Row, ...]] = {
    # Planes that decode quickly, a scale for a row. Never slower than dense.
    "rows": (
        Row(8, Tile(rows=64, tokens=8, warps=2, stages=4), 450),
        Row(16, Tile(rows=128, tokens=16, steps=2, warps=4, stages=4), 256),
        *MIDDLE,
        Row(128, Tile(rows=128, tokens=64, warps=8, stages=3), 256),
        Row(ALWAYS, Tile(rows=128, tokens=128, warps=8, stages=3), 256),
    ),
    # The same with scales for groups.
    "groups": (
        Row(8, Tile(rows=128, tokens=8, steps=2, warps=4, stages=3), 450),
        Row(16, Tile(rows=128, tokens=16, warps=4, stages=3), 450),
        *MIDDLE,
        Row(511, Tile(rows=128, tokens=64, warps=8, stages=3), 256),
        DENSE,
    ),
    # Several planes, or very narrow ones: granules of 256 columns and more.
    "planes": (
        Row(8, Tile(rows=32, tokens=8, warps=1, stages=3), 512),
        Row(16, Tile(rows=64, tokens=16, warps=2, stages=3), 320),
        *MIDDLE,
        Row(191, Tile(rows=128, tokens=64, warps=8, stages=3), 256),
        DENSE,
    ),
    # Look-ups in tables, and sequences, of which each weight takes two look-ups.
    "tables": (
        Row(8, Tile(rows=64, tokens=8, warps=4, stages=3), 900),
        Row(16, Tile(rows=64, tokens=16, warps=2, stages=3), 512),
        Row(80, Tile(rows=64, tokens=64, warps=4, stages=3), 256),
        DENSE,
    ),
}


def choose(family: str, m: int, n: int, dense: bool = True) -> Tile:
    """The tile of a family for M tokens and N outputs.

    dense: whether decoding the weight once is possible; if not, the largest tile of the family.
    """
    rows = [row for row in TABLES[family] if dense or row.tile.kernel != "dense"]
    row = next((row for row in rows if m <= row.tokens), rows[-1])
    tiles = -(-n // row.tile.rows) * -(-m // row.tile.tokens)
    split = 1
    while split < MOST_SPLIT and tiles * split * 2 <= row.programs:
        split *= 2
    return replace(row.tile, split=split)


def tried(family: str, m: int, n: int, dense: bool) -> list[Tile]:
    """What `anybit tune` compares: the shipped tile, and splits that give a GPU one wave or a few.

    dense: whether decoding the weight and cuBLAS are a choice; not for quantized activations.
    """
    found = [choose(family, m, n, dense)]
    if m <= 16:
        plans = [(64, 2, 4, 1), (128, 4, 3, 1), (32, 1, 3, 1), (64, 4, 3, 1)]
        if family in ("rows", "groups"):
            plans += [(128, 4, 3, 2), (128, 4, 4, 2), (64, 2, 3, 2)]
        for (rows, warps, stages, steps), split in product(plans, (1, 2, 4, 8)):
            if split == 1 or 100 <= -(-n // rows) * split <= 1200:
                tokens = 8 if m <= 8 else 16
                found.append(Tile("gemm", rows, tokens, split, steps, warps, stages))
        return [*dict.fromkeys(found)]
    if m <= 64:
        wide = [(128, 64, 8, 3), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3)]
    else:
        wide = [(128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 4, 3), (128, 256, 8, 3)]
        if dense:
            found.append(Tile("dense"))
    for (rows, tokens, warps, stages), split in product(wide, (1, 2, 4)):
        tiles = -(-n // rows) * -(-m // tokens)
        if split == 1 or 100 <= tiles * split <= 700:
            found.append(Tile("gemm", rows, tokens, split, 1, warps, stages))
    return [*dict.fromkeys(found)]


def next_power_of_2(n: int) -> int:
    """The least power of two that n >= 1 does not exceed; Triton's own costs a launch 2 us."""
    return 1 << (n - 1).bit_length()
