"""Any format as a table, found by asking `Format.values`:

    W[n, k] = row[n] * (scale[n, g] * T[code] + offset[n, g])      "plain" offsets
    W[n, k] = row[n] * scale[n, g] * (T[code] + offset[n, g])      "scaled" offsets

Or the rows of a table and signs, which `Format.rows` tells.

Every code of one column of every group is decoded, and compared with the table that was found. So
a format of a stranger is multiplied as fast as one of ours, or it is no table, which is an error.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Grid
from anybit.core.frame import Fine, Frame, Rows
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.native.operand import BLOCK

FORMS = ("", "plain", "scaled")  # of offsets
NONE = 1 << 20  # of a number that a table lacks
CELLS = 1 << 22  # numbers that are decoded at a time
LEAST = 4  # columns with scales of their own: fewer would cost more than 16 bits a weight


class NoTable(InvalidInput):
    """The format's values are no table of one scale and offset a group."""


class Facts(NamedTuple):
    """What kernels are compiled for, as whole numbers, which a tensor of a layout holds.

    Attributes:
        bits: Of a code; of a row's number, where there are rows.
        first: As in `Table`, like `group` and `whole`.
        form: Index of `Table.form`.
        signed: Whether the upper half of the table is the lower one with the other sign, or rows
            have signs.
        short: Whether all numbers are ones of bf16.
        half: As in `Table`.
        wide: 1 if scales are fp32; of bands, groups that share what is fine; else 0.
    """

    bits: int
    first: int = NONE
    group: int = 0
    form: int = 0
    whole: int = 0
    signed: int = 0
    short: int = 0
    half: int = NONE
    wide: int = 0


@dataclass(frozen=True)
class Table:
    """What was found.

    Attributes:
        values: T, fp32: (2**bits,), or (books, 2**bits, width) where codes stand for vectors,
            which are added up; or (rows, width).
        first: T[0], where T[code] is T[0] + code and whole.
        row: (N,) fp32.
        scale: (N, groups), or None: fp16 where that holds all of them and offsets, else fp32.
        offset: (N, groups) of the same dtype, or None.
        group: columns that share them, a divisor of a block; 0: there are none.
        form: "", "plain" or "scaled".
        whole: whether scale * T + offset is a whole number within int8 throughout.
        half: see `Codes.half`.
        rows: where values are rows of a table, which.
        fine: what scales and offsets are products of, if they are, in fp16.
    """

    values: Tensor
    first: int | None
    row: Tensor
    scale: Tensor | None
    offset: Tensor | None
    group: int
    form: str
    whole: bool
    half: int | None = None
    rows: Rows | None = None
    fine: Fine | None = None

    def facts(self, bits: int) -> Facts:
        """bits: of a code."""
        signed = short = False
        if self.values.dim() == 1:
            words = self.values.contiguous().view(torch.int32)
            low, high = words.chunk(2)
            signed = torch.equal(low ^ -(2**31), high)
            short = not (words & 0xFFFF).any()
        if self.rows is not None:
            bits, signed = len(self.values).bit_length() - 1, self.rows.signs is not None
        return Facts(
            bits,
            NONE if self.first is None else self.first,
            self.group,
            FORMS.index(self.form),
            int(self.whole),
            int(signed),
            int(short),
            NONE if self.half is None else self.half,
            int(self.scale is not None and self.scale.dtype == torch.float32),
        )


class _Asked(dict[str, Tensor]):
    """A grid that knows which of its tensors were read."""

    def __init__(self, grid: Grid):
        super().__init__(grid)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)


def probe(packed: Packed) -> Table:
    """The table of a weight.

    Raises:
        NoTable: it has none, with the reason.
    """
    factor = packed.format.row_factor(packed.grid)
    table = _probe(packed)
    return table if factor is None else replace(table, row=table.row * factor.flatten())


