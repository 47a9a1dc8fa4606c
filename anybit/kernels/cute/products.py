"""Products as launches, of every family: outputs, workspace, parameters."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit.kernels.backend import Prepared
from anybit.kernels.cute.counters import zeros
from anybit.kernels.cute.driver import Launcher
from anybit.kernels.cute.operands import cut, offsets, whole


class Launch(NamedTuple):
    """A launch, for all rows of a weight or for some.

    Attributes:
        kernel: What is launched.
        grid: CTAs.
        overlap: Whether it should begin before the kernel before it has ended.
        rows: What it writes of each token, a multiple of 8.
        first: The row where it begins, a multiple of 256.
        skipped: Bytes of the weight before that row.
        work: Numbers of the workspace where sums of CTAs meet; 0: they do not.
        counters: Words for those that have left their sums there.
    """

    kernel: Launcher
    grid: int
    overlap: bool
    rows: int
    first: int = 0
    skipped: int = 0
    work: int = 0
    counters: int = 0


class CodebookLaunch(NamedTuple):
    """A launch of a product with a codebook.

    Attributes:
        kernel: What is launched.
        tokens: That one launch takes.
        grid: CTAs.
        overlap: As in `Launch`, like `work` and `counters`.
        cluster: CTAs of a cluster.
        splits: Clusters that share K.
        shared: Bytes of shared memory, where a launch has a say.
    """

    kernel: Launcher
    tokens: int
    grid: int
    overlap: bool
    cluster: int = 1
    splits: int = 1
    work: int = 0
    counters: int = 0
    shared: int = 0


def on_its_device(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a tensor and more, which launches kernels where the tensor is."""

    @wraps(function)
    def launching(x: Tensor, *args: Any, **more: Any) -> Tensor:
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args, **more)
        with torch.cuda.device(x.device):
            return function(x, *args, **more)

    return launching


def multiply(
    x: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    layout: Sequence[Tensor],
    bias: Tensor | None,
    n: int,
    dtype: torch.dtype,
    launches: Iterable[Launch],
    starts: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """y (M, N) of a product, by launches that each write some of its columns.

    Args:
        x: (M, K) as the tensor core takes it, contiguous.
        scale: (M,) fp32, and `sums` (M,) int32: of quantized activations.
        layout: Blobs, scales of rows, zero points of rows; a table or a codebook, for look-ups.
        bias: (N,), or None.
        n: Outputs of a token, in `dtype`.
        launches: What is launched.
        starts: (experts + 1,) int32: where the tokens of each expert begin.
        pairs: `backend.Pairs.count`, not for experts.
    """
    (m, k), (w, row_scale, row_zero, *table), wide = x.shape, layout, whole(n)
    y = torch.empty(m, wide, dtype=dtype, device=x.device)
    bias = offsets(bias, wide, dtype)
    values = {
        "x": x,
        "table": table[0] if table else None,
        "token_scale": scale,
        "token_sum": sums,
        "starts": starts,
        "pairs": pairs,
        "m": m,
        "k": k,
        "stride": wide,
        "experts": 0 if starts is None else len(starts) - 1,
    }
    for each in launches:
        first = each.first
        work, counters = meeting_place(each, x.device)
        values |= {
            "w": w.data_ptr() + each.skipped,
            "row_scale": row_scale.data_ptr() + 4 * first,
            "row_zero": row_zero.data_ptr() + 4 * first,
            "bias": None if bias is None else bias.data_ptr() + 2 * first,
            "y": y.data_ptr() + 2 * first,
            "work": work,
            "counters": counters,
            "n": each.rows,
        }
        each.kernel.launch(values, each.grid, each.overlap)
    return cut(y, n)


def multiply_codebook(
    x: Tensor, prepared: Prepared, bias: Tensor | None, launch: CodebookLaunch
) -> Tensor:
    """y (M, N) of a product with a codebook.

    Args:
        x: (M, K), contiguous.
        prepared: By `cells.prepare`.
        bias: (N,), or None.
        launch: For `launch.tokens` tokens at a time.
    """
    (m, k), n = x.shape, prepared.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    blocks, row_scale, *books = prepared.layout
    work, counters = meeting_place(launch, x.device)
    bias = offsets(bias, n, x.dtype)
    values = {
        "w": blocks,
        "book": books[x.dtype == torch.bfloat16],
        "row_scale": row_scale,
        "bias": bias,
        "work": work,
        "counters": counters,
        "n": n,
        "k": k,
        "cluster": launch.cluster,
        "splits": launch.splits,
        "early": launch.overlap,
        "shared": launch.shared,
    }
    for some, to in zip(x.split(launch.tokens), y.split(launch.tokens), strict=True):
        values |= {"x": some, "y": to, "m": len(some)}
        launch.kernel.launch(values, launch.grid, launch.overlap)
    return y


def meeting_place(
    launch: Launch | CodebookLaunch, device: torch.device
) -> tuple[Tensor | None, int]:
    """Where sums of CTAs meet, to be kept for the launch, and the address of counters."""
    if not launch.work:
        return None, 0
    work = torch.empty(launch.work, dtype=torch.float32, device=device)
    return work, zeros(launch.counters, device)
