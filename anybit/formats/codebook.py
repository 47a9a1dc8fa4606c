"""Additive codebooks (CodeGEMM and AQLM): a vector of v weights is a sum of m centroids.

Weights are normalized in groups of g columns (g = 0: the whole row), cut into vectors of v
neighbours along K, and every vector becomes m codes of b bits, one into each codebook. v = 1 gives
learned scalar tables, so `codebook:m=1,v=1,b=4,group=64` is a cousin of NF4. Storage is CodeGEMM's
equation 1: b*m/v bits a weight, 16/g for the scales, and the tables.

Here codebooks come from k-means on the weights alone; calibrated ones are a quantizer's work.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.format import Entry, Format, Grid, grouped, groups_of, register, store_scale, ungroup

SAMPLE = 1 << 16  # vectors that k-means looks at
ROUNDS = 12  # Lloyd iterations for each codebook
SWEEPS = 2  # passes that revisit every codebook after the greedy choice
CHUNK = 1 << 15  # vectors compared with a codebook at a time


@register("codebook")
@dataclass(frozen=True)
class Codebook(Format):
    """(v, m, b, group) in the paper's letters.

    m: codebooks that are added up. v: weights in a vector. b: bits of a code, 1 to 8, or 16.
    group: columns that share a normalization; 0 means the whole row (the paper's g = -1).
    codebook: (m, 2**b, v) centroids in units of the scale.
    """

    m: int = 2
    v: int = 8
    b: int = 8
    group: int = 0

    rowwise = False  # all rows share the codebooks

    def __post_init__(self) -> None:
        if self.m < 1 or self.v < 1 or self.b not in (*range(1, 9), 16):
            raise ValueError(
                f"codebook:m={self.m},v={self.v},b={self.b} is out of range; m and v are at least "
                "1, and b is 1 to 8, or 16"
            )
        if self.group % self.v:
            raise ValueError(f"codebook: group={self.group} is not a multiple of v={self.v}")

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
        scale = store_scale(groups_of(w, self.group).square().mean(-1).sqrt_())
        vectors, weight = self._vectors(w, scale)
        random = torch.Generator().manual_seed(0)  # on the CPU: the same sample on every device
        if len(vectors) > SAMPLE:
            at = torch.randint(len(vectors), (SAMPLE,), generator=random).to(w.device)
            vectors, weight = vectors[at], weight[at]
        books = []
        for _ in range(self.m):
            book = kmeans(vectors, weight, 2**self.b, random).half()
            books.append(book)
            vectors = vectors - book.float()[nearest(vectors, book.float())]
        return {"scale": scale, "codebook": torch.stack(books)}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        """Greedy over the codebooks, then two sweeps that choose each code anew."""
        books = grid["codebook"].float()
        vectors, _ = self._vectors(w, grid["scale"])
        codes = torch.empty(len(vectors), self.m, dtype=torch.int32, device=w.device)
        for start in range(0, len(vectors), CHUNK):
            rest, part = vectors[start : start + CHUNK].clone(), codes[start : start + CHUNK]
            for i, book in enumerate(books):
                part[:, i] = nearest(rest, book)
                rest -= book[part[:, i]]
            for i in [*range(self.m)] * SWEEPS if self.m > 1 else []:
                rest += books[i][part[:, i]]
                part[:, i] = nearest(rest, books[i])
                rest -= books[i][part[:, i]]
        codes = codes.reshape(w.shape[0], -1)
        return codes if self.b == 16 else codes.to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        books = grid["codebook"].float()
        at = codes.reshape(-1, self.m).int()
        vectors = books[0].index_select(0, at[:, 0])
        for i in range(1, self.m):
            vectors += books[i].index_select(0, at[:, i])
        return vectors.view(codes.shape[0], -1)

    def _vectors(self, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized vectors (N * K / v, v), and the squared scale that each came with."""
        unit = ungroup(grouped(w, scale) / scale.float()[..., None]).reshape(-1, self.v)
        weight = scale.float().square().repeat_interleave(w.shape[1] // scale.shape[1] // self.v, 1)
        return unit, weight.flatten()


def nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """Index (n,) of the centroid (c, v) nearest to each vector (n, v), by Euclidean distance."""
    at = [
        torch.addmm(book.square().sum(1), part, book.T, alpha=-2).argmin(1)
        for part in vectors.split(CHUNK)
    ]
    return torch.cat(at).int()


def kmeans(vectors: Tensor, weight: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Weighted k-means: centroids (count, v) of vectors (n, v). Deterministic by the generator."""
    first = torch.randperm(len(vectors), generator=random)[:count].to(vectors.device)
    book = vectors[first]
    if len(book) < count:  # fewer vectors than centroids: every vector is its own
        return torch.cat((book, book.new_zeros(count - len(book), book.shape[1])))
    for _ in range(ROUNDS):
        at = nearest(vectors, book)
        mass = book.new_zeros(count).index_add_(0, at, weight)
        total = torch.zeros_like(book).index_add_(0, at, vectors * weight[:, None])
        empty = mass == 0
        book = torch.where(empty[:, None], book, total / mass.clamp_min(1e-30)[:, None])
    return book
