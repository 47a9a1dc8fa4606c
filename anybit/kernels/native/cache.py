"""The paged KV cache of a CPU: what its kernels are compiled for, and how tokens get into it."""

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
)  # fmt: skip
from anybit.kernels.native.fused import FLOATS, bits_of, level, threads
from anybit.kernels.native.ir import F32, I8, I32, PTR, Arguments, Function, Value, vec
from anybit.kernels.native.isa import Isa

WRITE = (
    "next", "qkv", "stride", "q", "k", "v", "k_scale", "v_scale", "cos", "sin", "positions",
    "slots", "q_weight", "k_weight", "tokens", "heads", "kv_heads", "block", "eps",
)  # fmt: skip
HEADS = 8  # that a thread writes at once

Planes = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # K, V and their scales


@dataclass(frozen=True)
class Cache:
    """What the kernels are compiled for.

    dtype: of Q, LLVM's name. kind: "model" (the cache has this dtype), "static" (int8 with a scale
    for each channel) or "dynamic" (for each token and head).
    """

    isa: Isa
    dtype: str
    kind: str
    dim: int

    @property
    def stored(self) -> str:
        return self.dtype if self.kind == "model" else I8

    @property
    def lanes(self) -> int:
        """Channels in a vector: of half a head, which RoPE rotates with the other half."""
        count = self.isa.floats
        while self.dim // 2 % count:
            count //= 2
        return count


def refuse(k: Tensor) -> str | None:
    """None when the kernels take a cache like this K (blocks, kv_heads, block_size, head_dim)."""
    if k.dtype not in (*FLOATS, torch.int8):
        return f"the cache is {k.dtype}"
    if k.shape[3] % 16:
        return f"head_dim={k.shape[3]} is no multiple of 16"
    return None


def cache_of(q: Tensor, planes: Planes) -> Cache:
    k, _, scale, _ = planes
    kind = "model" if scale is None else "static" if scale.dim() == 2 else "dynamic"
    return Cache(level(), DTYPES[q.dtype], kind, k.shape[3])


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
    """Store K and V, and return Q (T, heads, D), normed and rotated.

    Args:
        qkv: (T, (heads + 2 kv_heads) * D).
        planes: K and V (blocks, kv_heads, block_size, D), their scales or None.
        rope: cosines and sines (positions, D / 2) fp32.
        positions, slots: (T,); a token whose slot is negative is not stored.
        heads: of Q.
        norms: RMSNorm weights (D,) of Q's and K's heads, and the epsilon.
    """
    k, v, k_scale, v_scale = planes
    _, kv_heads, block, dim = k.shape
    qkv, positions, slots = qkv.contiguous(), positions.int(), slots.int()
    q = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype)
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
                place = (slot // block * kv_heads + mine) * block + slot % block
                self._store(is_v, mine, place)
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
