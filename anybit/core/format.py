"""What a weight format is: `Format`, the shapes of what it stores (`Entry`), and its spec string.

A format is one class in one file. It defines what codes mean; quantizers choose the codes, kernels
read them, checkpoints store them, and none of them knows a particular format.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from anybit.core import names as own_names
from anybit.core import rotation
from anybit.core.frame import Frame
from anybit.core.groups import grouped, ungroup
from anybit.errors import InvalidInput, InvalidType, near

Grid = dict[str, Tensor]
COLUMNS = -1
GROUPS = (16, 32, 64, 128, 256)  # smaller ones take more memory than a larger format
LAYER = ("order", "rotate_in", "rotate_out")  # tensors of a layer that its backend never sees


@dataclass(frozen=True)
class Entry:
    """The shape of one grid tensor: one value per `group` columns of a row, or a shared table.

    Attributes:
        dtype: The dtype that is stored. "float" stands for fp16 (bf16 and fp32 are accepted too),
            "level" for uint8 (or a float, as the zero points of some tools are).
        group: Columns that share a value; 0 means the whole row.
        table: A fixed shape instead, in which COLUMNS stands for the weight's K.
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
        """Whether a tensor of this dtype may be stored here."""
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
    """A few-bit format of a weight W of shape (N outputs, K inputs).

        W = values(codes, grid) * scales(grid)

    A subclass is a frozen dataclass whose fields are its options, decorated with `register`. It
    sets `bits` and implements `fit`, `encode` and `values`. The attributes below are all that the
    rest of anybit knows of a format: quantizers, kernels and checkpoints ask for them, and never
    for a class or a name. A subclass sets those that differ, as class attributes, as fields or as
    properties.

    `codes` are (N, K / width * books) unsigned integers, those of one position side by side. `grid`
    holds the named real tensors that codes refer to, each described by `entries`. The scale is a
    factor of its own so that a kernel may apply it where that is cheapest: to a weight, to the
    partial sum of a group, or, when the whole row shares it, to the output. Where the scales of
    groups have few bits, a grid may also hold "row_scale" (N, 1) fp32, which multiplies them:
    kernels apply the two apart.

    Attributes:
        bits: Bits of one code, 1 to 24.
        width: Weights that one position stands for: 2 for a sparse pair, v for a vector.
        books: Codes stored for each position: m for additive codebooks.
        group: Columns of a row that share one scale; 0 means the whole row.
        tile: (rows, columns) of the smallest part that codes describe alone: (1, width), or 16x16
            where codes are a sequence (`core/tiles.py`).
        window: Bits of the sequence, its step's own ones last, that a value depends on; 0 where it
            depends on its own code alone.
        order: Columns are stored in an order of their own, `grid["order"]` (K,): stored column i is
            column order[i] of the weight. So columns of a group may lie apart (GPTQ's act-order).
            Backends never see it: `QuantLinear` puts the activations in that order instead.
        rotate: "k" or "kn": the layer holds a weight that is rotated along its inputs, or along
            inputs and outputs, by the vectors `grid["rotate_in"]` (K,) and `grid["rotate_out"]`
            (N, 1); see `core/rotation.py`. An option of every format, of which `fit`, `encode` and
            `values` know nothing. Backends never see it: `QuantLinear` rotates the activations.
        rowwise: Rows (of tiles) are fitted and encoded independently of each other.
        searched: Ranges may be searched by encoding with many; not where `encode` takes long and
            `fit` needs none.
        operand: "int8" when all values are integers within int8, so that integer kernels can
            multiply them; "activation" when values have the dtype of the activations.
        zero_point: Name of the grid tensor z, with the groups of the scale, where
            values = codes - z; None where there is none. z may hold floats (HQQ fits such).
        lookup: Name of the grid table, of shape (books, 2**bits, width), where the values of a
            position are the sum of one row of each book; None for other formats. Quantizers may
            learn the table from calibration data.
        made_for: Dtype of quantized activations that the format is designed for, "int8" or "fp8";
            None when it is for weights alone. Quantizers smooth activation outliers for it.
        rows: Method (codes, grid) -> how `values` come about where a code is a row of a table that
            all weights share, and signs; None where there is none.
        triton_decode: Method (at) -> values of a tile, written with `kernels/triton/lang.py`, that
            is compiled into every Triton kernel; None when there is none.
        hashed: How states of a sequence look their values up in the table of `tables`, by which the
            CPU kernels multiply (`core/tiles.py`); None where they do not.
        hopper_decode: Method (operand) -> the decoder for an operand of WGMMA or `mma.sync`
            ("int8", "float8_e4m3fn", "float16" or "bfloat16"), written with
            `kernels/cute/decode.py`, or the reason why there is none, in words; None when there is
            no such method.
    """

    rotate: str = dataclasses.field(default="", kw_only=True)

    # Not annotated, so that they are no dataclass fields; a subclass may make fields of them.
    bits = 0
    width = 1
    books = 1
    group = 0
    order = False
    window = 0
    rowwise = True
    searched = True
    operand = "activation"
    zero_point: ClassVar[str | None] = None
    lookup: ClassVar[str | None] = None
    made_for: ClassVar[str | None] = None
    rows: ClassVar[Any] = None
    triton_decode: ClassVar[Any] = None
    hashed: ClassVar[Any] = None
    hopper_decode: ClassVar[Any] = None

    @property
    def tile(self) -> tuple[int, int]:
        """See above."""
        return (1, self.width)

    # What a format says.

    def entries(self) -> dict[str, Entry]:
        """The tensors that codes refer to, by name. Always holds "scale"."""
        return {"scale": Entry(group=self.group)}

    def fit(self, w: Tensor) -> Grid:
        """Weights (N, K) fp32 -> the grid. Rounds only the grid's own numbers."""
        raise NotImplementedError(f"{type(self).__name__}.fit")

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        """Weights (N, K) fp32 -> the nearest codes (N, K / width * books).

        Codes are uint8, or int32 where `bits` is above 8.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        """Codes -> (N, K) fp32 in units of the scale, in the stored order of columns.

        This is the definition of the format, against which every kernel is tested.
        """
        raise NotImplementedError(f"{type(self).__name__}.values")

    def scales(self, grid: Grid) -> Tensor:
        """What values are multiplied by, (N, groups) fp32."""
        scale, row = grid["scale"].float(), grid.get("row_scale")
        return scale if row is None else scale * row

    def tables(self) -> Grid:
        """Numbers that belong to the format itself, by name; kernels get them behind the grid."""
        return {}

    def row_factor(self, grid: Grid) -> Tensor | None:
        """The factor (N, 1) fp32 of `scales` beside grid["scale"]; None where there is none."""
        return grid.get("row_scale")

    def frame(self, grid: Grid) -> Frame | None:
        """How `values` come about, where a format says it; None leaves it to kernels to find out.

        Needed only where factors and shifts cannot be told from values, because of rounding.
        """
        return None

    def digits(self, codes: Tensor, grid: Grid) -> Tensor:
        """Codes (N, positions) -> what GPUs store: those, or of some with `rows` 4 bits, (N, K)."""
        return codes

    # What follows from it.

    def stored_entries(self) -> dict[str, Entry]:
        """All tensors that are stored beside the codes: `entries`, and those of the layer."""
        out = self.entries()
        if self.order:
            out = out | {"order": Entry(torch.int32, table=(COLUMNS,))}
        if self.rotate:
            out = out | {"rotate_in": Entry(table=(COLUMNS,))}
        if "n" in self.rotate:
            out = out | {"rotate_out": Entry()}
        return out

    def plain(self) -> "Format":
        """The format that backends see: columns in the stored order, rotated or not."""
        if not (self.order or self.rotate):
            return self
        changes: dict[str, Any] = {"rotate": ""} | ({"order": False} if self.order else {})
        return dataclasses.replace(self, **changes)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """Codes -> weights (N, K) fp32."""
        values = self.values(codes, grid)
        w = ungroup(grouped(values, grid["scale"]) * self.scales(grid)[..., None])
        if self.rotate:
            return rotation.Rotation.of(grid).restored(w)
        return w[:, torch.argsort(grid["order"])] if self.order else w

    def code_count(self, k: int) -> int:
        """Codes in a row of k weights."""
        return k // self.width * self.books

    def check(self, n: int, k: int) -> None:
        """Check that a weight of shape (n, k) can be stored in this format.

        Raises:
            InvalidInput: N or K is not a multiple of the tile's, K not one of a group, or a side is
                to be rotated that has no blocks.
        """
        rows, columns = self.tile
        if not n or not k:
            raise InvalidInput(f"a weight of N={n}, K={k} is empty; keep the layer (None)")
        if n % rows:
            raise InvalidInput(
                f"N={n} is not a multiple of tiles of {rows} rows in format {self.spec!r}; keep "
                "the layer unquantized (None)"
            )
        units = {entry.group for entry in self.entries().values() if entry.group} | {columns}
        for unit in sorted(units, reverse=True):
            if k % unit:
                what = f"group={unit}" if unit != columns else f"{self.unit} of {unit}"
                fits = unit != columns and self.has_group_option
                remedy = f"use {groups_near(k, unit)}, or " if fits else ""
                raise InvalidInput(
                    f"K={k} is not a multiple of {what} in format {self.spec!r}; "
                    f"{remedy}keep the layer unquantized (None)"
                )
        for side, size in zip("kn", (k, n), strict=True):
            if side in self.rotate:
                rotation.check_size(size, side.upper(), self.spec)

    @property
    def unit(self) -> str:
        """What a column border must not split, in words for errors."""
        return "vectors" if self.tile[0] == 1 else "tiles"

    @property
    def has_group_option(self) -> bool:
        """Whether users choose the size of groups."""
        return any(f.metadata.get("option", f.name) == "group" for f in dataclasses.fields(self))

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits per weight of a matrix (N, K): codes, scales and tables (CodeGEMM, eq. 1)."""
        n, k = shape
        total = self.code_count(k) * n * self.bits
        for entry in self.stored_entries().values():
            total += entry.default_dtype.itemsize * 8 * math.prod(entry.shape(n, k))
        return total / (n * k)

    @property
    def spec(self) -> str:
        """The string that names this format; `get_format` is its inverse."""
        name, args = self._spec_parts()
        return name + (":" + ",".join(args) if args else "")

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Format":
        """The format of a spec string; override where the name itself carries options.

        Args:
            name: One of the names given to `register`.
            args: What follows the colon, split at commas: ["group=64", "zero"].

        Raises:
            InvalidInput: An option is unknown, repeated, or has no valid value.
        """
        return cls(**read_options(cls, name, args))

    def _spec_parts(self) -> tuple[str, list[str]]:
        """The name and the options that `from_spec` takes."""
        kind = type(self)
        name = next((name for name, known in FORMATS.items() if known is kind), None)
        if name is None:
            raise InvalidInput(
                f"format class {kind.__qualname__} has no name; decorate it with @register(NAME)"
            )
        return name, self._options()

    def _options(self, skip: tuple[str, ...] = ()) -> list[str]:
        """Fields that differ from their defaults, as they are written in a spec."""
        args = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in (*skip, "rotate") or value == field.default:
                continue
            name = field.metadata.get("option", field.name)
            args.append(name if value is True else f"{name}={value}")
        return [*args, f"rotate={self.rotate}"] if self.rotate else args  # of every format


