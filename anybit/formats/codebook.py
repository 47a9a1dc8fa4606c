"""Additive codebooks (CodeGEMM and AQLM): a vector of v weights is a sum of m centroids.

Weights are normalized in groups of g columns (g = 0: the whole row), cut into vectors of v
neighbours along K, and every vector becomes m codes of b bits, one into each codebook. v = 1 gives
learned scalar tables, so `codebook:m=1,v=1,b=4,group=64` is a cousin of NF4. Storage is CodeGEMM's
equation 1: b*m/v bits a weight, 16/g for the scales, and the tables.

Here codebooks come from k-means on the weights alone; calibrated ones are a quantizer's work.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from anybit.format import Entry, Format, Grid, grouped, groups_of, register, store_scale, ungroup

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang

SAMPLE = 1 << 16  # vectors that k-means looks at
ROUNDS = 12  # Lloyd iterations for each codebook
SEEDS = 32  # vectors for each centroid that the first centroids are drawn from
SWEEPS = 2  # passes that revisit every codebook after the greedy choice
SCORES = {"cpu": 1 << 19, "cuda": 1 << 27}  # distances at a time: a CPU's stay in its cache


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
        norms = books.square().sum(2)
        step = chunk(books.shape[1], w.device)
        for start in range(0, len(vectors), step):
            rest, part = vectors[start : start + step].clone(), codes[start : start + step]
            chosen = []
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

    def _vectors(self, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized vectors (N * K / v, v), and the squared scale that each came with."""
        unit = ungroup(grouped(w, scale) / scale.float()[..., None]).reshape(-1, self.v)
        weight = scale.float().square().repeat_interleave(w.shape[1] // scale.shape[1] // self.v, 1)
        return unit, weight.flatten()


def nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """Index (n,) int64 of the centroid (c, v) nearest to each vector (n, v), the first of equals.

    By Euclidean distance, in fp32.
    """
    norm = book.square().sum(1)
    parts = vectors.split(chunk(len(book), vectors.device))
    return torch.cat([nearest_one(part, book, norm) for part in parts])


def nearest_one(vectors: Tensor, book: Tensor, norm: Tensor) -> Tensor:
    """`nearest` for one chunk of vectors; norm: the centroids' squared lengths (c,)."""
    return argmin(torch.addmm(norm, vectors, book.T, alpha=-2))


def argmin(scores: Tensor) -> Tensor:
    """Index of the smallest of each row, int64; the first of equals."""
    if scores.device.type == "cpu":  # 14 times as fast as torch's on rows of 256 in fp32
        return torch.from_numpy(scores.detach().numpy().argmin(-1))
    return scores.argmin(-1)


def chunk(count: int, device: torch.device) -> int:
    """Vectors that are compared with `count` centroids at a time."""
    return max(1, SCORES.get(device.type, SCORES["cuda"]) // count)


def sums_at(at: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums (count, v) of the values (n, v) that share an index; in the same order every time."""
    return torch.ops.aten.embedding_dense_backward(values, at, count, -1, False)


def kmeans(vectors: Tensor, weight: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Weighted k-means: centroids (count, v) of vectors (n, v). Deterministic by the generator."""
    if len(vectors) <= count:  # every vector is its own
        empty = vectors.new_zeros(count - len(vectors), vectors.shape[1])
        return torch.cat((vectors, empty))
    book = vectors[spread(vectors, weight, count, random)]
    weighted = torch.cat((vectors * weight[:, None], weight[:, None]), 1)
    for _ in range(ROUNDS):
        total = sums_at(nearest(vectors, book), weighted, count)
        mass = total[:, -1:]
        book = torch.where(mass == 0, book, total[:, :-1] / mass.clamp_min(1e-30))
    return book


def spread(vectors: Tensor, weight: Tensor, count: int, random: torch.Generator) -> Tensor:
    """First centroids: indices (count,) of vectors that lie far from each other.

    k-means++ (Arthur and Vassilvitskii, 2007): a vector is drawn with a probability in proportion
    to its weighted squared distance from those drawn before. Half as many as there are already are
    drawn at a time, from SEEDS vectors for each centroid.
    """
    sample = torch.randperm(len(vectors), generator=random)[: SEEDS * count].to(vectors.device)
    vectors, weight = vectors[sample], weight[sample]
    drawn = torch.multinomial(weight.cpu(), 1, generator=random)
    fresh, distance = drawn, torch.full_like(weight, torch.inf)
    while len(drawn) < count:
        book = vectors[fresh.to(vectors.device)]
        far = (vectors - book[nearest(vectors, book)]).square().sum(1)
        distance = torch.minimum(distance, far)
        chance = (distance * weight).double().cpu()
        chance[drawn] = 0
        wanted = min(count - len(drawn), max(1, len(drawn) // 2))
        if int((chance > 0).sum()) < wanted:  # the rest repeats vectors drawn already
            chance = torch.ones_like(chance)
            chance[drawn] = 0
        fresh = torch.multinomial(chance, wanted, generator=random)
        drawn = torch.cat((drawn, fresh))
    return sample[drawn.to(sample.device)]
