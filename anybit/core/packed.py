"""`Packed`: a quantized weight as it is stored, and the tensors that a format stores."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybit.core import planes as planes_of
from anybit.core.format import COLUMNS, LAYER, Entry, Format, Grid
from anybit.core.rotation import Rotation, block, check_part
from anybit.errors import InvalidInput, InvalidType

CODES = re.compile(r"\.codes\d+$")
PLANE = Entry(torch.int32)  # of codes, in words
WHOLE = slice(None)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch computes little with these


@dataclass(frozen=True)
class Packed:
    """A quantized weight as it is stored: a format, the shape (N, K), bit planes and the grid."""

    format: Format
    shape: tuple[int, int]
    planes: tuple[Tensor, ...]
    grid: Grid

    @classmethod
    def from_codes(cls, fmt: Format, shape: tuple[int, int], codes: Tensor, grid: Grid) -> "Packed":
        """Pack codes (N, C) and their grid, which has all tensors of `fmt.stored_entries()`.

        Raises:
            InvalidInput: Codes are of another shape, or not among 0 to 2**bits - 1.
            InvalidType: They are no integers.
        """
        codes = checked(fmt, shape, codes)
        if fmt.rotate and "rotate_in" not in grid:
            raise InvalidInput(
                f"codes of {fmt.spec!r} need rotate_in in their grid; quantize with "
                f"quantize_tensor, or round to {fmt.plain().spec!r} and call rotated_by()"
            )
        ordered = {name: grid[name] for name in fmt.stored_entries() if name in grid}
        return cls(fmt, shape, planes_of.pack(codes, fmt.bits), ordered)

    @classmethod
    def from_tensors(
        cls,
        fmt: Format,
        shape: tuple[int, int],
        tensors: Mapping[str, Tensor],
        name: str = "weight",
    ) -> "Packed":
        """Rebuild from `tensors()`; a missing, misshapen or mistyped tensor is a ValueError."""
        fmt.check(*shape)
        wanted = tensor_shapes(fmt, shape)
        for key, (size, entry) in wanted.items():
            if key not in tensors:
                raise InvalidInput(f"{name}: tensor {key!r} of format {fmt.spec!r} is missing")
            got = tensors[key]
            if tuple(got.shape) != size or not entry.accepts(got.dtype):
                raise InvalidInput(
                    f"{name}.{key}: expected shape {size} and dtype {entry.dtype} for format "
                    f"{fmt.spec!r} and a weight of {shape}, found {tuple(got.shape)} {got.dtype}"
                )
        planes = tuple(tensors[key] for key, (_, entry) in wanted.items() if entry is PLANE)
        grid = {key: tensors[key] for key, (_, entry) in wanted.items() if entry is not PLANE}
        return cls(fmt, shape, planes, grid)

    @classmethod
    def meta(cls, fmt: Format, shape: tuple[int, int]) -> "Packed":
        """A weight without contents, on the meta device."""
        fmt.check(*shape)
        tensors = {
            name: torch.empty(size, dtype=entry.default_dtype, device="meta")
            for name, (size, entry) in tensor_shapes(fmt, shape).items()
        }
        return cls.from_tensors(fmt, shape, tensors)

    def tensors(self) -> dict[str, Tensor]:
        """All stored tensors by their checkpoint names: codes4, codes2, scale, ..."""
        names = (f"codes{width}" for width in planes_of.segments(self.format.bits))
        return dict(zip(names, self.planes, strict=True)) | self.grid

    def codes(self) -> Tensor:
        """Unpacked codes (N, K / width * books)."""
        count = self.format.code_count(self.shape[1])
        return planes_of.unpack(self.planes, self.format.bits, count)

    def values(self) -> Tensor:
        """Decoded weights (N, K) fp32 in units of the scale."""
        return self.format.values(self.codes(), self.grid)

    def dequantize(self) -> Tensor:
        """Decoded weights (N, K) fp32."""
        return self.format.decode(self.codes(), self.grid)

    def stored(self) -> "Packed":
        """The weight as backends see it: columns in the stored order, rotated where it is so."""
        fmt = self.format.plain()
        if fmt is self.format:
            return self
        grid = {name: tensor for name, tensor in self.grid.items() if name not in LAYER}
        return Packed(fmt, self.shape, self.planes, grid)

    def rotated_by(self, rotation: Rotation) -> "Packed":
        """The weight diag(rotate_out) H V H diag(rotate_in), where this one is V.

        Args:
            rotation: Its vectors (K,) and, if outputs are rotated as well, (N, 1); fp16 or fp32.
        """
        sides = "k" if rotation.rotate_out is None else "kn"
        fmt = replace(self.format, rotate=sides)
        return Packed.from_tensors(fmt, self.shape, self.tensors() | rotation.tensors())

    def to(self, device: torch.device | str) -> "Packed":
        return self._map(lambda t: t.to(device))

    def rows(self, rows: slice) -> "Packed":
        """The part for a range of outputs, of whole tiles: a slice of all tensors but tables."""
        start, stop = span(rows, self.shape[0], "rows")
        check_rows(self.format, start, stop)
        if "n" in self.format.rotate:
            check_part(self.shape[0], start, stop, self.format.spec)
        entries = self.format.stored_entries()
        grid = {k: v if entries[k].table else v[start:stop] for k, v in self.grid.items()}
        planes = tuple(p[start:stop] for p in self.planes)
        return Packed(self.format, (stop - start, self.shape[1]), planes, grid)

    def at(self, rows: Tensor) -> Tensor:
        """Decoded rows (len(rows), K) fp32, equal to those of `dequantize()`.

        Args:
            rows: Their numbers (M,), int32 or int64, on the weight's device.

        Raises:
            InvalidInput: Outputs are rotated, so that no row is there by itself.
        """
        if "n" in self.format.rotate:
            raise InvalidInput(
                f"rows of a weight in format {self.format.spec!r} are mixed by its rotation; use "
                "rotate=k, or its dequantized weight"
            )
        if not len(rows):
            return torch.empty(0, self.shape[1], device=rows.device)
        unit, chosen = self.format.tile[0], rows
        if unit > 1:  # codes describe whole tiles alone
            chosen = (rows - rows % unit)[:, None] + torch.arange(unit, device=rows.device)
            chosen = chosen.reshape(-1)
        entries = self.format.stored_entries()
        grid = {k: v if entries[k].table else taken(v, chosen) for k, v in self.grid.items()}
        planes = tuple(taken(p, chosen) for p in self.planes)
        w = Packed(self.format, (len(chosen), self.shape[1]), planes, grid).dequantize()
        return (
            w
            if unit == 1
            else taken(w, torch.arange(0, len(w), unit, device=w.device) + rows % unit)
        )

    def columns(self, columns: slice) -> "Packed":
        """The part for a range of inputs, on borders of groups, vectors and tiles."""
        start, stop = span(columns, self.shape[1], "columns")
        tensors = {
            key: cut(self.format, self.shape[1], key, tensor, WHOLE, slice(start, stop))
            for key, tensor in self.tensors().items()
        }
        return Packed.from_tensors(self.format, (self.shape[0], stop - start), tensors)

    def __repr__(self) -> str:
        (n, k), nbytes = self.shape, self.nbytes()
        bits = f"{8 * nbytes / (n * k):.3g} bits a weight"
        return f"Packed({n}x{k}, {self.format.spec!r}, {bits}, {nbytes} bytes)"

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def _map(self, fn: Any) -> "Packed":
        grid = {k: fn(v) for k, v in self.grid.items()}
        return Packed(self.format, self.shape, tuple(fn(p) for p in self.planes), grid)


def taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor of any dtype."""
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch chooses none of these
        return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)
    return tensor.index_select(0, rows)


