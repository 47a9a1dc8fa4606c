"""How the Triton kernels hold a packed weight in memory. One layout serves all of them.

A row of a tile is 64 bytes: `lanes` units of `unit` bits. Every unit holds several fields of one
plane; field j of lane t is the code at position j * lanes + t of a *granule*, the columns that a
whole number of tiles of every plane covers. So a kernel reads a tile once and multiplies it field
by field, each with `lanes` neighbouring columns of x: nothing is shuffled, neither codes nor x.

    words[book * planes + plane]: (granules, tiles, padded N, lanes), int16 or int8
    words[0] of sequences:        (padded N / 16, K / 16, words), int32; see `_sequences`
    grid tensor with groups:      (groups, padded N), transposed so that rows lie side by side
    factor of the rows' scales:   (padded N,) fp32, where groups' scales have few bits
    table:                        as it is
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core.format import Entry, Format, Grid
from anybit.core.packed import Packed
from anybit.core.planes import segments
from anybit.core.tiles import SIDE, cut

ROW_BYTES = 64
VECTOR_COLUMNS = 64
ROWS = 128  # N is padded to a multiple of this
LOCKS = 2048  # tiles that may be split along K; see `gemm.py`


@dataclass(frozen=True)
class Layout:
    """Tile geometry of one format; a compile-time constant of the kernels.

    unit: 16 bits where two weights make one register of a 16-bit matrix unit, 8 where four make
    one of an int8 unit.
    """

    fmt: Format
    unit: int = 16
    version: int = 1  # of the methods below: Triton's cache of compiled kernels knows only fields

    @property
    def lanes(self) -> int:
        """Units in a row of a tile: fewer where vectors of many fields made granules too long."""
        if self.fmt.width > 1 and self.segments[-1] < 8 < self.fmt.bits:
            return VECTOR_COLUMNS // self.fmt.width
        return ROW_BYTES * 8 // self.unit

    @cached_property
    def segments(self) -> tuple[int, ...]:
        return segments(self.fmt.bits)

    @property
    def fields(self) -> int:
        """Fields of a granule: as many as a unit of the narrowest plane has; one of sequences."""
        return 1 if self.fmt.window else self.unit // self.segments[-1]

    @property
    def columns(self) -> int:
        """Columns of W that one field of a tile covers."""
        return self.lanes * self.fmt.width

    @property
    def granule(self) -> int:
        """Columns of W in a granule."""
        return self.fields * self.columns

    def tiles(self, segment: int) -> int:
        """Tiles of a plane of `segment` bits in a granule."""
        return self.fields * segment // self.unit

    def offset(self, field: int, plane: int) -> int:
        """The bit of its unit at which a field of a plane begins."""
        segment = self.segments[plane]
        return field % (self.unit // segment) * segment

    def cut_tiles(self, plane: int, cut: int) -> int:
        """Tiles of a plane in one of `cut` equal pieces of a granule; pieces may share a tile."""
        return max(1, self.tiles(self.segments[plane]) // cut)

    def cut_shift(self, plane: int, cut: int) -> int:
        """Bits by which a tile that pieces share is shifted for each next piece; else 0."""
        segment = self.segments[plane]
        return self.fields // cut * segment if self.tiles(segment) < cut else 0

    def tile_of(self, i: int, field: int, cut: int) -> int:
        """Which tile of a piece holds its field of plane i, counted through all books."""
        planes = len(self.segments)
        tiles = [self.cut_tiles(p, cut) for p in range(planes)] * self.fmt.books
        per = self.unit // self.segments[i % planes]
        return sum(tiles[:i]) + field // per

    def in_place(self, field: int, first: int, count: int, mantissa: int) -> int:
        """The lowest bit of a mantissa to which bits of a code move most cheaply.

        Where they stand, or 8 lower (a shift that several fields share), if they fit in there.
        """
        at = self.offset(field, 0) + first
        for to in (at, at - 8) if len(self.segments) == 1 else ():
            if to >= 0 and to + count <= mantissa:
                return to
        return 0

    def bits_asm(self, field: int, moves: list[list[int]], constant: int) -> str:
        """PTX of `lang.bits`: moves cut at the planes' borders; equal shifts of a plane in one."""
        copies = 0x00010001 if self.unit == 16 else 0x01010101
        masks: dict[tuple[int, int], int] = {}
        high = self.fmt.bits
        for plane, segment in enumerate(self.segments):
            high, top = high - segment, high
            for start, count, to in moves:
                first, last = max(start, high), min(start + count, top)
                if first < last:
                    place = to + first - start
                    shift = place - (self.offset(field, plane) + first - high)
                    mask = (((1 << (last - first)) - 1) << place) * copies
                    masks[plane, shift] = masks.get((plane, shift), 0) | mask
        lines = [".reg .b32 t, a;", f"mov.b32 a, {constant * copies};"]
        for (plane, shift), mask in masks.items():
            word = f"${plane + 1}"
            if shift:
                lines.append(f"sh{'l' if shift > 0 else 'r'}.b32 t, {word}, {abs(shift)};")
                word = "t"
            lines.append(f"lop3.b32 a, {word}, {mask}, a, 0xEA;")  # (word & mask) | a
        return "{" + " ".join(lines) + " mov.b32 $0, a;}"

    def granules(self, k: int) -> int:
        return -(-k // self.granule)

    @cached_property
    def grid(self) -> tuple[tuple[str, Entry], ...]:
        """Grid tensors but the scales, then the format's tables, as kernels get them."""
        tables = {a: Entry(t.dtype, table=tuple(t.shape)) for a, t in self.fmt.tables().items()}
        entries = (self.fmt.entries() | tables).items()
        return tuple((name, e) for name, e in entries if name not in ("scale", "row_scale"))

    @cached_property
    def factored(self) -> bool:
        """Whether groups' scales have few bits, and rows a factor in fp32."""
        entries = self.fmt.entries()
        return "row_scale" in entries or entries["scale"].dtype == torch.float8_e8m0fnu

    @cached_property
    def grid_groups(self) -> tuple[int, ...]:
        """For every tensor of `grid`: columns that share a value, 0 for a row, -1 for a table."""
        return tuple(-1 if e.table is not None else e.group for _, e in self.grid)

    @cached_property
    def group(self) -> int:
        """Columns that share a scale, 0 for a row."""
        return self.fmt.entries()["scale"].group

    def new_groups(self, field: int) -> bool:
        """Whether a group of any other grid tensor than the scale begins with this field."""
        return field == 0 or any(self._begins(group, field) for group in self.grid_groups)

    def new_scale(self, field: int) -> bool:
        """Whether a group of scales begins with this field."""
        return field == 0 or self._begins(self.group, field)

    def _begins(self, group: int, field: int) -> bool:
        if group <= 0:
            return False
        # Pieces are granules cut by powers of two: a group's border may move within the piece.
        apart = group % self.columns or (group & (group - 1)) or self.columns & (self.columns - 1)
        return bool(apart) or field * self.columns % group == 0

    def scale_count(self, cut: int = 1) -> int:
        """Groups of scales in a piece; 0 if fields do not make whole groups, or a row has one."""
        group, piece = self.group, self.granule // cut
        if not group or group % self.columns or (piece % group and group % piece):
            return 0
        return max(1, piece // group)

    def table_size(self, i: int) -> int:
        """Numbers in grid tensor i, a table."""
        return math.prod(self.grid[i][1].table or ())

    @cached_property
    def scale_mode(self) -> str:
        """Where the scale is cheapest: the output ("row"), a group's partial sum, the weight."""
        if not self.group:
            return "row"
        return "partial" if self.scale_count() else "weight"


@cache
def layout_of(fmt: Format, activation: str | None) -> Layout:
    """The layout in which `prepare` lays a weight out for this activation notation."""
    bytewise = Layout(fmt, 8)
    if fmt.operand == "int8" and activation == "int8" and bytewise.scale_mode != "weight":
        return bytewise
    return Layout(fmt, 16)  # which holds int8 codes of x exactly, too


def prepare(packed: Packed, activation: str | None) -> list[Tensor]:
    """Words of every book and plane, the scale, the other grid tensors, factors, split-K locks."""
    layout = layout_of(packed.format, activation)
    n, k = packed.shape
    rows = -(-n // ROWS) * ROWS
    codes = packed.codes().reshape(n, -1, packed.format.books)
    out: list[Tensor] = [_sequences(packed, rows)] if packed.format.window else []
    for book in range(0 if out else packed.format.books):
        out += _words(codes[:, :, book], layout, rows, k)
    padded_k = layout.granules(k) * layout.granule
    scale, factor = _scales(packed.format, packed.grid) if layout.factored else (None, None)
    tables = {name: t.to(codes.device) for name, t in packed.format.tables().items()}
    grid = packed.grid | tables | ({} if scale is None else {"scale": scale})
    for name, entry in (("scale", packed.format.entries()["scale"]), *layout.grid):
        t = grid[name]
        if entry.table is None:  # (N, groups) -> (groups, N); padding is 0, a number like any other
            groups = -(-padded_k // entry.group) if entry.group else 1
            t = pad(t, (0, groups - t.shape[1], 0, rows - n)).T
        out.append(t.contiguous())
    if factor is not None:
        out.append(pad(factor.flatten(), (0, rows - n)))
    out.append(codes.new_zeros(LOCKS, dtype=torch.int32))
    return out


def _scales(fmt: Format, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales of 8 bits as exact numbers of 16, (N, groups), and the row's factor (N, 1) fp32.

    Powers of two become those that are left beside the row's largest, so that their products with
    values are within fp16's range.
    """
    scale, factor = grid["scale"].float(), fmt.row_factor(grid)
    if grid["scale"].dtype == torch.float8_e8m0fnu:
        largest = scale.amax(1, keepdim=True)
        scale, factor = scale / largest, largest if factor is None else largest * factor
        return scale.bfloat16(), factor
    assert factor is not None
    return scale.half(), factor


def _words(codes: Tensor, layout: Layout, rows: int, k: int) -> list[Tensor]:
    """Codes (N, positions) of one book -> a tensor of words for each plane."""
    positions = layout.granules(k) * layout.fields * layout.lanes
    codes = pad(codes.to(torch.int32), (0, positions - codes.shape[1], 0, rows - codes.shape[0]))
    codes = codes.view(rows, -1, layout.fields, layout.lanes).permute(1, 2, 0, 3)
    low, out = layout.fmt.bits, []
    for segment in layout.segments:
        low -= segment
        field = (codes >> low) & ((1 << segment) - 1)
        per = layout.unit // segment
        field = field.reshape(len(field), layout.tiles(segment), per, rows, layout.lanes)
        word = field[:, :, 0].clone()
        for i in range(1, per):
            word |= field[:, :, i] << (i * segment)
        out.append(word.to(torch.int16 if layout.unit == 16 else torch.uint8).contiguous())
    return [w.view(torch.int8) if w.dtype == torch.uint8 else w for w in out]


def _sequences(packed: Packed, rows: int) -> Tensor:
    """Each tile's codes one after the other, in words whose high bits come first."""
    bits, (n, k) = packed.format.bits, packed.shape
    codes = cut(packed.codes(), SIDE // packed.format.width).int()
    shifts = torch.arange(bits - 1, -1, -1, dtype=torch.int32, device=codes.device)
    ones = (codes[:, :, None] >> shifts & 1).view(len(codes), -1, 4, 8).flip(2)
    places = torch.arange(7, -1, -1, dtype=torch.int32, device=codes.device)
    octets = (ones << places).sum(3, dtype=torch.uint8).view(len(codes), -1)
    words = octets.view(torch.int32).view(n // SIDE, k // SIDE, -1)
    return pad(words, (0, 0, 0, 0, 0, rows // SIDE - n // SIDE)).contiguous()


def split(
    layout: Layout, prepared: list[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...], Tensor | None, Tensor]:
    """Prepared tensors -> words, scale, the other grid tensors, factor of rows or None, locks."""
    count = 1 if layout.fmt.window else layout.fmt.books * len(layout.segments)
    words, scale, *rest, locks = tuple(prepared[:count]), *prepared[count:]
    factor = rest.pop() if layout.factored else None
    return words, scale, tuple(rest), factor, locks


def nbytes(layout: Layout, shape: tuple[int, int]) -> int:
    """Bytes of words that a kernel reads for a weight of this shape, without padding."""
    n, k = shape
    return math.ceil(n * layout.fmt.code_count(k) * layout.fmt.bits / 8)
