"""Tensor parallelism: what one rank holds of a weight that is stored whole.

A rank of a column-parallel layer holds some outputs of a weight (N, K), a range of rows; a rank of
a row-parallel layer holds some inputs, a range of columns. Both are slices of the canonical
tensors, and exact. Rows can be cut anywhere, columns where no group of columns that share a scale,
and no vector, is split. A plane whose words a cut would split is packed anew.
"""

import math

import torch
from torch import Tensor

from anybit.core import planes as bits
from anybit.core.format import Format
from anybit.core.packed import Packed, tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput

WHOLE = slice(None)


def share(size: int, rank: int, ranks: int, name: str = "weight") -> slice:
    """The range that belongs to one of several ranks with equal parts of `size`."""
    if size % ranks:
        raise InvalidInput(f"{name}: {size} cannot be divided among {ranks} ranks")
    part = size // ranks
    return slice(rank * part, (rank + 1) * part)


def check_columns(fmt: Format, k: int, ranks: int, name: str = "weight") -> None:
    """Raise ValueError unless every rank can hold an equal part of K = k columns."""
    part = share(k, 0, ranks, name).stop
    if ranks == 1:
        return
    if part % fmt.width:
        raise InvalidInput(
            f"{name}: K={k} over {ranks} ranks is {part} columns each, which splits vectors of "
            f"{fmt.width} in format {fmt.spec!r}; use fewer ranks, or keep the layer unquantized"
        )
    for group in sorted({e.group for e in fmt.entries().values() if e.group}, reverse=True):
        if part % group:
            divisor = math.gcd(part, group)
            fits = divisor > 1 and divisor % fmt.width == 0
            remedy = f"quantize it with group={divisor}" if fits else "use one scale a row"
            remedy = remedy if fmt.has_group_option else "use another format"
            raise InvalidInput(
                f"{name}: K={k} over {ranks} ranks is {part} columns each, which splits "
                f"group={group} in format {fmt.spec!r}; {remedy}, use fewer ranks, or keep the "
                "layer unquantized"
            )


def check_borders(fmt: Format, k: int, start: int, stop: int) -> None:
    """Raise ValueError when a range of K = k columns begins or ends inside a group or a vector."""
    unit = math.lcm(fmt.width, *(e.group for e in fmt.entries().values() if e.group))
    if start % unit or (stop % unit and stop != k):
        raise InvalidInput(
            f"columns {start} to {stop} of K={k} split a group or a vector in format "
            f"{fmt.spec!r}; cut it at multiples of {unit} columns"
        )


def shard(packed: Packed, rows: slice = WHOLE, columns: slice = WHOLE) -> Packed:
    """The part of a weight for a range of outputs and a range of inputs.

    Raises ValueError when the inputs begin or end inside a group or a vector.
    """
    n, k = packed.shape
    start, stop, _ = columns.indices(k)
    top, bottom, _ = rows.indices(n)
    tensors = {
        key: cut(packed.format, k, key, tensor, rows, slice(start, stop))
        for key, tensor in packed.tensors().items()
    }
    return Packed.from_tensors(packed.format, (bottom - top, stop - start), tensors)


