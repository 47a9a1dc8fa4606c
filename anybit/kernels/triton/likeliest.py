"""A token of each row of logits, the likeliest or by a race: many programs, then one for a row."""

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32

from anybit.kernels import races
from anybit.kernels.triton.activation import after_previous, launch_next, overlap
from anybit.kernels.triton.lang import settle
from anybit.kernels.triton.tiles import next_power_of_2

GOLDEN, (FIRST, SECOND) = tl.constexpr(races.GOLDEN), map(tl.constexpr, races.FACTORS)
WIDE, WARPS = 4096, 4  # logits of a program: one program for a row of 128,256 took 11 us


@triton.jit
def _waited(v, first, second):
    """The logarithm of `races.waits` of tokens v, for a row's two keys."""
    bits = v * GOLDEN
    for i in tl.static_range(2):
        bits = bits ^ (first if i == 0 else second)
        bits = bits ^ (bits >> 16 & 0xFFFF)
        bits = bits * FIRST
        bits = bits ^ (bits >> 13 & 0x7FFFF)
        bits = bits * SECOND
        bits = bits ^ (bits >> 16 & 0xFFFF)
    u = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 0.9999999403953552)
    near = 0.25 + u * (0.2 + u * (0.16666667 + u * (0.14285715 + u * 0.125)))
    near = u * (1 + u * (0.5 + u * (0.33333334 + u * near)))  # -log(1 - u) where that is inexact
    return tl.log(tl.where(u < 0.0625, near, -tl.log(1 - u)))


@triton.jit
def _largest(
    logits,
    best,
    temperature,
    least,
    keys,
    largest,
    tokens,
    V,
    STRIDE,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest of WIDE logits of a row, NaN if there is one, and the first place of it.

    keys: logits relative to that of the row's `best` token take part in a race, if they are not
    less than `least` of it.
    """
    launch_next(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = part * WIDE + tl.arange(0, WIDE)
    after_previous(PDL)
    x = tl.load(logits + row * STRIDE + v, mask=v < V, other=float("-inf")).to(tl.float32)
    if keys is not None:
        token = tl.maximum(tl.load(best + row), 0)
        most = tl.load(logits + row * STRIDE + token).to(tl.float32)
        x = (x - most) / tl.load(temperature + row)
        x = tl.where(x < tl.load(least + row), float("-inf"), x)
        x -= _waited(v, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    most = tl.max(x, 0)
    to = row * tl.num_programs(1) + part
    tl.store(tokens + to, tl.min(tl.where(x == most, v, V), 0))
    tl.store(largest + to, tl.where(tl.max((x != x).to(tl.int32), 0) == 0, most, float("nan")))


@triton.jit
def _likeliest(
    largest, tokens, out, PARTS, INVALID: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """The first of the parts' tokens with the largest logit."""
    launch_next(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    after_previous(PDL)
    x = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    token = tl.load(tokens + row * PARTS + part, mask=part < PARTS, other=2147483647)
    most = tl.max(x, 0)
    token = tl.min(tl.where(x == most, token, 2147483647), 0)
    finite = (tl.abs(most) < float("inf")) & (tl.max((x != x).to(tl.int32), 0) == 0)
    tl.store(out + row, tl.where(finite, token, INVALID))


def likeliest(logits: Tensor, invalid: int) -> Tensor:
    """Logits (B, V) -> the token (B,) int32 of the largest, the first of equal ones.

    `invalid` where the largest is infinite, or any is NaN.
    """
    return largest(logits, invalid)


def drawn(logits: Tensor, best: Tensor, temperature: Tensor, least: Tensor, keys: Tensor) -> Tensor:
    """`Family.drawn`, -1 where the largest is infinite, or any is NaN."""
    return largest(logits, -1, best, temperature, least, keys.contiguous())


def largest(logits: Tensor, invalid: int, *race: Tensor) -> Tensor:
    """The token (B,) int32 of the largest logit (B, V), or of who wins. race: as in `_largest`."""
    (rows, vocabulary), device = logits.shape, logits.device
    parts = -(-vocabulary // WIDE)
    values = empty(rows, parts, dtype=float32, device=device)
    tokens = empty(rows, parts, dtype=int32, device=device)
    out = empty(rows, dtype=int32, device=device)
    if rows:
        _largest[(rows, parts)](
            logits,
            *(race or (None,) * 4),
            values,
            tokens,
            vocabulary,
            logits.stride(0),
            WIDE=WIDE,
            num_warps=WARPS,
            **overlap(device),
        )
        _likeliest[(rows,)](
            values,
            tokens,
            out,
            parts,
            INVALID=invalid,
            WIDE=next_power_of_2(parts),
            num_warps=1,
            **overlap(device),
        )
    return out


settle(globals())