def _probe(packed: Packed) -> Table:
    """`probe` without the row's factor."""
    fmt, k = packed.format, packed.shape[1]
    if fmt.rows is not None:
        rows: Rows = fmt.rows(packed.codes(), packed.grid)
        return replace(_framed(packed, Frame(rows.table, rows.factor, None)), rows=rows)
    frame = fmt.frame(packed.grid)
    if frame is not None:
        return _framed(packed, frame)
    entries = fmt.entries()
    counts = {a: t.shape[1] for a, t in packed.grid.items() if entries[a].table is None}
    groups = max(counts.values())
    if any(count not in (1, groups) for count in counts.values()):
        raise NoTable("its scales and offsets have groups of different sizes")
    asked = _Asked(_rows(packed, 0, 1))
    scale = packed.grid["scale"].float()
    if fmt.width > 1 or fmt.books > 1:
        table = _vectors(packed, asked)
    else:
        # A row for each code, of `groups` columns, one of each group.
        codes = torch.arange(2**fmt.bits, dtype=torch.uint8)[:, None].repeat(1, groups)
        asked = _Asked(
            {a: t if entries[a].table else t.expand(len(codes), -1) for a, t in asked.items()}
        )
        table = fmt.values(codes, asked)[:, 0]
    read = {name for name in asked.names if entries[name].table is None}
    if read and table.dim() > 1:
        raise NoTable("its vectors are not the same in every row and group")
    factor = shift = None
    if read:
        table, factor, shift = _frame(packed, groups, table)
    if not table.flatten()[0].isfinite():  # padding, which is multiplied with zeros
        raise NoTable("its code 0 is no finite number")
    first = _first(table)
    group = k // groups if groups > 1 else 0
    if factor is None or shift is None:
        half, power = _fp16(table)
        if scale.shape[1] == 1:
            whole = first is not None and first >= -128 and first + 2**fmt.bits <= 128
            row = scale.flatten() * power
            return Table(table / power, first, row, None, None, 0, "", whole, half)
        row, scale = _fitted(scale)
        size, row = _size(group), row * power
        scale = _repeat(_alike(scale)[0], group, size)
        return Table(table / power, first, row, scale, None, size, "", False, half)
    # A row of one group has as many of them as blocks, the padded one included.
    size = _size(group) if group else BLOCK
    group = group or -(-k // BLOCK) * BLOCK
    if scale.shape[1] == 1:
        integers = (factor == factor.round()).all() and (shift == shift.round()).all()
        whole = first == 0 and fmt.operand == "int8" and bool(integers)
        a, b = (_repeat(t, group, size) for t in _alike(factor, shift))
        return Table(table, first, scale.flatten(), a, b, size, "plain", whole)
    if not bool((factor == 1).all()):
        raise NoTable("its groups have a scale and a factor")
    row, scale = _fitted(scale)
    a, b = (_repeat(t, group, size) for t in _alike(scale, shift))
    return Table(table, first, row, a, b, size, "scaled", False)


def _framed(packed: Packed, frame: Frame) -> Table:
    """The table of a format that says itself how its values come about."""
    numbers, factor, shift, fine = frame
    group = packed.shape[1] // factor.shape[1]
    size = _size(group)
    shifts = [] if shift is None else [shift]
    a, *rest = (_repeat(t, group, size) for t in _alike(factor, *shifts))
    b, form = (rest[0], "plain") if rest else (None, "")
    row = packed.grid["scale"].float().flatten()
    if fine is not None and any(
        t.dtype != torch.float16 for t in (fine.d, fine.base) if t is not None
    ):
        fine = None
    return Table(numbers, _first(numbers), row, a, b, size, form, False, fine=fine)


def _rows(packed: Packed, start: int, stop: int) -> Grid:
    entries = packed.format.entries()
    return {a: t if entries[a].table else t[start:stop] for a, t in packed.grid.items()}


def _frame(packed: Packed, groups: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T, and the factor and shift of every group: values = factor * T + shift, proved for all.

    values: (2**bits,) of the first group.
    """
    fmt, n = packed.format, packed.shape[0]
    table = _snap((values - values[0]) / (values[1] - values[0]))
    factors, shifts = [], []
    step = max(1, CELLS // groups)
    for start in range(0, n, step):
        stop = min(n, start + step)
        grid = _rows(packed, start, stop)
        ones = torch.ones(stop - start, groups, dtype=torch.uint8)
        shift = fmt.values(ones * 0, grid)
        factor = _snap(fmt.values(ones, grid) - shift)
        for code, number in enumerate(table.tolist()):
            if not torch.equal(factor * number + shift, fmt.values(ones * code, grid)):
                raise NoTable("its groups differ by more than a factor and a shift")
        factors.append(factor)
        shifts.append(shift)
    return table, torch.cat(factors), torch.cat(shifts)


def _snap(numbers: Tensor) -> Tensor:
    """Whole numbers where differences of fractions nearly are: (1 - 7.3) - (0 - 7.3) is 1."""
    near = numbers.round()
    return torch.where((numbers - near).abs() < 2.0**-10, near, numbers)


def _vectors(packed: Packed, asked: Grid) -> Tensor:
    """T (books, 2**bits, width) of codes that stand for vectors."""
    fmt = packed.format
    shape = (fmt.books, 2**fmt.bits, fmt.width)
    kind = torch.uint8 if fmt.bits <= 8 else torch.int32
    codes = torch.arange(2**fmt.bits).to(kind)
    if fmt.books == 1:
        return fmt.values(codes[None], asked).view(shape)
    for name, entry in fmt.entries().items():
        if entry.table == shape:
            table = packed.grid[name].float()
            some = torch.stack([codes.roll(i) for i in range(fmt.books)], 1)
            total = table[0, some[:, 0].long()]
            for i in range(1, fmt.books):
                total = total + table[i, some[:, i].long()]
            if torch.equal(fmt.values(some.view(1, -1), asked).view_as(total), total):
                return table
    raise NoTable("its values are no sums of vectors of a table")


def _first(table: Tensor) -> int | None:
    if table.dim() > 1:
        return None
    if not torch.equal(table, table[0] + torch.arange(len(table))) or table[0] != table[0].round():
        return None
    return int(table[0])


def _fp16(table: Tensor) -> tuple[int | None, float]:
    """`Codes.half` of a table, and the power of two that it is then too large by.

    Only of large tables: small ones are looked up faster.
    """
    below = len(table) // 2
    if table.dim() > 1 or below < 64:
        return None, 1
    codes = torch.arange(below, dtype=torch.int32)
    for up in range(15 - (below.bit_length() - 1), -1, -1):
        numbers = (codes << up).to(torch.int16).view(torch.float16).float()
        power = float(table[1] / numbers[1])
        if math.frexp(power)[0] == 0.5 and torch.equal(
            torch.cat((numbers, -numbers)) * power, table
        ):
            return up, power
    return None, 1


def _size(group: int) -> int:
    """The part of a group whose border no block cuts."""
    size = math.gcd(group, BLOCK)
    if size < LEAST:
        raise NoTable(f"groups of {group} columns do not lie on borders of {LEAST}")
    return size


def _repeat(numbers: Tensor, group: int, size: int) -> Tensor:
    return numbers.repeat_interleave(group // size, 1) if group > size else numbers


def _alike(*numbers: Tensor) -> list[Tensor]:
    """fp32 tensors in fp16 where that holds them all, else as they are."""
    halves = [t.half() for t in numbers]
    same = all(torch.equal(h.float(), t) for h, t in zip(halves, numbers, strict=True))
    return halves if same else [t.float() for t in numbers]


def _fitted(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (N, groups) as a power of two for each row, and numbers that may fit fp16; fp32."""
    if torch.equal(scale.half().float(), scale):
        return torch.ones(len(scale), dtype=torch.float32), scale
    _, exponent = torch.frexp(scale.abs().amax(1, keepdim=True))
    row = torch.ldexp(torch.ones(len(scale), 1, dtype=torch.float32), exponent - 8)
    return row.flatten(), scale / row