def groups_near(k: int, group: int) -> str:
    """Sizes of groups that K columns have, in words: the next smaller one and the next larger."""
    fit = [size for size in GROUPS if k % size == 0]
    nearest = [*[s for s in fit if s < group][-1:], *[s for s in fit if s > group][:1]]
    return " or ".join(f"group={size}" for size in nearest) or "group=0 (a scale for each row)"


# Names.

FORMATS: dict[str, type[Format]] = {}
FormatClass = TypeVar("FormatClass", bound=type[Format])
Parsed = TypeVar("Parsed")
_caches: list[Any] = []


def parser(function: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """`functools.cache` of what a string means, until another format is registered."""
    _caches.append(cache(function))
    found: Callable[[str], Parsed] = _caches[-1]
    return found


def register(*names: str) -> Callable[[FormatClass], FormatClass]:
    """Class decorator: make a format known under one or more names.

    >>> @register("ternary")
    ... @dataclass(frozen=True)
    ... class Ternary(Format): ...

    Args:
        names: What stands before the colon in a spec string.

    Raises:
        InvalidInput: Another class has one of the names.
    """

    def path(cls: type[Format]) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"

    def add(cls: FormatClass) -> FormatClass:
        for name in names:
            known = FORMATS.get(name)
            if known and path(known) != path(cls):  # a module that is reloaded may register again
                raise InvalidInput(
                    f"format {name!r} is already registered by {path(known)}; choose another name"
                )
            FORMATS[name] = cls
        for each in _caches:
            each.cache_clear()
        return cls

    return add


def get_format(spec: "str | Format") -> Format:
    """Parse a spec string: `int4`, `int4:group=128,zero`, `fp6`, `fp:e3m2`, `codebook:m=2,v=8`.

    Names of other tools (`core/names.py`) are understood, and case does not matter.

    Args:
        spec: A spec string; a format is returned as it is.

    Raises:
        InvalidInput: A name or an option is unknown; the message lists the known ones.
        InvalidType: The spec is no string.
    """
    if isinstance(spec, Format):
        return spec
    if not isinstance(spec, str):
        raise InvalidType(f"a format is a string such as 'int4', or a Format, not {spec!r}")
    own_names.builtin()
    own = own_names.own_spec(spec)
    try:
        return parsed(own)
    except InvalidInput:
        if own == own.lower():
            raise
    return parsed(own.lower())


@parser
def parsed(spec: str) -> Format:
    """The format of a spec string with anybit's own names, as they are written."""
    if "@" in spec:
        weights = spec.partition("@")[0]
        raise InvalidInput(
            f"{spec!r} quantizes activations as well; here is a format of weights, {weights!r}"
        )
    name, _, rest = spec.strip().partition(":")
    if name not in FORMATS:
        known = f"{near(name, FORMATS)}; known: {', '.join(sorted(FORMATS))}"
        why = own_names.explained(name)
        where = "" if name == spec else f" in {spec!r}"
        raise InvalidInput(f"unknown format {name!r}{where}" + (f": {why}" if why else known))
    fmt = FORMATS[name].from_spec(name, [a.strip() for a in rest.split(",") if a.strip()])
    group = min((fmt.group, *(entry.group for entry in fmt.entries().values())))
    if group < 0:
        raise InvalidInput(f"group={group} in {spec!r}; a group has 1 or more columns, 0 is a row")
    if fmt.rotate not in rotation.SIDES:
        raise InvalidInput(f"rotate={fmt.rotate} in {spec!r}; write rotate=k or rotate=kn")
    if fmt.rotate and fmt.order:
        raise InvalidInput(f"{spec!r}: columns in an order of their own are not rotated")
    return fmt


def options_of(cls: type[Format]) -> list[dataclasses.Field[Any]]:
    """A format's fields as they are written in a spec: its own, then that of every format."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.name == "rotate")


def read_options(
    cls: type[Format], name: str, args: list[str], named: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`["group=64", "zero"]` -> {"group": 64, "zero": True}, checked against the class's fields.

    Args:
        cls: The format whose fields are the options.
        name: The format's name, for errors.
        args: The options as they are written in a spec string.
        named: Fields that the format's name has already set.

    Raises:
        InvalidInput: An option is unknown, repeated, or has no valid value.
    """
    # An option has the field's name, or the one in its metadata.
    fields = {
        field.metadata.get("option", field.name): field
        for field in options_of(cls)
        if field.name not in named
    }
    out: dict[str, Any] = {}
    for arg in args:
        key, eq, text = arg.partition("=")
        if key not in fields or fields[key].name in out:
            known = ", ".join(fields) or "none"
            problem = "repeated" if key in fields else "unknown"
            raise InvalidInput(
                f"{problem} option {key!r} in format {name!r}; known options: {known}"
                f"{near(key, fields) if problem == 'unknown' else ''}"
            )
        if not eq:
            if fields[key].type not in (bool, "bool"):
                raise InvalidInput(f"option {key!r} of format {name!r} needs a value: {key}=...")
            out[fields[key].name] = True
            continue
        if fields[key].type in (str, "str"):
            out[fields[key].name] = text
            continue
        try:
            out[fields[key].name] = int(text)
        except ValueError:
            raise InvalidInput(
                f"option {key!r} of format {name!r} must be a whole number, not {text!r}"
            ) from None
    return out


def known_formats() -> Iterator[tuple[str, type[Format]]]:
    """Registered names and classes, in the order of registration."""
    own_names.builtin()
    return iter(FORMATS.items())
