"""The likeliest token of each row of logits: many programs a row, then one that compares theirs."""

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32

from anybit.kernels.triton.activation import after_previous, launch_next, overlap
from anybit.kernels.triton.tiles import next_power_of_2

WIDE, WARPS = 4096, 4  # logits of a program: one program for a row of 128,256 took 11 us


@triton.jit
def _largest(logits, largest, tokens, V, STRIDE, WIDE: tl.constexpr, PDL: tl.constexpr):
    """The largest of WIDE logits of a row, NaN if there is one, and the first place of it."""
    launch_next(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = part * WIDE + tl.arange(0, WIDE)
    after_previous(PDL)
    x = tl.load(logits + row * STRIDE + v, mask=v < V, other=float("-inf")).to(tl.float32)
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
    (rows, vocabulary), device = logits.shape, logits.device
    parts = -(-vocabulary // WIDE)
    largest = empty(rows, parts, dtype=float32, device=device)
    tokens = empty(rows, parts, dtype=int32, device=device)
    out = empty(rows, dtype=int32, device=device)
    if rows:
        _largest[(rows, parts)](
            logits, largest, tokens, vocabulary, logits.stride(0), WIDE=WIDE, num_warps=WARPS,
            **overlap(device),
        )  # fmt: skip
        _likeliest[(rows,)](
            largest, tokens, out, parts, INVALID=invalid, WIDE=next_power_of_2(parts),
            num_warps=1, **overlap(device),
        )  # fmt: skip
    return out
