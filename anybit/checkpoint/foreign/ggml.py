"""The blocks that ggml stores weights in, and what holds the same weights here: `TYPES`.

A row of a weight is a sequence of blocks of 32 to 256 columns. A block is a few parts, one after
the other: scales, and codes cut into fields of 1 to 8 bits. The parts of each type are those of
llama.cpp's `ggml-common.h`; reading and writing follow from the same table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format, Grid, get_format
from anybit.core.packed import Packed, stack
from anybit.errors import InvalidInput

CHUNK = 1 << 22  # weights that are read at a time


class Field(NamedTuple):
    """Bits of all codes of a block: bytes (runs, width), whose lowest bits are the first columns.

    Attributes:
        runs: Runs of 8 / bits * width columns.
        width: Bytes of a run.
        bits: Of every code.
        low: The lowest of these bits in a code.
    """

    runs: int
    width: int
    bits: int
    low: int = 0

    @property
    def nbytes(self) -> int:
        return self.runs * self.width

    def read(self, part: Tensor) -> Tensor:
        """Bytes (..., nbytes) -> these bits of the codes (..., columns), in their place."""
        runs = part.unflatten(-1, (self.runs, self.width))
        out = part.new_empty(*runs.shape[:-1], 8 // self.bits, self.width)
        for i in range(8 // self.bits):  # shifts by one number are faster than by a tensor
            out[..., i, :] = runs >> i * self.bits
        return (out.bitwise_and_((1 << self.bits) - 1) << self.low).flatten(-3)

    def write(self, codes: Tensor) -> Tensor:
        """The inverse of `read`."""
        some = codes >> self.low & ((1 << self.bits) - 1)
        some = some.unflatten(-1, (self.runs, 8 // self.bits, self.width))
        out = some[..., 0, :]
        for i in range(1, 8 // self.bits):
            out = out | some[..., i, :] << i * self.bits
        return out.flatten(-2)


class Scale(NamedTuple):
    """One or several numbers of a block, as the grid holds them.

    Attributes:
        name: In the grid.
        numbers: Of them in a block.
        dtype: Theirs.
        flip: XOR of their bytes: 128 makes int8 a uint8 that is 128 more.
    """

    name: str
    numbers: int = 1
    dtype: torch.dtype = torch.float16
    flip: int = 0

    @property
    def nbytes(self) -> int:
        return self.numbers * self.dtype.itemsize


class Steps(NamedTuple):
    """Whole numbers of 6 bits, two kinds of them for q4_k and q5_k, in an order of their own."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Type:
    """A type of ggml.

    Attributes:
        spec: The format that holds the same weights.
        columns: Of a block.
        parts: Of a block, in their order.
        flip: XOR of all codes, after `plus` was added to them.
        plus: Added to codes.
        most: The largest code that there is, before that.
    """

    spec: str
    columns: int
    parts: tuple[Field | Scale | Steps, ...]
    flip: int = 0
    plus: int = 0
    most: int = 255

    @property
    def format(self) -> Format:
        return get_format(self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(part.nbytes for part in self.parts)


SCALE, D, BASE = Scale("scale"), Scale("d"), Scale("base")
HALVES = Field(1, 16, 4)
FIFTH = Field(4, 1, 1, low=4)
TYPES = {
    "Q4_0": Type("int4:group=32", 32, (SCALE, HALVES)),
    "Q4_1": Type("q4_1", 32, (D, BASE, HALVES)),
    "Q5_0": Type("int5:group=32", 32, (SCALE, FIFTH, HALVES)),
    "Q5_1": Type("q5_1", 32, (D, BASE, FIFTH, HALVES)),
    "Q8_0": Type("int8:group=32", 32, (SCALE, Field(1, 32, 8)), flip=128),
    "Q2_K": Type("q2_k", 256, (Scale("step", 16, torch.uint8), Field(2, 32, 2), D, BASE)),
    "Q3_K": Type("q3_k", 256, (Field(1, 32, 1, low=2), Field(2, 32, 2), Steps("q3_k", 12), D)),
    "Q4_K": Type("q4_k", 256, (D, BASE, Steps("q4_k", 12), Field(4, 32, 4))),
    "Q5_K": Type(
        "q5_k", 256, (D, BASE, Steps("q4_k", 12), Field(1, 32, 1, low=4), Field(4, 32, 4))
    ),
    "Q6_K": Type(
        "q6_k",
        256,
        (Field(2, 64, 4), Field(2, 32, 2, low=4), Scale("step", 16, torch.uint8, 128), D),
    ),
    "IQ4_NL": Type("iq4_nl:group=32", 32, (SCALE, HALVES)),
    "IQ4_XS": Type("iq4_xs", 256, (D, Steps("iq4_xs", 6), Field(8, 16, 4))),
    "TQ2_0": Type("int2:group=256", 256, (Field(2, 32, 2), SCALE), plus=1, most=2),
    "MXFP4": Type("mxfp4", 32, (Scale("scale", 1, torch.float8_e8m0fnu), HALVES)),
}


def unpack(kind: Type, blocks: Tensor, name: str) -> Packed:
    """Blocks (N, bytes of a row) uint8 as a weight of ours.

    Raises:
        InvalidInput: A scale is infinite or no number, or a code is none.
    """
    step = max(1, CHUNK // (blocks.shape[1] // kind.nbytes * kind.columns))
    return stack([_unpack(kind, rows, name) for rows in blocks.split(step)])


def _unpack(kind: Type, rows: Tensor, name: str) -> Packed:
    blocks = rows.unflatten(1, (-1, kind.nbytes))
    n, count = blocks.shape[:2]
    codes = torch.zeros(n, count, kind.columns, dtype=torch.uint8)
    fmt, grid = kind.format, dict[str, Tensor]()
    parts = blocks.split([part.nbytes for part in kind.parts], -1)
    for part, some in zip(kind.parts, parts, strict=True):
        if isinstance(part, Field):
            codes |= part.read(some)
        elif isinstance(part, Scale):
            numbers = (some ^ part.flip).contiguous().view(part.dtype).reshape(n, -1)
            if part.dtype != torch.uint8 and not numbers.float().isfinite().all():
                raise InvalidInput(f"{name}: a scale is infinite or no number; the file is damaged")
            grid[part.name] = numbers
        else:
            found = STEPS[part.name][0](some)
            grid |= {key: numbers.flatten(1) for key, numbers in found.items()}
    if kind.most < 255 and int(codes.max()) > kind.most:
        raise InvalidInput(f"{name}: holds code {int(codes.max())}, above the largest, {kind.most}")
    codes = codes.add_(kind.plus).bitwise_xor_(kind.flip).flatten(1)
    return Packed.from_codes(fmt, (n, codes.shape[1]), codes, {**constants(fmt, n), **grid})


def constants(fmt: Format, n: int) -> Grid:
    """What the grid holds beside the numbers of blocks: a scale of 1, and tables."""
    named = [key for key, entry in fmt.entries().items() if entry.table is not None]
    fitted = fmt.fit(torch.zeros(1, 256)) if named else {}
    return {key: fitted[key] for key in named} | {"scale": torch.ones(n, 1, dtype=torch.float16)}


def pack(kind: Type, packed: Packed, name: str) -> Tensor:
    """The inverse of `unpack`: blocks (N, bytes of a row) uint8.

    Raises:
        InvalidInput: A number of the grid is not the type's, such as a scale that is none of fp16.
    """
    n, k = packed.shape
    step = max(1, CHUNK // k)
    chunks = (packed.rows(slice(at, at + step)) for at in range(0, n, step))
    return torch.cat([_pack(kind, rows, name) for rows in chunks])


def _pack(kind: Type, packed: Packed, name: str) -> Tensor:
    n, k = packed.shape
    count = k // kind.columns
    codes = (packed.codes() ^ kind.flip) - kind.plus
    if int(codes.max()) > kind.most:
        raise InvalidInput(f"{name}: code {int(codes.max())} is above the largest, {kind.most}")
    codes, parts = codes.view(n, count, -1), []
    grid = dict(packed.grid)
    if "d" in grid:  # and a power of two for each row
        scale = grid["scale"].float()
        grid |= {key: grid[key].float() * scale for key in ("d", "base") if key in grid}
    for part in kind.parts:
        if isinstance(part, Field):
            parts.append(part.write(codes))
        elif isinstance(part, Scale):
            numbers = grid[part.name].to(part.dtype)
            if not torch.equal(numbers.float(), grid[part.name].float()):
                raise InvalidInput(f"{name}: {part.name} has numbers that are none of {part.dtype}")
            parts.append(numbers.view(torch.uint8).view(n, count, -1) ^ part.flip)
        else:
            names: list[str] = [key for key in ("step", "low") if key in grid]
            some = {key: grid[key].view(n, count, -1) for key in names}
            parts.append(STEPS[part.name][1](some))
    return torch.cat(parts, -1).flatten(1)


# Steps of 6 bits, (N, blocks, bytes) <-> (N, blocks, steps).


def _read_q3(part: Tensor) -> Grid:
    low = Field(1, 8, 4).read(part[..., :8])
    return {"step": low | Field(1, 4, 2, low=4).read(part[..., 8:])}


def _write_q3(grid: Grid) -> Tensor:
    step = grid["step"]
    return torch.cat((Field(1, 8, 4).write(step), Field(1, 4, 2, low=4).write(step)), -1)


def _read_q4(part: Tensor) -> Grid:
    d, m, both = part.split(4, -1)
    step = torch.cat((d & 63, both & 15 | d >> 2 & 48), -1)
    return {"step": step, "low": torch.cat((m & 63, both >> 4 | m >> 2 & 48), -1)}


def _write_q4(grid: Grid) -> Tensor:
    (d, step), (m, low) = (grid[key].split(4, -1) for key in ("step", "low"))
    return torch.cat((d | step >> 4 << 6, m | low >> 4 << 6, step & 15 | (low & 15) << 4), -1)


def _read_iq4(part: Tensor) -> Grid:
    low = Field(4, 1, 4).read(part[..., 2:])
    return {"step": low | Field(2, 1, 2, low=4).read(part[..., :2])}


def _write_iq4(grid: Grid) -> Tensor:
    step = grid["step"]
    return torch.cat((Field(2, 1, 2, low=4).write(step), Field(4, 1, 4).write(step)), -1)


STEPS: dict[str, tuple[Callable[[Tensor], Grid], Callable[[Grid], Tensor]]] = {
    "q3_k": (_read_q3, _write_q3),
    "q4_k": (_read_q4, _write_q4),
    "iq4_xs": (_read_iq4, _write_iq4),
}