def stack(parts: list[Packed]) -> Packed:
    """Weights on top of each other, (sum of N, K).

    Raises:
        InvalidInput: `why_apart` says why they cannot be one.
    """
    if why := why_apart(parts):
        raise InvalidInput(f"weights cannot be stacked: {why}; keep them apart, or decode them")
    first, entries = parts[0], parts[0].format.stored_entries()
    planes = tuple(torch.cat(p) for p in zip(*(part.planes for part in parts), strict=True))
    grid = {
        name: tensor if entries[name].table else torch.cat([part.grid[name] for part in parts])
        for name, tensor in first.grid.items()
    }
    return Packed(first.format, (sum(p.shape[0] for p in parts), first.shape[1]), planes, grid)


def why_apart(parts: Sequence[Packed]) -> str | None:
    """What keeps weights on top of each other from being one weight, or None."""
    first, *others = parts
    for part in others:
        if (part.format, part.shape[1]) != (first.format, first.shape[1]):
            one, other = (f"{p.format.spec!r} with K={p.shape[1]}" for p in (first, part))
            return f"one is {one}, another {other}"
        for name, entry in first.format.stored_entries().items():
            if entry.table and not torch.equal(part.grid[name], first.grid[name]):
                return f"their {name!r} differ, which all rows share"
    sizes = [part.shape[0] for part in parts] if "n" in first.format.rotate else []
    if len({block(size) for size in (*sizes, sum(sizes))} - {0}) > 1:
        return f"N={sizes} would be rotated in other blocks as a whole"
    return None


