"""y = x W^T with a dense W and few tokens, for layers that are not quantized.

Reading W is all the time it takes, and cuBLAS leaves some of it: its kernels wait for the previous
kernel before they read anything. Here a program's first rows of W are on their way by then.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.backend import HALVES
from anybit.kernels.triton.activation import after_previous, launch_next, overlap

MOST_TOKENS = 1  # two take cuBLAS less time, on an H200
ROWS, COLUMNS, WARPS = 2, 4096, 4


@triton.jit
def _dense(
    x, w, bias, y, N, K, X_STRIDE, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of M tokens, COLUMNS of K at a time; the next ones are loaded ahead."""
    launch_next(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None]
    ahead = tl.load(at, mask=inside & (k < K)[None, :], other=0)
    after_previous(PDL)
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for first in range(0, K, COLUMNS):
        now = ahead.to(tl.float32)
        following = (k < K - COLUMNS - first)[None, :]
        ahead = tl.load(at + first + COLUMNS, mask=inside & following, other=0)
        new = ()
        for m in tl.static_range(M):
            t = tl.load(x + m * X_STRIDE + first + k, mask=k < K - first, other=0)
            new = new + (sums[m] + now * t.to(tl.float32)[None, :],)
        sums = new
    for m in tl.static_range(M):
        out = tl.sum(sums[m], 1)
        if bias is not None:
            out += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=n < N)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` multiplies these, and fast."""
    few = x.ndim == 2 and 0 < len(x) <= MOST_TOKENS and x.stride(1) == 1
    return few and x.dtype in HALVES and weight.dtype == x.dtype and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K), at most MOST_TOKENS, and weight (N, K) of the same 16-bit dtype -> (M, N)."""
    m, (n, k) = len(x), weight.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    _dense[(-(-n // ROWS),)](
        x, weight, bias, y, n, k, x.stride(0), M=m, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        **overlap(x.device),
    )  # fmt: skip
    return y
