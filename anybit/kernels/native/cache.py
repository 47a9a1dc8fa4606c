"""The paged KV cache of a CPU: what its kernels are compiled for, and how tokens get into it.

What int4 means is in `anybit.engine.int4`, and `_spread` and `_pack` do it in the same order.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.native import build, ir
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
)  # fmt: skip
from anybit.kernels.native.fused import FLOATS, bits_of, level, threads
from anybit.kernels.native.ir import F32, I8, I32, PTR, Arguments, Function, Value, vec
from anybit.kernels.native.isa import Isa

WRITE = (
    "next", "qkv", "stride", "q", "k", "v", "k_scale", "v_scale", "cos", "sin", "positions",
    "slots", "q_weight", "k_weight", "tokens", "heads", "kv_heads", "block", "eps",
)  # fmt: skip
HEADS = 8  # that a thread writes at once
KINDS = {2: "static", 3: "dynamic", 5: "int4"}  # by the dimensions of their scales
K_GROUPS, V_GROUPS = 2, 1  # of a head in int4: its halves, or all of it
MOST, LEAST_SCALE = 15.0, 2.0**-24  # code and scale of int4

Planes = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # K, V and their scales


@dataclass(frozen=True)
class Cache:
    """What the kernels are compiled for.

    dtype: of Q, LLVM's name. kind: "model" (the cache has this dtype), "static" (int8 with a scale
    for each channel), "dynamic" (for each token and head) or "int4". dim: of a head.
    """

    isa: Isa
    dtype: str
    kind: str
    dim: int

    @property
    def stored(self) -> str:
        return self.dtype if self.kind == "model" else I8

    @property
    def row_bytes(self) -> int:
        """Of a token's head."""
        return self.dim // 2 if self.kind == "int4" else self.dim * BYTES[self.stored]

    @property
    def lanes(self) -> int:
        """Channels in a vector: of half a head, which RoPE rotates with the other half."""
        count = self.isa.floats
        while self.dim // 2 % count:
            count //= 2
        return count


def refuse(k: Tensor) -> str | None:
    """None when the kernels take a cache like this K (blocks, kv_heads, block_size, head_dim)."""
    if k.dtype not in (*FLOATS, torch.int8, torch.uint8):
        return f"the cache is {k.dtype}"
    dim = head_dim(k)
    return f"head_dim={dim} is no multiple of 16" if dim % 16 else None


def head_dim(k: Tensor) -> int:
    return k.shape[3] * (2 if k.dtype == torch.uint8 else 1)


def cache_of(q: Tensor, planes: Planes) -> Cache:
    k, _, scale, _ = planes
    kind = "model" if scale is None else KINDS[scale.dim()]
    return Cache(level(), DTYPES[q.dtype], kind, head_dim(k))


def pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def write(
    qkv: Tensor,
    planes: Planes,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Store K and V, and return Q (T, heads, D), normed and rotated: twice for a cache in int4.

    Args:
        qkv: (T, (heads + 2 kv_heads) * D).
        planes: K and V (blocks, kv_heads, block_size, D), their scales or None; see `LayerCache`.
        rope: cosines and sines (positions, D / 2) fp32.
        positions, slots: (T,); a token whose slot is negative is not stored.
        heads: of Q.
        norms: RMSNorm weights (D,) of Q's and K's heads, and the epsilon.
    """
    k, v, k_scale, v_scale = planes
    _, kv_heads, block, _ = k.shape
    qkv, positions, slots = qkv.contiguous(), positions.int(), slots.int()
    q = torch.empty(len(qkv), heads, head_dim(k), dtype=qkv.dtype)
    weight = None if norms is None else DTYPES[norms[0].dtype]
    q_weight, k_weight, eps = (None, None, 0.0) if norms is None else norms
    kernel = write_kernel(cache_of(qkv, planes), weight)
    tensors = q, k, v, k_scale, v_scale, *rope, positions, slots, q_weight, k_weight
    kernel(
        (0, qkv.data_ptr(), qkv.stride(0) * qkv.itemsize, *map(pointer, tensors),
         len(qkv), heads, kv_heads, block, bits_of(eps)),
        threads(qkv.numel()),
    )  # fmt: skip
    return q


@cache
def write_kernel(cache: Cache, weight: str | None) -> build.Kernel:
    """weight: type of the heads' norms; None: there are none."""
    f = _Write(cache, weight).function
    return build.load(ir.module([f]), [f.name], cache.isa)[0]


class _Write:
    """The function under construction."""

    def __init__(self, cache: Cache, weight: str | None):
        self.cache = cache
        self.function = f = Function("write", [PTR])
        self.args = args = Arguments(f, WRITE)
        dim, lanes, size = cache.dim, cache.lanes, BYTES[cache.dtype]
        self.vectors = range(0, dim, lanes)
        heads, kv_heads = args.number("heads"), args.number("kv_heads")
        all_heads = heads + kv_heads + kv_heads
        self.row = f.allocate(F32, dim)
        total = args.number("tokens") * all_heads
        with (
            f.chunks(args.address("next"), f.integer(HEADS), total) as (first, last),
            f.loop(first, last) as unit,
        ):
            t, head = unit // all_heads, unit % all_heads
            x = f.at(args.pointer("qkv"), t * args.number("stride") + head * (dim * size))
            for i in self.vectors:
                f.store(read(f, cache.dtype, x, i * size, lanes), self.row, 4 * i)
            is_q = f.compare("slt", head, heads)
            is_v = f.compare("sge", head, heads + kv_heads)
            with f.when(f.compare("slt", head, heads + kv_heads)):
                if weight is not None:
                    places = args.pointer("q_weight"), args.pointer("k_weight")
                    self._norm(f.select(is_q, *places), weight)
                position = self._token("positions", t)
                self._rotate(position * (dim * 2))
                if cache.kind == "int4":
                    self._spread()
            with f.when(is_q):
                to = f.at(args.pointer("q"), (t * heads + head) * (dim * size))
                for i in self.vectors:
                    f.store(rounded(f, cache.isa, self._at(i), cache.dtype), to, i * size)
            slot = self._token("slots", t)
            with (
                f.when(f.compare("sge", head, heads)),
                f.when(f.compare("sge", slot, f.integer(0))),
            ):
                mine = head - heads
                mine = f.select(is_v, mine - kv_heads, mine)
                block = args.number("block")
                page = slot // block * kv_heads + mine
                if cache.kind == "int4":
                    self._pack(is_v, page, block, slot % block)
                else:
                    self._store(is_v, mine, page * block + slot % block)
        f.give()

    def _token(self, name: str, t: Value) -> Value:
        f = self.function
        return f.cast("sext", f.load(I32, self.args.pointer(name), t << 2), ir.I64)

    def _at(self, i: int) -> Value:
        """Channels from i on."""
        return self.function.load(vec(self.cache.lanes, F32), self.row, 4 * i)

    def _norm(self, weights: Value, weight: str) -> None:
        f, cache = self.function, self.cache
        squares = f.constant(0, vec(cache.lanes, F32))
        for i in self.vectors:
            squares = f.fma(self._at(i), self._at(i), squares)
        mean = f.sum(squares) * (1 / cache.dim)
        inverse = f.constant(1, F32) // root(f, mean + f.load(F32, self.args.address("eps")))
        for i in self.vectors:
            x = through(f, cache.isa, self._at(i) * f.splat(inverse, cache.lanes), weight)
            x = x * read(f, weight, weights, i * BYTES[weight], cache.lanes)
            x = through(f, cache.isa, through(f, cache.isa, x, weight), cache.dtype)
            f.store(x, self.row, 4 * i)

    def _rotate(self, place: Value) -> None:
        """place: bytes before the position's cosines."""
        f, cache, half = self.function, self.cache, self.cache.dim // 2
        kind = vec(cache.lanes, F32)
        for i in range(0, half, cache.lanes):
            cos, sin = (f.load(kind, self.args.pointer(n), place + 4 * i) for n in ("cos", "sin"))
            a, b = self._at(i), self._at(half + i)
            for at, x in ((i, a * cos - b * sin), (half + i, b * cos + a * sin)):
                f.store(through(f, cache.isa, x, cache.dtype), self.row, 4 * at)

    def _spread(self) -> None:
        """Rotate the head by a Hadamard matrix."""
        f, lanes, half = self.function, self.cache.lanes, self.cache.dim // 2
        run, stride = half & -half, 1
        x = [self._at(i) for i in self.vectors]
        while stride < run:
            if stride < lanes:
                signs = Value(f, alternating(f, stride, lanes), vec(lanes, F32))
                partners = [i ^ stride for i in range(lanes)]
                x = [f.fma(v, signs, f.shuffle(v, v, partners)) for v in x]
            else:
                x = butterfly(x, stride // lanes)
            stride *= 2
        for at, value in zip(self.vectors, butterfly(x, half // lanes), strict=True):
            f.store(value * (2 * run) ** -0.5, self.row, 4 * at)

    def _pack(self, is_v: Value, page: Value, block: Value, offset: Value) -> None:
        """Put K or V of a head into a block in int4: K's halves have scales of their own."""
        f, args, cache, half = self.function, self.args, self.cache, self.cache.dim // 2
        starts = range(0, half, cache.lanes)
        least, most = (
            [self._largest([self._at(i + first) * sign for i in starts]) for first in (0, half)]
            for sign in (-1, 1)
        )
        for ends in (least, most):
            both = maximum(f, *ends)
            ends[:] = [f.select(is_v, both, end) for end in ends]
        scales = f.select(is_v, args.pointer("v_scale"), args.pointer("k_scale"))
        groups = f.select(is_v, f.integer(V_GROUPS), f.integer(K_GROUPS))
        grid = []
        for g in range(2):
            scale = (least[g] + most[g]) // f.constant(MOST, F32)
            scale = maximum(f, scale, f.constant(LEAST_SCALE, F32))
            numbers = [f.cast("fptrunc", x, "half") for x in (scale, least[g] * -1)]
            row = (page * groups + (groups - 1 if g else 0)) * block + offset
            for i, number in enumerate(numbers):
                f.store(number, scales, (row << 2) + 2 * i)
            grid.append([f.splat(f.cast("fpext", x, F32), cache.lanes) for x in numbers])
        to = f.select(is_v, args.pointer("v"), args.pointer("k"))
        to = f.at(to, (page * block + offset) * half)
        for i in starts:
            a, b = (
                whole(f, (self._at(i + first) - low) // scale, 0, MOST)
                for first, (scale, low) in zip((0, half), grid, strict=True)
            )
            f.store(f.cast("trunc", a | (b << 4), vec(cache.lanes, I8)), to, i)

    def _largest(self, vectors: list[Value]) -> Value:
        f, most = self.function, vectors[0]
        for v in vectors[1:]:
            most = maximum(f, most, v)
        return largest(f, most)

    def _store(self, is_v: Value, head: Value, place: Value) -> None:
        """Put K or V of a head at `place`, counted in rows of the cache."""
        f, args, cache = self.function, self.args, self.cache
        dim, lanes = cache.dim, cache.lanes
        to = f.select(is_v, args.pointer("v"), args.pointer("k"))
        to = f.at(to, place * (dim * BYTES[cache.stored]))
        if cache.kind == "model":
            for i in self.vectors:
                f.store(rounded(f, cache.isa, self._at(i), cache.dtype), to, i * BYTES[cache.dtype])
            return
        scales = f.select(is_v, args.pointer("v_scale"), args.pointer("k_scale"))
        single = vec(lanes, F32)
        if cache.kind == "dynamic":
            most = f.constant(0, single)
            for i in self.vectors:
                most = maximum(f, most, magnitude(f, self._at(i)))
            scale = largest(f, most) // f.constant(LARGEST, F32)
            scale = maximum(f, scale, f.constant(1e-10, F32))
            f.store(scale, scales, place << 2)
        for i in self.vectors:
            if cache.kind == "dynamic":
                divisor = f.splat(scale, lanes)
            else:
                divisor = f.load(single, scales, head * (4 * dim) + 4 * i)
            number = int8(f, self._at(i) // divisor)
            f.store(number, to, i)


def butterfly(x: list[Value], stride: int) -> list[Value]:
    """Sums of vectors that lie `stride` apart, and their differences."""
    upper = [i // stride % 2 for i in range(len(x))]
    return [x[i - stride] - v if upper[i] else v + x[i + stride] for i, v in enumerate(x)]


def alternating(f: Function, run: int, lanes: int) -> str:
    """1 in `run` lanes, -1 in the next, and so on."""
    numbers = (f.constant(-1 if i & run else 1, F32).text for i in range(lanes))
    return f"<{', '.join(f'float {number}' for number in numbers)}>"