def span(part: slice, size: int, what: str) -> tuple[int, int]:
    """Start and stop of a range; InvalidInput unless it is one, in order and not empty."""
    start, stop, step = part.indices(size)
    if step != 1 or start >= stop:
        given = ":".join("" if x is None else str(x) for x in (part.start, part.stop, part.step))
        raise InvalidInput(f"{what} {given} of {size} are no range; cut it from start to stop")
    return start, stop


def checked(fmt: Format, shape: tuple[int, int], codes: Tensor) -> Tensor:
    """The codes of a weight (N, K), or what `Packed.from_codes` raises."""
    kind, most = codes.dtype, 2**fmt.bits - 1
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise InvalidType(f"codes of {fmt.spec!r} are {kind}; convert them to integers")
    wanted = shape[0], fmt.code_count(shape[1])
    if codes.shape != wanted:
        raise InvalidInput(
            f"codes of {fmt.spec!r} for a weight of {shape} have shape {wanted}, not "
            f"{tuple(codes.shape)}"
        )
    codes = codes.long() if kind in UNSIGNED else codes
    if (kind == torch.uint8 and most == 255) or codes.is_meta or not codes.numel():
        return codes
    low, high = (int(x) for x in codes.aminmax())
    if low < 0 or high > most:
        raise InvalidInput(f"codes of {fmt.spec!r} lie from {low} to {high}, not from 0 to {most}")
    return codes


def check_rows(fmt: Format, start: int, stop: int) -> None:
    """Raise InvalidInput when a range of rows begins or ends inside a tile."""
    unit = fmt.tile[0]
    if start % unit or stop % unit:
        raise InvalidInput(
            f"rows {start} to {stop} split a tile in format {fmt.spec!r}; cut it at multiples of "
            f"{unit} rows"
        )


def check_borders(fmt: Format, k: int, start: int, stop: int) -> None:
    """Raise ValueError when a range of K = k columns splits a group, a vector or a tile."""
    unit = math.lcm(fmt.tile[1], *(e.group for e in fmt.entries().values() if e.group))
    if start % unit or (stop % unit and stop != k):
        raise InvalidInput(
            f"columns {start} to {stop} of K={k} split a group or {fmt.unit} in format "
            f"{fmt.spec!r}; cut it at multiples of {unit} columns"
        )
    if fmt.rotate:
        check_part(k, start, stop, fmt.spec)


def cut(fmt: Format, k: int, key: str, tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of one stored tensor (`Packed.tensors`) of a weight with K = k columns."""
    start, stop, _ = columns.indices(k)
    if fmt.order and (start, stop) != (0, k):
        raise InvalidInput(
            f"a weight in format {fmt.spec!r} cannot be cut along K: the columns of a group lie "
            "apart; cut it along N, or use its dequantized weight"
        )
    check_borders(fmt, k, start, stop)
    entry = fmt.stored_entries().get(key)
    if entry is None or entry.table is None:
        check_rows(fmt, *rows.indices(len(tensor))[:2])
        if "n" in fmt.rotate:
            check_part(len(tensor), *rows.indices(len(tensor))[:2], fmt.spec)
    if entry is None:
        part, width = tensor[rows], int(key.removeprefix("codes"))
        first, last = fmt.code_count(start), fmt.code_count(stop)
        if first * width % 32 == 0 and (last * width % 32 == 0 or stop == k):
            return part[:, first * width // 32 : planes_of.words(last, width)]
        codes = planes_of.unpack((part[:, : planes_of.words(last, width)],), width, last)
        return planes_of.pack(codes[:, first:], width)[0]
    if entry.table is not None:
        return tensor[start:stop] if entry.table == (COLUMNS,) else tensor
    group = entry.group
    return tensor[rows, start // group : stop // group] if group else tensor[rows]


def is_codes(name: str) -> bool:
    """Whether a tensor of a checkpoint is a bit plane of a quantized layer, by its name."""
    return CODES.search(name) is not None


def tensor_shapes(fmt: Format, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], Entry]]:
    """Names, shapes and entries (`PLANE` for code planes) of a packed weight of this shape."""
    n, k = shape
    count = fmt.code_count(k)
    out: dict[str, tuple[tuple[int, ...], Entry]] = {
        f"codes{width}": ((n, planes_of.words(count, width)), PLANE)
        for width in planes_of.segments(fmt.bits)
    }
    return out | {name: (entry.shape(n, k), entry) for name, entry in fmt.stored_entries().items()}
