"""Nearest centroids and k-means: what codebooks and their calibration have in common."""

import torch
from torch import Tensor

ROUNDS = 12  # Lloyd iterations for each codebook
SEEDS = 32  # vectors for each centroid that the first centroids are drawn from
SCORES = {"cpu": 1 << 19, "cuda": 1 << 27}  # distances at a time: a CPU's stay in its cache


def nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """Index (n,) int64 of the centroid (c, v) nearest to each vector (n, v), the first of equals.

    By Euclidean distance, in fp32.
    """
    norm = book.square().sum(1)
    parts = torch.split(vectors, chunk(len(book), vectors.device))
    return torch.cat([nearest_one(part, book, norm) for part in parts])


def nearest_one(vectors: Tensor, book: Tensor, norm: Tensor) -> Tensor:
    """`nearest` for one chunk of vectors; norm: the centroids' squared lengths (c,)."""
    return argmin(torch.addmm(norm, vectors, book.T, alpha=-2))


def argmin(scores: Tensor) -> Tensor:
    """Index of the smallest of each row, int64; the first of equals."""
    if scores.device.type == "cpu":  # 14 times as fast as torch's on rows of 256 in fp32
        return torch.from_numpy(scores.detach().numpy().argmin(-1))
    return torch.argmin(scores, -1)


def chunk(count: int, device: torch.device) -> int:
    """Vectors that are compared with `count` centroids at a time."""
    return max(1, SCORES.get(device.type, SCORES["cuda"]) // count)


def sums_at(at: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums (count, v) of the values (n, v) that share an index; in the same order every time."""
    sums: Tensor = torch.ops.aten.embedding_dense_backward(values, at, count, -1, False)
    return sums


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
