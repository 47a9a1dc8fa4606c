"""Tensor parallelism: what one rank holds of a weight that is stored whole.

A rank of a column-parallel layer holds some outputs of a weight (N, K), a range of rows; a rank of
a row-parallel layer holds some inputs, a range of columns. Both are slices of the canonical
tensors, and exact. Rows can be cut where no tile is split (anywhere, as a rule), columns where no
group of columns that share a scale, no vector and no tile is. A plane whose words a cut would split
is packed anew.
"""

import math

import torch
from torch import Tensor

from anybit.core.format import Entry, Format
from anybit.core.packed import WHOLE, Packed, cut, tensor_shapes, why_apart
from anybit.core.rotation import block, check_part
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.nn.linear import check_grid


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
    unit = fmt.tile[1]
    if part % unit:
        raise InvalidInput(
            f"{name}: K={k} over {ranks} ranks is {part} columns each, which splits {fmt.unit} of "
            f"{unit} in format {fmt.spec!r}; use fewer ranks, or keep the layer unquantized"
        )
    for group in sorted({e.group for e in fmt.entries().values() if e.group}, reverse=True):
        if part % group:
            divisor = math.gcd(part, group)
            fits = divisor > 1 and divisor % unit == 0
            remedy = f"quantize it with group={divisor}" if fits else "use one scale a row"
            remedy = remedy if fmt.has_group_option else "use another format"
            raise InvalidInput(
                f"{name}: K={k} over {ranks} ranks is {part} columns each, which splits "
                f"group={group} in format {fmt.spec!r}; {remedy}, use fewer ranks, or keep the "
                "layer unquantized"
            )
    if fmt.rotate and block(part) != block(k):
        raise InvalidInput(
            f"{name}: K={k} over {ranks} ranks is {part} columns each, which splits blocks of "
            f"{block(k)} that are rotated in format {fmt.spec!r}; use fewer ranks, or quantize it "
            "without rotate"
        )


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
        # Shapes (of tables, and but for rows of all others) and entries of the stored tensors.
        self.stored: dict[str, tuple[tuple[int, ...], Entry]] = {"weight": ((n, k), Entry())}
        if self.format is not None:
            self.stored = tensor_shapes(self.format, (n, k))
        if self.format is not None and not self.apart:
            check_columns(self.format, k, k // self.shape[1], name)

    def keys(self) -> list[str]:
        """Names of the tensors that it needs."""
        return list(self.stored)

    def is_table(self, key: str) -> bool:
        """Whether all rows share the tensor."""
        return key in self.stored and self.stored[key][1].table is not None

    def movable(self, key: str) -> bool:
        """Whether rows of a stored tensor may change places as the weight's do."""
        fmt = self.format
        return fmt is None or not (self.is_table(key) or "n" in fmt.rotate or fmt.tile[0] > 1)

    def dtype(self, key: str) -> torch.dtype:
        """One that holds every number of a stored tensor."""
        dtype = self.stored[key][1].default_dtype
        return torch.float32 if dtype.is_floating_point else dtype

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
        n, rest, table = self.shape[0], tensor.shape[0] - first, self.is_table(key)
        if rest < n and not padded and not table:
            raise InvalidInput(
                f"{self.name}.{key}: the checkpoint has {tensor.shape[0]} rows, too few for the "
                f"{n} from {first} on"
            )
        if self.format is None:
            part = tensor[first : first + n, self.columns]
        else:
            columns = WHOLE if self.apart else self.columns
            rows = slice(first, first + min(n, rest)) if not table else WHOLE
            part = cut(self.format, self.k, key, tensor, rows, columns)
            if rest < n and not table and "n" in self.format.rotate:
                check_part(tensor.shape[0], first, first + n, self.format.spec)
        part = part.to(device or part.device, copy=True)  # the stored one may be a mapped file
        if not table and len(part) < n:
            part = torch.cat((part, part.new_zeros(n - len(part), *part.shape[1:])))
        self.tensors[key] = part.contiguous()

    def _check(self, key: str, tensor: Tensor) -> None:
        """A stored tensor has the columns of the whole weight, a table its own shape."""
        if key not in self.stored:
            raise InvalidInput(
                f"{self.name}.{key}: in the checkpoint, but not in "
                f"{self.format.spec if self.format else 'a dense weight'}; copy it again"
            )
        found, (size, _) = tuple(tensor.shape), self.stored[key]
        wanted = size if self.is_table(key) else (*found[:1], *size[1:])
        if found != wanted:
            kind = f"format {self.format.spec!r}" if self.format else "a dense weight"
            raise InvalidInput(
                f"{self.name}.{key}: the checkpoint has shape {found}, but {kind} and a weight "
                f"with K={self.k} want {wanted}"
            )

    def finish(self) -> Tensor | Packed:
        """The part, which the piece then no longer holds; ValueError when a tensor is missing."""
        missing = [key for key in self.stored if key not in self.tensors]
        if missing:
            raise InvalidInput(
                f"{self.name}: the checkpoint lacks {', '.join(missing)}; a file of it is missing "
                "or damaged, copy it again"
            )
        tensors, self.tensors = self.tensors, {}
        if self.format is None:
            return tensors["weight"]
        shape = (self.shape[0], self.k) if self.apart else self.shape
        packed = check_grid(Packed.from_tensors(self.format, shape, tensors, self.name), self.name)
        return packed.dequantize()[:, self.columns] if self.apart else packed


def same(parts: list[Tensor | Packed]) -> bool:
    """Whether weights on top of each other are one weight: dense, or of a format without tables.

    Rotated ones are where inputs are rotated alike, and no block holds outputs of two of them.
    """
    packed = [part for part in parts if isinstance(part, Packed)]
    if not packed or len(packed) < len(parts):
        return not packed
    entries = packed[0].format.stored_entries().items()
    tables = {name for name, entry in entries if entry.table and name != "rotate_in"}
    return not tables and why_apart(packed) is None
