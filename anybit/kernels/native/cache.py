"""The paged KV cache of a CPU: what its kernels are compiled for, and how tokens get into it.

What int4 means is in `anybit.kernels.kv.int4`, and `_spread` and `_pack` do it in the same order.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.between import Unturned, finished
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.int4 import LEAST_SCALE, MOST
from anybit.kernels.native import build
from anybit.kernels.native.activations import DTYPES
from anybit.kernels.native.floats import (
    BYTES,
    LARGEST,
    int8,
    largest,
    magnitude,
    maximum,
    read,
    root,
    rounded,
    through,
    whole,
)
from anybit.kernels.native.fused import FLOATS, bits_of, level, threads
from anybit.kernels.native.ir import F32, I8, Function, Value, vec
from anybit.kernels.native.isa import Isa
from anybit.kernels.native.rotation import butterfly, transformed

WRITE = (
    "next",
    "qkv",
    "stride",
    "q",
    "k",
    "v",
    "k_scale",
    "v_scale",
    "cos",
    "sin",
    "positions",
    "slots",
    "q_weight",
    "k_weight",
    "tokens",
    "heads",
    "kv_heads",
    "block",
    "eps",
)
HEADS = 8  # that a thread writes at once


@dataclass(frozen=True)
class Cache:
    """What the kernels are compiled for.

    dtype: of Q, LLVM's name. k, v: their kinds (`Numbers.kind`). dim: of a head. groups: of half a
    head in int4.
    """

    isa: Isa
    dtype: str
    k: str
    v: str
    dim: int
    groups: int

    def kind(self, which: str) -> str:
        """Of "k" or "v"."""
        return self.k if which == "k" else self.v

    def stored(self, which: str) -> str:
        return self.dtype if self.kind(which) == "model" else I8

    def row_bytes(self, which: str) -> int:
        """Of a token's head."""
        size = self.dim * BYTES[self.stored(which)]
        return size // 2 if self.kind(which) == "int4" else size

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.dim // 2 // self.groups

    @property
    def lanes(self) -> int:
        """Channels in a vector: of a group in half a head, which RoPE rotates with the other."""
        count = self.isa.floats
        while self.group % count:
            count //= 2
        return count


def refuse(cache: LayerCache) -> str | None:
    """None when the kernels take a cache, or why not."""
    if None in cache.kinds or ("model" in cache.kinds and cache.k.dtype not in FLOATS):
        return f"the cache is {cache.k.dtype}"
    if cache.k.stride(1) != cache.k.shape[2:].numel():
        return "heads do not lie one after the other"
    dim = cache.head_dim
    return f"head_dim={dim} is no multiple of 16" if dim % 16 else None


def cache_of(q: Tensor, cache: LayerCache) -> Cache:
    k, v = cache.kinds
    assert k is not None
    assert v is not None
    return Cache(level(), DTYPES[q.dtype], k, v, cache.head_dim, cache.groups)