def cut(fmt: Format, k: int, key: str, tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of one stored tensor (`Packed.tensors`) of a weight with K = k columns."""
    start, stop, _ = columns.indices(k)
    if fmt.order and (start, stop) != (0, k):
        raise InvalidInput(
            f"a weight in format {fmt.spec!r} cannot be cut along K: the columns of a group lie "
            "apart; cut it along N, or use its dequantized weight"
        )
    check_borders(fmt, k, start, stop)
    entry = fmt.entries().get(key)
    if entry is None:
        part, width = tensor[rows], int(key.removeprefix("codes"))
        first, last = fmt.code_count(start), fmt.code_count(stop)
        if first * width % 32 == 0 and (last * width % 32 == 0 or stop == k):
            return part[:, first * width // 32 : bits.words(last, width)]
        codes = bits.unpack((part[:, : bits.words(last, width)],), width, last)
        return bits.pack(codes[:, first:], width)[0]
    if entry.table is not None:
        return tensor
    group = entry.group
    return tensor[rows, start // group : stop // group] if group else tensor[rows]


class Piece:
    """One rank's part of a stored linear layer, filled tensor by tensor as a checkpoint is read.

    name: of the layer, for errors. scheme: of the layer; None for a dense weight.
    shape: (N, K) of the part. k: columns of the whole weight, of which the part has `columns`.

    An integer weight whose columns are stored in an order of their own is no slice of the stored
    tensors: `columns` of it become a dense weight.
    """

    def __init__(self, name: str, scheme: str | None, n: int, k: int, columns: slice = WHOLE):
        start, stop, _ = columns.indices(k)
        self.name, self.k = name, k
        self.columns = slice(start, stop)
        self.shape = (n, stop - start)
        self.format: Format | None = None
        self.activation: str | None = None
        if scheme is not None:
            self.format, self.activation = parse_scheme(scheme)
        self.apart = bool(self.format and self.format.order and self.shape[1] < k)
        self.tensors: dict[str, Tensor] = {}
        if self.format is not None and not self.apart:
            check_columns(self.format, k, k // self.shape[1], name)

    def keys(self) -> list[str]:
        """Names of the tensors that it needs."""
        if self.format is None:
            return ["weight"]
        return list(tensor_shapes(self.format, (self.shape[0], self.k)))

    def is_table(self, key: str) -> bool:
        """Whether all rows share the tensor."""
        entry = self.format.entries().get(key) if self.format else None
        return entry is not None and entry.table is not None

    def dtype(self, key: str) -> torch.dtype:
        """One that holds every number of a stored tensor."""
        fmt = self.format
        entry = None if fmt is None else fmt.entries().get(key)
        if fmt is None or (entry is not None and entry.default_dtype.is_floating_point):
            return torch.float32
        return torch.int32 if entry is None else entry.default_dtype

    def take(
        self,
        key: str,
        tensor: Tensor,
        first: int = 0,
        device: torch.device | None = None,
        padded: bool = False,
    ) -> None:
        """Keep this part of a stored tensor: its rows from `first` on.

        padded: rows that are not stored (a vocabulary's padding) are filled with zeros.
        """
        self._check(key, tensor)
        n, rest = self.shape[0], tensor.shape[0] - first
        if self.is_table(key):
            part = tensor
        elif rest < n and not padded:
            raise InvalidInput(
                f"{self.name}.{key}: the checkpoint has {tensor.shape[0]} rows, too few for the "
                f"{n} from {first} on"
            )
        elif self.format is None:
            part = tensor[first : first + n, self.columns]
        else:
            columns = WHOLE if self.apart else self.columns
            part = cut(self.format, self.k, key, tensor, slice(first, first + n), columns)
        part = part.to(device or part.device, copy=True)  # the stored one may be a mapped file
        if not self.is_table(key) and len(part) < n:
            part = torch.cat((part, part.new_zeros(n - len(part), *part.shape[1:])))
        self.tensors[key] = part.contiguous()

    def _check(self, key: str, tensor: Tensor) -> None:
        """A stored tensor has the columns of the whole weight, a table its own shape."""
        if key not in self.keys():
            raise InvalidInput(
                f"{self.name}.{key}: in the checkpoint, but not in "
                f"{self.format.spec if self.format else 'a dense weight'}; copy it again"
            )
        found: tuple[int, ...] = tuple(tensor.shape)
        wanted: tuple[int, ...] = (tensor.shape[0], self.k)
        if self.format is not None:
            size, _ = tensor_shapes(self.format, (self.shape[0], self.k))[key]
            wanted = size if self.is_table(key) else (tensor.shape[0], *size[1:])
        if found != wanted:
            kind = f"format {self.format.spec!r}" if self.format else "a dense weight"
            raise InvalidInput(
                f"{self.name}.{key}: the checkpoint has shape {found}, but {kind} and a weight "
                f"with K={self.k} want {wanted}"
            )

    def finish(self) -> Tensor | Packed:
        """The part, which the piece then no longer holds; ValueError when a tensor is missing."""
        missing = [key for key in self.keys() if key not in self.tensors]
        if missing:
            raise InvalidInput(
                f"{self.name}: the checkpoint lacks {', '.join(missing)}; a file of it is missing "
                "or damaged, copy it again"
            )
        tensors, self.tensors = self.tensors, {}
        if self.format is None:
            return tensors["weight"]
        if self.apart:
            whole = Packed.from_tensors(self.format, (self.shape[0], self.k), tensors, self.name)
            return whole.dequantize()[:, self.columns]
        return Packed.from_tensors(self.format, self.shape, tensors, self.name)


def same(parts: list[Tensor | Packed]) -> bool:
    """Whether weights on top of each other are one weight: dense, or of a format without tables."""
    if all(isinstance(part, Tensor) for part in parts):
        return True
    formats = {part.format if isinstance(part, Packed) else None for part in parts}
    if len(formats) > 1 or None in formats:
        return False
    return not any(e.table for fmt in formats if fmt for e in fmt.entries().values())
