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
from anybit.formats.iquant import evened

EVERY = 1 << 24  # codes: no format has more
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
        part = part.int() if self.low + self.bits > 8 else part
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
        return out.flatten(-2).to(torch.uint8)


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


class Mixed(NamedTuple):
    """Numbers of the grid, and bits of codes, in an order of their own: a name in `MIXED`."""

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
    parts: tuple[Field | Scale | Mixed, ...]
    flip: int = 0
    plus: int = 0
    most: int = EVERY

    @property
    def format(self) -> Format:
        return get_format(self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(part.nbytes for part in self.parts)


SCALE, D, BASE = Scale("scale"), Scale("d"), Scale("base")
HALVES, BYTES = Field(1, 16, 4), Field(1, 32, 8)
FIFTH = Field(4, 1, 1, low=4)
TYPES = {
    "Q4_0": Type("int4:group=32", 32, (SCALE, HALVES)),
    "Q4_1": Type("q4_1", 32, (D, BASE, HALVES)),
    "Q5_0": Type("int5:group=32", 32, (SCALE, FIFTH, HALVES)),
    "Q5_1": Type("q5_1", 32, (D, BASE, FIFTH, HALVES)),
    "Q8_0": Type("int8:group=32", 32, (SCALE, Field(1, 32, 8)), flip=128),
    "Q2_K": Type("q2_k", 256, (Scale("step", 16, torch.uint8), Field(2, 32, 2), D, BASE)),
    "Q3_K": Type("q3_k", 256, (Field(1, 32, 1, low=2), Field(2, 32, 2), Mixed("q3_k", 12), D)),
    "Q4_K": Type("q4_k", 256, (D, BASE, Mixed("q4_k", 12), Field(4, 32, 4))),
    "Q5_K": Type(
        "q5_k", 256, (D, BASE, Mixed("q4_k", 12), Field(1, 32, 1, low=4), Field(4, 32, 4))
    ),
    "Q6_K": Type(
        "q6_k",
        256,
        (Field(2, 64, 4), Field(2, 32, 2, low=4), Scale("step", 16, torch.uint8, 128), D),
    ),
    "IQ4_NL": Type("iq4_nl:group=32", 32, (SCALE, HALVES)),
    "IQ4_XS": Type("iq4_xs", 256, (D, Mixed("iq4_xs", 6), Field(8, 16, 4))),
    "IQ1_S": Type("iq1_s", 256, (D, BYTES, Mixed("iq1_s", 16))),
    "IQ1_M": Type("iq1_m", 256, (BYTES, Field(16, 1, 4, low=8), Mixed("iq1_m", 8))),
    "IQ2_XXS": Type("iq2_xxs", 256, (D, Mixed("iq2_xxs", 64))),
    "IQ2_XS": Type("iq2_xs", 256, (D, Mixed("iq2_xs", 64), Scale("step", 8, torch.uint8))),
    "IQ2_S": Type(
        "iq2_s",
        256,
        (D, BYTES, BYTES._replace(low=10), Field(8, 1, 2, low=8), Scale("step", 8, torch.uint8)),
    ),
    "IQ3_XXS": Type("iq3_xxs", 256, (D, Field(1, 64, 8), Mixed("iq3_xxs", 32))),
    "IQ3_S": Type(
        "iq3_s",
        256,
        (
            D,
            Field(1, 64, 8),
            Field(8, 1, 1, low=8),
            Field(32, 1, 4, low=9),
            Scale("step", 4, torch.uint8),
        ),
    ),
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
    fmt, grid = kind.format, dict[str, Tensor]()
    dtype = torch.uint8 if fmt.bits <= 8 else torch.int32
    codes = torch.zeros(n, count, fmt.code_count(kind.columns), dtype=dtype)
    parts = blocks.split([part.nbytes for part in kind.parts], -1)
    for part, some in zip(kind.parts, parts, strict=True):
        if isinstance(part, Field):
            codes |= part.read(some)
        elif isinstance(part, Scale):
            grid[part.name] = (some ^ part.flip).contiguous().view(part.dtype).reshape(n, -1)
        else:
            found = MIXED[part.name][0](some)
            codes |= found.pop("codes", torch.zeros((), dtype=dtype))
            grid |= {key: numbers.flatten(1) for key, numbers in found.items()}
    for numbers in grid.values():
        if numbers.dtype != torch.uint8 and not numbers.float().isfinite().all():
            raise InvalidInput(f"{name}: a scale is infinite or no number; the file is damaged")
    if kind.most < EVERY and int(codes.max()) > kind.most:
        raise InvalidInput(f"{name}: holds code {int(codes.max())}, above the largest, {kind.most}")
    codes = codes.add_(kind.plus).bitwise_xor_(kind.flip).flatten(1)
    return Packed.from_codes(fmt, (n, count * kind.columns), codes, {**constants(fmt, n), **grid})


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
        for key in ("d", "base"):
            if key in grid:
                grid[key] = exactly(grid[key].float() * scale, torch.float16, f"{name}: {key}")
    for part in kind.parts:
        if isinstance(part, Field):
            parts.append(part.write(codes))
        elif isinstance(part, Scale):
            numbers = exactly(grid[part.name], part.dtype, f"{name}: {part.name}")
            parts.append(numbers.view(torch.uint8).view(n, count, -1) ^ part.flip)
        else:
            names: list[str] = [key for key in ("d", "step", "low") if key in grid]
            some = {key: grid[key].view(n, count, -1) for key in names}
            parts.append(MIXED[part.name][1](some | {"codes": codes}))
    return torch.cat(parts, -1).flatten(1)


def exactly(numbers: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Numbers in a dtype that holds them.

    Raises:
        InvalidInput: It does not.
    """
    out = numbers.to(dtype)
    if not torch.equal(out.float(), numbers.float()):
        raise InvalidInput(f"{what} has numbers that are none of {dtype}")
    return out


# What is in an order of its own, (N, blocks, bytes) <-> (N, blocks, numbers). Steps have 6 bits in
# the first three.


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


def _pairs(step: Tensor) -> Tensor:
    """Steps of 4 bits, two in a byte."""
    return (step[..., ::2] | step[..., 1::2] << 4).to(torch.uint8)


def _unpaired(grid: Grid) -> Tensor:
    return torch.stack((grid["step"] & 15, grid["step"] >> 4), -1).flatten(-2).long()


def _fields(words: Tensor, bits: int) -> Tensor:
    """Four fields of so many bits from each word."""
    return (words[..., None] >> bits * torch.arange(4) & (1 << bits) - 1).flatten(-2)


def _joined(fields: Tensor, bits: int) -> Tensor:
    return (fields.unflatten(-1, (-1, 4)).long() << bits * torch.arange(4)).sum(-1)


def _shorts(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int16).int() & 0xFFFF


def _bytes(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.to(dtype).contiguous().view(torch.uint8)


def _read_iq1_s(part: Tensor) -> Grid:
    words = _shorts(part)
    return {"codes": _fields(words, 3) << 8, "step": _pairs(words >> 12)}


def _write_iq1_s(grid: Grid) -> Tensor:
    return _bytes(_joined(grid["codes"] >> 8, 3) | _unpaired(grid) << 12, torch.int16)


def _read_iq1_m(part: Tensor) -> Grid:
    words = _shorts(part)
    d = _joined(words >> 12, 4).to(torch.int16).view(torch.float16)
    return {"d": d, "step": _pairs(_fields(words, 3))}


def _write_iq1_m(grid: Grid) -> Tensor:
    d = _fields(grid["d"].view(torch.int16).int(), 4)
    return _bytes(_joined(_unpaired(grid), 3) | d << 12, torch.int16)


def _read_signs(words: Tensor) -> tuple[Tensor, Tensor]:
    """8 signs for each 8 columns, of which the file has 7, and steps: of words for 32."""
    return evened(_fields(words, 7)), _pairs(words >> 28 & 15)


def _write_signs(signs: Tensor, grid: Grid) -> Tensor:
    if not torch.equal(evened(signs & 127), signs):
        raise InvalidInput(
            "an odd number of 8 weights is negative, which IQ2_XXS and IQ3_XXS do not hold; "
            "quantize to iq2_s or iq3_s"
        )
    return _joined(signs & 127, 7) | _unpaired(grid) << 28


def _read_iq2_xxs(part: Tensor) -> Grid:
    rows, words = part.contiguous().view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    signs, step = _read_signs(words)
    return {"codes": _fields(rows, 8) | signs << 8, "step": step}


def _write_iq2_xxs(grid: Grid) -> Tensor:
    words = _write_signs(grid["codes"] >> 8, grid)
    return _bytes(
        torch.stack((_joined(grid["codes"] & 255, 8), words), -1).flatten(-2), torch.int32
    )


def _read_iq3_xxs(part: Tensor) -> Grid:
    signs, step = _read_signs(part.contiguous().view(torch.int32))
    return {"codes": torch.stack((signs & 15, signs >> 4), -1).flatten(-2) << 8, "step": step}


def _write_iq3_xxs(grid: Grid) -> Tensor:
    low, high = (grid["codes"] >> 8).unflatten(-1, (-1, 2)).unbind(-1)
    return _bytes(_write_signs(low | high << 4, grid), torch.int32)


MIXED: dict[str, tuple[Callable[[Tensor], Grid], Callable[[Grid], Tensor]]] = {
    "q3_k": (_read_q3, _write_q3),
    "q4_k": (_read_q4, _write_q4),
    "iq4_xs": (_read_iq4, _write_iq4),
    "iq1_s": (_read_iq1_s, _write_iq1_s),
    "iq1_m": (_read_iq1_m, _write_iq1_m),
    "iq2_xxs": (_read_iq2_xxs, _write_iq2_xxs),
    "iq2_xs": (
        lambda part: {"codes": _shorts(part)},
        lambda grid: _bytes(grid["codes"], torch.int16),
    ),
    "iq3_xxs": (_read_iq3_xxs, _write_iq3_xxs),
}
