"""What a weight format is: `Format`, the tensors it stores (`Packed`) and its name (spec strings).

A format is one class in one file. It says what codes mean, and nothing else: quantizers choose the
codes, kernels read them, checkpoints store them, and none of them knows a particular format.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anybit import bits as planes_of

Grid = dict[str, Tensor]
HALF_NORMAL = (2.0**-14, 65504.0)  # the normal range of fp16
COLUMNS = -1


@dataclass(frozen=True)
class Entry:
    """The shape of one grid tensor: one value per `group` columns of a row, or a shared table.

    group: columns that share a value; 0 means the whole row.
    table: a fixed shape instead, in which COLUMNS stands for the weight's K.
    dtype: the dtype that is stored; "float" stands for fp16 (bf16 and fp32 are accepted too), and
        "level" for uint8 (or a float, as some tools' zero points are).
    """

    dtype: torch.dtype | str = "float"
    group: int = 0
    table: tuple[int, ...] | None = None

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """The tensor's shape for a weight of shape (n, k)."""
        if self.table is not None:
            return tuple(k if size == COLUMNS else size for size in self.table)
        return (n, k // self.group if self.group else 1)

    def accepts(self, dtype: torch.dtype) -> bool:
        if isinstance(self.dtype, torch.dtype):
            return dtype == self.dtype
        floats = (torch.float16, torch.bfloat16, torch.float32)
        return dtype in floats or (self.dtype == "level" and dtype == torch.uint8)

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype that `fit` stores as a rule."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return {"float": torch.float16, "level": torch.uint8}[self.dtype]


@dataclass(frozen=True)
class Format:
    """A few-bit notation for a weight W of shape (N outputs, K inputs).

        W = values(codes, grid) * scale

    A subclass is a frozen dataclass whose fields are its options, decorated with `register`. It
    sets `bits`, and implements `fit`, `encode` and `values`; formats with more grid tensors than
    one scale extend `entries`.

    bits:   bits of one code.
    width:  weights that one code position stands for (2 for a sparse pair, v for a vector).
    books:  codes stored for each position (m for additive codebooks).
    group:  columns of a row that share one scale; 0 means the whole row.
    order:  columns are stored in an order of their own, `grid["order"]` (K,): stored column i is
            column order[i] of the weight. So columns of a group may lie apart (GPTQ's act-order).
            Backends never see it: `QuantLinear` puts the activations in that order instead.
    codes:  (N, K / width * books) unsigned integers; those of one position lie side by side.
    grid:   the named real tensors that codes refer to; each described by `entries`.

    The scale is a factor of its own so that a kernel may apply it where that is cheapest: to a
    weight, to a group's partial sum, or, when the whole row shares it, to the output.
    """

    # Not annotated, so that they are no dataclass fields; a subclass may make fields of them.
    bits = 0
    width = 1
    books = 1
    group = 0
    order = False
    rowwise = True  # rows are fitted and encoded independently of each other
    operand = "activation"  # dtype of `values` in a matrix unit, or "int8"
    triton_decode: ClassVar[Any] = None  # (code, grid, P) -> values; see kernels/triton/lang.py
    hopper_decode: ClassVar[Any] = None  # words -> registers; see kernels/hopper/lang.py

    # What a format says.

    def entries(self) -> dict[str, Entry]:
        """The grid's tensors, by name. Always holds "scale"."""
        order = {"order": Entry(torch.int32, table=(COLUMNS,))} if self.order else {}
        return {"scale": Entry(group=self.group)} | order

    def fit(self, w: Tensor) -> Grid:
        """Weights (N, K) fp32 -> the grid. Rounds nothing but the grid's own numbers."""
        raise NotImplementedError(f"{type(self).__name__}.fit")

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        """Weights (N, K) fp32 -> the nearest codes (N, K / width * books), uint8."""
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        """Codes -> (N, K) fp32 in units of the scale, in the stored order: THE definition."""
        raise NotImplementedError(f"{type(self).__name__}.values")

    # What follows from it.

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """Codes -> weights (N, K) fp32."""
        values = self.values(codes, grid)
        w = ungroup(grouped(values, grid["scale"]) * grid["scale"].float()[..., None])
        return w[:, torch.argsort(grid["order"])] if self.order else w

    def at(self, grid: Grid, columns: slice) -> Grid:
        """The grid for a range of columns, whose bounds must lie on group borders."""
        out = {}
        for name, entry in self.entries().items():
            g = entry.group
            if g and (columns.start % g or columns.stop % g):
                raise ValueError(
                    f"columns {columns.start}:{columns.stop} do not lie on borders of "
                    f"group={g} in format {self.spec!r}"
                )
            part = slice(columns.start // g, columns.stop // g) if g else slice(None)
            out[name] = grid[name] if entry.table is not None else grid[name][:, part]
        return out

    def code_count(self, k: int) -> int:
        """Codes in a row of k weights."""
        return k // self.width * self.books

    def check(self, n: int, k: int) -> None:
        """Raise ValueError when a weight of shape (n, k) cannot be stored in this format."""
        units = {entry.group for entry in self.entries().values() if entry.group} | {self.width}
        for unit in sorted(units, reverse=True):
            if k % unit:
                what = f"group={unit}" if unit != self.width else f"vectors of {unit}"
                divisor = math.gcd(k, unit)
                remedy = f"use group={divisor}, or " if unit != self.width and divisor > 1 else ""
                raise ValueError(
                    f"K={k} is not a multiple of {what} in format {self.spec!r}; "
                    f"{remedy}keep the layer unquantized (None)"
                )

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits for each weight of a matrix: codes, scales and tables (CodeGEMM, eq. 1)."""
        n, k = shape
        total = self.code_count(k) * n * self.bits
        for entry in self.entries().values():
            total += entry.default_dtype.itemsize * 8 * math.prod(entry.shape(n, k))
        return total / (n * k)

    @property
    def spec(self) -> str:
        """The string that names this format; `get_format` is its inverse."""
        name, args = self._spec_parts()
        return name + (":" + ",".join(args) if args else "")

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Format":
        """Build from the parts of a spec string; override for names that carry options."""
        return cls(**read_options(cls, name, args))

    def _spec_parts(self) -> tuple[str, list[str]]:
        return next(k for k, v in FORMATS.items() if v is type(self)), self._options()

    def _options(self, skip: tuple[str, ...] = ()) -> list[str]:
        """Fields that differ from their defaults, as they are written in a spec."""
        args = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in skip or value == field.default:
                continue
            args.append(field.name if value is True else f"{field.name}={value}")
        return args


@dataclass(frozen=True)
class Packed:
    """A quantized weight as it is stored: a format, the shape (N, K), bit planes and the grid."""

    format: Format
    shape: tuple[int, int]
    planes: tuple[Tensor, ...]
    grid: Grid

    @classmethod
    def from_codes(cls, fmt: Format, shape: tuple[int, int], codes: Tensor, grid: Grid) -> "Packed":
        """Pack codes (N, C) and their grid."""
        return cls(fmt, shape, planes_of.pack(codes, fmt.bits), grid)

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
                raise ValueError(f"{name}: tensor {key!r} of format {fmt.spec!r} is missing")
            got = tensors[key]
            ok = got.dtype == torch.int32 if entry is None else entry.accepts(got.dtype)
            if tuple(got.shape) != size or not ok:
                raise ValueError(
                    f"{name}.{key}: expected shape {size} and dtype "
                    f"{'int32' if entry is None else entry.dtype} for format {fmt.spec!r} and a "
                    f"weight of {shape}, found {tuple(got.shape)} {got.dtype}"
                )
        planes = tuple(tensors[key] for key, (_, entry) in wanted.items() if entry is None)
        return cls(fmt, shape, planes, {k: tensors[k] for k, (_, e) in wanted.items() if e})

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
        """The weight with its columns in the stored order; itself when they have no other."""
        if not self.format.order:
            return self
        fmt = dataclasses.replace(self.format, order=False)  # type: ignore[call-arg]
        grid = {name: tensor for name, tensor in self.grid.items() if name != "order"}
        return Packed(fmt, self.shape, self.planes, grid)

    def to(self, device: torch.device | str) -> "Packed":
        return self._map(lambda t: t.to(device))

    def rows(self, rows: slice) -> "Packed":
        """The part for a range of outputs: a slice of every tensor but shared tables."""
        start, stop, _ = rows.indices(self.shape[0])
        entries = self.format.entries()
        grid = {k: v if entries[k].table else v[start:stop] for k, v in self.grid.items()}
        planes = tuple(p[start:stop] for p in self.planes)
        return Packed(self.format, (stop - start, self.shape[1]), planes, grid)

    def columns(self, columns: slice) -> "Packed":
        """The part for a range of inputs, on borders of the groups and of 32 codes."""
        if self.format.order:
            raise ValueError(
                f"a weight in format {self.format.spec!r} cannot be cut along K: the columns of a "
                "group lie apart; cut it along N, or use its dequantized weight"
            )
        start, stop, _ = columns.indices(self.shape[1])
        first, last = self.format.code_count(start), self.format.code_count(stop)
        whole = self.format.code_count(self.shape[1])
        if start % self.format.width or first % 32 or (last % 32 and last != whole):
            raise ValueError(
                f"columns {start}:{stop} of format {self.format.spec!r} do not lie on borders "
                f"of 32 codes ({32 * self.format.width // self.format.books} columns)"
            )
        planes = tuple(
            p[:, first * width // 32 : planes_of.words(last, width)]
            for p, width in zip(self.planes, planes_of.segments(self.format.bits), strict=True)
        )
        grid = self.format.at(self.grid, slice(start, stop))
        return Packed(self.format, (self.shape[0], stop - start), planes, grid)

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def _map(self, fn: Any) -> "Packed":
        grid = {k: fn(v) for k, v in self.grid.items()}
        return Packed(self.format, self.shape, tuple(fn(p) for p in self.planes), grid)


def tensor_shapes(
    fmt: Format, shape: tuple[int, int]
) -> dict[str, tuple[tuple[int, ...], Entry | None]]:
    """Names, shapes and grid entries (None for code planes) of a packed weight of this shape."""
    n, k = shape
    count = fmt.code_count(k)
    out: dict[str, tuple[tuple[int, ...], Entry | None]] = {
        f"codes{width}": ((n, planes_of.words(count, width)), None)
        for width in planes_of.segments(fmt.bits)
    }
    return out | {name: (entry.shape(n, k), entry) for name, entry in fmt.entries().items()}


# Names.

FORMATS: dict[str, type[Format]] = {}


def register(*names: str):  # type: ignore[no-untyped-def]
    """Class decorator: make a format known under one or more names.

    >>> @register("ternary")
    ... @dataclass(frozen=True)
    ... class Ternary(Format): ...
    """

    def add(cls: type[Format]) -> type[Format]:
        for name in names:
            known = FORMATS.get(name)
            if known and (known.__module__, known.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise ValueError(
                    f"format {name!r} is already registered by {known.__module__}."
                    f"{known.__qualname__}; choose another name"
                )
            FORMATS[name] = cls
        return cls

    return add


def get_format(spec: "str | Format") -> Format:
    """Parse a spec string: `int4`, `int4:group=128,zero`, `fp6`, `fp:e3m2`, `codebook:m=2,v=8`.

    Raises ValueError for an unknown name or option, and lists the known ones.
    """
    if isinstance(spec, Format):
        return spec
    name, _, rest = spec.strip().partition(":")
    if name not in FORMATS:
        raise ValueError(
            f"unknown format {name!r} in {spec!r}; known: {', '.join(sorted(FORMATS))}"
        )
    fmt = FORMATS[name].from_spec(name, [a.strip() for a in rest.split(",") if a.strip()])
    if fmt.group < 0:
        raise ValueError(
            f"group={fmt.group} in {spec!r}; a group has 1 or more columns, 0 is a row"
        )
    return fmt


def read_options(
    cls: type[Format], name: str, args: list[str], named: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`["group=64", "zero"]` -> {"group": 64, "zero": True}, checked against the class's fields.

    named: fields that the format's name has set already.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in named}
    out: dict[str, Any] = {}
    for arg in args:
        key, eq, text = arg.partition("=")
        if key not in fields or key in out:
            known = ", ".join(fields) or "none"
            problem = "repeated" if key in out else "unknown"
            raise ValueError(f"{problem} option {key!r} in format {name!r}; known options: {known}")
        if not eq:
            if fields[key].type not in (bool, "bool"):
                raise ValueError(f"option {key!r} of format {name!r} needs a value: {key}=NUMBER")
            out[key] = True
            continue
        try:
            out[key] = int(text)
        except ValueError:
            raise ValueError(
                f"option {key!r} of format {name!r} must be a whole number, not {text!r}"
            ) from None
    return out


# Helpers that formats share.


def grouped(w: Tensor, scale: Tensor) -> Tensor:
    """(N, K) -> (N, groups, K / groups), as many groups as `scale` (N, groups) has."""
    return w.reshape(w.shape[0], scale.shape[1], -1)


def ungroup(w: Tensor) -> Tensor:
    """The inverse of `grouped`."""
    return w.reshape(w.shape[0], -1)


def groups_of(w: Tensor, group: int) -> Tensor:
    """(N, K) -> (N, K / group, group); group 0 means the whole row."""
    return w.reshape(w.shape[0], -1, group or w.shape[1])


def store_scale(scale: Tensor) -> Tensor:
    """A scale as it is stored: 16 bits, never zero.

    fp16, or bf16 when a scale leaves fp16's normal range. Groups of zeros get the scale 1.
    """
    scale = torch.where(scale == 0, 1.0, scale)
    low, high = scale.abs().aminmax()
    fits = low >= HALF_NORMAL[0] and high <= HALF_NORMAL[1]
    return scale.to(torch.float16 if fits else torch.bfloat16)


def known_formats() -> Iterator[tuple[str, type[Format]]]:
    """Registered names and classes, in the order of registration."""
    return iter(FORMATS.items())
