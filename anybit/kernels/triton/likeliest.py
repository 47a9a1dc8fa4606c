"""The likeliest token of each row of logits, in one pass and one launch."""

import triton
import triton.language as tl
from torch import Tensor, empty, int32

from anybit.kernels.triton.activation import after_previous, launch_next, overlap

# Logits that a program looks at together, its warps, and loads in flight.
WIDE, WARPS, STAGES = 8192, 32, 4


@triton.jit
def _likeliest(
    logits, out, V, STRIDE, INVALID: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    row = logits + tl.program_id(0).to(tl.int64) * STRIDE
    lane = tl.arange(0, WIDE)
    most = tl.full((WIDE,), float("-inf"), tl.float32)
    at = tl.zeros((WIDE,), tl.int32)
    broken = tl.zeros((WIDE,), tl.int32)
    after_previous(PDL)
    for first in tl.range(0, V, WIDE, num_stages=STAGES):
        v = first + lane
        x = tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        broken |= (x != x).to(tl.int32)
        more = x > most
        most, at = tl.where(more, x, most), tl.where(more, v, at)
    largest = tl.max(most, 0)
    token = tl.min(tl.where(most == largest, at, V), 0)
    finite = (tl.abs(largest) < float("inf")) & (tl.max(broken, 0) == 0)
    tl.store(out + tl.program_id(0), tl.where(finite, token, INVALID))


def likeliest(logits: Tensor, invalid: int) -> Tensor:
    """Logits (B, V) -> the token (B,) int32 of the largest, the first of equal ones.

    `invalid` where the largest is infinite, or any is NaN.
    """
    out = empty(len(logits), dtype=int32, device=logits.device)
    if len(logits):
        _likeliest[(len(logits),)](
            logits, out, logits.shape[1], logits.stride(0), INVALID=invalid,
            WIDE=min(WIDE, triton.next_power_of_2(logits.shape[1])), STAGES=STAGES,
            num_warps=WARPS, **overlap(logits.device),
        )  # fmt: skip
    return out
