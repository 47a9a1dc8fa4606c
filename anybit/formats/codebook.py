"""Additive codebooks (CodeGEMM and AQLM): a vector of v weights is a sum of m centroids.

Weights are normalized in groups of g columns (g = 0: the whole row), cut into vectors of v
neighbours along K, and every vector becomes m codes of b bits, one into each codebook. v = 1 gives
learned scalar tables, so `codebook:m=1,v=1,b=4,group=64` is a cousin of NF4. Storage is CodeGEMM's
equation 1: b*m/v bits a weight, 16/g for the scales, and the tables.

Here codebooks come from k-means on the weights alone; a quantizer may calibrate them. With the
option `uniform`, a codebook holds all vectors of a few integers instead, so that uniform and binary
weights run on the kernels of codebooks (CodeGEMM, section 5); `as_codebook` converts them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from anybit.core.format import Entry, Format, Grid, register
from anybit.core.groups import divisor, grouped, groups_of, store_scale, ungroup
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.formats.integer import Integer
from anybit.formats.kmeans import chunk, kmeans, nearest, nearest_one

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang

SAMPLE = 1 << 16  # vectors that k-means looks at
SWEEPS = 2  # passes that revisit every codebook after the greedy choice


@register("codebook")
@dataclass(frozen=True)
class Codebook(Format):
    """A sum of m centroids for every vector of v weights; (v, m, b, g) as in the papers.

    The grid holds "scale" and "codebook" (m, 2**b, v), the centroids in units of the scale.

    Attributes:
        m: Codebooks that are added up.
        v: Weights in a vector.
        b: Bits of a code, 1 to 8, or 16.
        group: Columns that share a normalization; 0 means the whole row (the paper's g = -1).
        uniform: Bits of the integers whose vectors are the centroids; 1 stands for -1 and +1. 0
            means centroids of the weights. A quantizer that learns tables starts from them.
    """

    m: int = 2
    v: int = 8
    b: int = 8
    group: int = 0
    uniform: int = 0

    rowwise = False  # all rows share the codebooks
    lookup: ClassVar[str | None] = "codebook"

    def __post_init__(self) -> None:
        if self.m < 1 or self.v < 1 or self.b not in (*range(1, 9), 16):
            raise InvalidInput(
                f"codebook:m={self.m},v={self.v},b={self.b} is out of range; m and v are at least "
                "1, and b is 1 to 8, or 16"
            )
        if self.group % self.v:
            raise InvalidInput(f"codebook: group={self.group} is not a multiple of v={self.v}")
        if self.uniform and (self.m != 1 or self.b != self.uniform * self.v or self.b > 8):
            raise InvalidInput(
                f"codebook: vectors of v={self.v} integers of uniform={self.uniform} bits are one "
                f"codebook of b={self.uniform * self.v} bits, at most 8; found m={self.m} and "
                f"b={self.b}"
            )

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.b

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.v

    @property
    def books(self) -> int:  # type: ignore[override]
        return self.m

    def entries(self) -> dict[str, Entry]:
        return super().entries() | {"codebook": Entry(table=(self.m, 2**self.b, self.v))}

    def fit(self, w: Tensor) -> Grid:
        if self.uniform:
            scale = Integer(self.uniform, self.group).fit(w)["scale"]
            return {"scale": scale, "codebook": self.integers().to(w.device)}
        scale = store_scale(groups_of(w, self.group).square().mean(-1).sqrt_(), zeros=0)
        random = torch.Generator().manual_seed(0)  # on the CPU: the same sample on every device
        count = w.numel() // self.v
        if count > SAMPLE:
            at = torch.randint(count, (SAMPLE,), generator=random).to(w.device)
        else:
            at = torch.arange(count, device=w.device)
        factor = divisor(scale).flatten()[at // (count // scale.numel())]
        vectors, weight = w.reshape(-1, self.v)[at] / factor[:, None], factor.square()
        books = []
        for _ in range(self.m):
            book = kmeans(vectors, weight, 2**self.b, random).half()
            books.append(book)
            vectors = vectors - book.float()[nearest(vectors, book.float())]
        return {"scale": scale, "codebook": torch.stack(books)}

    def integers(self) -> Tensor:
        """All vectors of these integers (1, 2**b, v); the first weight is a code's highest bits."""
        values = Integer(self.uniform).values(torch.arange(2**self.uniform), {})
        return torch.cartesian_prod(*[values] * self.v).view(1, -1, self.v).half()

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        """Greedy over the codebooks, then two sweeps that choose each code anew."""
        books = grid["codebook"].float()
        scale = divisor(grid["scale"])
        vectors = ungroup(grouped(w, scale) / scale[..., None]).reshape(-1, self.v)
        codes = w.new_empty(len(vectors), self.m, dtype=torch.int32)
        norms = books.square().sum(2)
        step = chunk(books.shape[1], w.device)
        for start in range(0, len(vectors), step):
            rest, part = vectors[start : start + step].clone(), codes[start : start + step]
            chosen: list[Tensor] = []
            for book, norm in zip(books, norms, strict=True):
                part[:, len(chosen)] = at = nearest_one(rest, book, norm)
                chosen.append(embedding(at, book))
                rest -= chosen[-1]
            for i in [*range(self.m)] * SWEEPS if self.m > 1 else []:
                rest += chosen[i]
                part[:, i] = at = nearest_one(rest, books[i], norms[i])
                chosen[i] = embedding(at, books[i])
                rest -= chosen[i]
        codes = codes.reshape(w.shape[0], -1)
        return codes if self.b == 16 else codes.to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        books = grid["codebook"].float()
        at = codes.reshape(-1, self.m).int()
        # Not index_select, whose gradient is summed in another order every time on a GPU.
        vectors = embedding(at[:, 0], books[0])
        for i in range(1, self.m):
            vectors = vectors + embedding(at[:, i], books[i])
        return vectors.view(codes.shape[0], -1)

    def triton_decode(self, at: Any) -> Any:
        total = lang.lookup(at, 0, lang.code(at))
        books: tl.constexpr = self.m
        for book in tl.static_range(1, books):
            total += lang.lookup(at, 0, lang.code(at, book) + (book << self.b))
        return total


def as_codebook(packed: Packed) -> Packed:
    """An integer weight as vectors of a codebook: the same values and scales, in as many bits.

    As many neighbours as fit into 8 bits become one code: 8 of int1, 4 of int2, 2 of int3 and int4.

    Raises:
        InvalidInput: The weight has zero points, an order of columns or another format, which
            codebooks that all rows share cannot hold; or K is not a multiple of the vector.
    """
    fmt, (n, k) = packed.format, packed.shape
    if not isinstance(fmt, Integer) or fmt.zero or fmt.order:
        raise InvalidInput(
            f"{fmt.spec}: only integers without zero points, in the order of columns, are vectors "
            "of one codebook; quantize to int1 ... int8 first"
        )
    v = 8 // fmt.bits
    new = Codebook(m=1, v=v, b=fmt.bits * v, group=fmt.group, uniform=fmt.bits)
    new.check(n, k)
    codes = torch.zeros(n, k // v, dtype=torch.uint8, device=packed.planes[0].device)
    for digit in packed.codes().view(n, -1, v).unbind(-1):
        codes = codes << fmt.bits | digit
    book = new.integers().to(codes.device)
    return Packed.from_codes(new, (n, k), codes, packed.grid | {"codebook": book})