def write(
    qkv: Tensor | Unturned,
    cache: LayerCache,
    rope: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
    kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`Family.write`."""
    assert rope is not None
    assert kv is None
    _, kv_heads, block, _ = cache.k.shape
    qkv, positions, slots = finished(qkv).contiguous(), positions.int(), slots.int()
    q = torch.empty(len(qkv), heads, cache.head_dim, dtype=qkv.dtype)
    weight = None if norms is None else DTYPES[norms[0].dtype]
    q_weight, k_weight, eps = (None, None, 0.0) if norms is None else norms
    kernel = write_kernel(cache_of(qkv, cache), weight)
    planes = cache.k, cache.v, cache.k_scale, cache.v_scale
    tensors = q, *planes, *rope, positions, slots, q_weight, k_weight
    kernel(
        (
            0,
            qkv.data_ptr(),
            qkv.stride(0) * qkv.itemsize,
            *map(build.pointer, tensors),
            len(qkv),
            heads,
            kv_heads,
            block,
            bits_of(eps),
        ),
        threads(qkv.numel()),
    )
    return q


@cache
def write_kernel(cache: Cache, weight: str | None) -> build.Kernel:
    """weight: type of the heads' norms; None: there are none."""
    f = _Write(cache, weight).function
    return build.kernel(f)


class _Write:
    """The function under construction."""

    def __init__(self, cache: Cache, weight: str | None):
        self.cache = cache
        self.function = f = Function("write", WRITE, cache.isa)
        dim, lanes, size = cache.dim, cache.lanes, BYTES[cache.dtype]
        self.vectors = range(0, dim, lanes)
        heads, kv_heads = f.number("heads"), f.number("kv_heads")
        all_heads = heads + kv_heads + kv_heads
        self.row = f.allocate(F32, dim)
        total = f.number("tokens") * all_heads
        with (
            f.chunks(HEADS, total) as (first, last),
            f.loop(first, last) as unit,
        ):
            t, head = unit // all_heads, unit % all_heads
            x = f.at("qkv", t * f.number("stride") + head * (dim * size))
            for i in self.vectors:
                f.store(read(cache.dtype, x, i * size, lanes), self.row, 4 * i)
            is_q = head < heads
            with f.when(head < heads + kv_heads):
                if weight is not None:
                    places = f.pointer("q_weight"), f.pointer("k_weight")
                    self._norm(is_q.select(*places), weight)
                position = f.listed("positions", t)
                self._rotate(position * (dim * 2))
                if cache.k == "int4":
                    self._spread()
            with f.when(is_q):
                to = f.at("q", (t * heads + head) * (dim * size))
                for i in self.vectors:
                    f.store(rounded(self._at(i), cache.dtype), to, i * size)
            slot = f.listed("slots", t)
            with f.when(slot >= 0):
                block = f.number("block")
                for which, first in (("k", heads), ("v", heads + kv_heads)):
                    mine = head - first
                    page = slot // block * kv_heads + mine
                    with (
                        f.when(mine >= 0),
                        f.when(mine < kv_heads),
                    ):
                        if cache.kind(which) == "int4":
                            self._pack(which, page, block, slot % block)
                        else:
                            self._store(which, mine, page * block + slot % block)

    def _at(self, i: int) -> Value:
        """Channels from i on."""
        return self.function.load(vec(self.cache.lanes, F32), self.row, 4 * i)

    def _norm(self, weights: Value, weight: str) -> None:
        f, cache = self.function, self.cache
        squares = f.constant(0, vec(cache.lanes, F32))
        for i in self.vectors:
            squares = self._at(i).fma(self._at(i), squares)
        mean = squares.sum() * (1 / cache.dim)
        inverse = 1 // root(mean + f.load(F32, f.address("eps")))
        for i in self.vectors:
            x = through(self._at(i) * inverse.splat(cache.lanes), weight)
            x = x * read(weight, weights, i * BYTES[weight], cache.lanes)
            x = through(through(x, weight), cache.dtype)
            f.store(x, self.row, 4 * i)

    def _rotate(self, place: Value) -> None:
        """place: bytes before the position's cosines."""
        f, cache, half = self.function, self.cache, self.cache.dim // 2
        kind = vec(cache.lanes, F32)
        for i in range(0, half, cache.lanes):
            cos, sin = (f.load(kind, n, place + 4 * i) for n in ("cos", "sin"))
            a, b = self._at(i), self._at(half + i)
            for at, x in ((i, a * cos - b * sin), (half + i, b * cos + a * sin)):
                f.store(through(x, cache.dtype), self.row, 4 * at)

    def _spread(self) -> None:
        """Rotate the head by a Hadamard matrix."""
        f, lanes, half = self.function, self.cache.lanes, self.cache.dim // 2
        run = half & -half
        x = transformed([self._at(i) for i in self.vectors], lanes, run)
        for at, value in zip(self.vectors, butterfly(x, half // lanes), strict=True):
            f.store(value * (2 * run) ** -0.5, self.row, 4 * at)

    def _pack(self, which: str, page: Value, block: Value, offset: Value) -> None:
        """Put K or V of a head into a block in int4."""
        f, cache, half = self.function, self.cache, self.cache.dim // 2
        to = f.at(which, (page * block + offset) * half)
        for group in range(cache.groups):
            starts = range(group * cache.group, (group + 1) * cache.group, cache.lanes)
            low, high = (
                self._grid(
                    which, (page * 2 * cache.groups + number) * block + offset, first, starts
                )
                for number, first in ((group, 0), (cache.groups + group, half))
            )
            for i in starts:
                a, b = (
                    whole((self._at(i + first) - low) // scale, 0, MOST)
                    for first, (scale, low) in ((0, low), (half, high))
                )
                f.store((a | (b << 4)).cast("trunc", vec(cache.lanes, I8)), to, i)

    def _grid(self, which: str, row: Value, first: int, starts: range) -> list[Value]:
        """Scale and low of channels from `first` on, as vectors, which are put into their row."""
        f, cache = self.function, self.cache
        least, most = (
            self._largest([self._at(first + i) * sign for i in starts]) for sign in (-1, 1)
        )
        scale = (least + most) // MOST
        scale = maximum(scale, f.constant(LEAST_SCALE, F32))
        numbers = [x.cast("fptrunc", "half") for x in (scale, least * -1)]
        for i, number in enumerate(numbers):
            f.store(number, f"{which}_scale", (row << 2) + 2 * i)
        return [x.cast("fpext", F32).splat(cache.lanes) for x in numbers]

    def _largest(self, vectors: list[Value]) -> Value:
        most = vectors[0]
        for v in vectors[1:]:
            most = maximum(most, v)
        return largest(most)

    def _store(self, which: str, head: Value, place: Value) -> None:
        """Put K or V of a head at `place`, counted in rows of the cache."""
        f, cache, kind = self.function, self.cache, self.cache.kind(which)
        dim, lanes = cache.dim, cache.lanes
        to = f.at(which, place * cache.row_bytes(which))
        if kind == "model":
            for i in self.vectors:
                f.store(rounded(self._at(i), cache.dtype), to, i * BYTES[cache.dtype])
            return
        scales = f.pointer(f"{which}_scale")
        single = vec(lanes, F32)
        if kind == "dynamic":
            most = f.constant(0, single)
            for i in self.vectors:
                most = maximum(most, magnitude(self._at(i)))
            scale = largest(most) // LARGEST
            scale = maximum(scale, f.constant(1e-10, F32))
            f.store(scale, scales, place << 2)
        for i in self.vectors:
            if kind == "dynamic":
                divisor = scale.splat(lanes)
            else:
                divisor = f.load(single, scales, head * (4 * dim) + 4 * i)
            number = int8(self._at(i) // divisor)
            f.store(number, to, i)
