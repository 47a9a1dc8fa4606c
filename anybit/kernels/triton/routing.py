"""What happens to tokens around the products of experts: chosen, sorted, spread, combined.

One launch each; `Family` of `kernels/between.py` has the definitions. Nothing is added atomically,
so results do not change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.backend import CODES, Activations
from anybit.kernels.between import Routing
from anybit.kernels.triton.activation import (
    LARGEST,
    _quantize,
    after_previous,
    launch_next,
    overlap,
    side_by_side,
)
from anybit.kernels.triton.lang import floats, settle
from anybit.kernels.triton.tiles import next_power_of_2

CHOICES = 2048  # that a program of `_sort` looks at in one step
COLUMNS = 1024  # of a program of `_combine` and `_clamped`
FEW = 64  # tokens; so few are spread by a program for each choice


@triton.jit
def _choose(
    logits,
    weight,
    chosen,
    EXPERTS,
    STRIDE,
    TOP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP largest logits of a token, the first of equal ones first, and their softmax."""
    launch_next(PDL)
    after_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    e, place = tl.arange(0, WIDE), tl.arange(0, PLACES)
    left = tl.load(logits + t * STRIDE + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    most = tl.max(left, 0)
    total = tl.sum(tl.exp(left - most), 0)
    won, at = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.int32)
    for j in tl.static_range(TOP):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, e, EXPERTS - 1), 0)  # of NaNs, any that exists
        won = tl.where(place == j, tl.exp(best - most), won)
        at = tl.where(place == j, first, at)
        left = tl.where(e == first, float("-inf"), left)
    if NORMALIZE:
        total = tl.sum(won, 0)
    tl.store(weight + t * TOP + place, won / total, mask=place < TOP)
    tl.store(chosen + t * TOP + place, at, mask=place < TOP)


@triton.jit
def _expert(chosen, i, COUNT, EXPERTS):
    """Experts of choices; EXPERTS where it is none of these, more behind the last choice."""
    expert = tl.load(chosen + i, mask=i < COUNT, other=0).to(tl.int32)
    expert = tl.where((expert < 0) | (expert >= EXPERTS), EXPERTS, expert)
    return tl.where(i < COUNT, expert, EXPERTS + 1)


@triton.jit
def _sort(chosen, starts, rows, owners, COUNT, EXPERTS, TILE: tl.constexpr, PDL: tl.constexpr):
    """A program for each expert, and one for choices of none: count those before, place its own."""
    launch_next(PDL)
    after_previous(PDL)
    e, at = tl.program_id(0), tl.arange(0, TILE)
    before = tl.zeros((TILE,), tl.int32)
    for first in range(0, COUNT, TILE):
        before += (_expert(chosen, first + at, COUNT, EXPERTS) < e).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(starts + e, row)
    for first in range(0, COUNT, TILE):
        mine = (_expert(chosen, first + at, COUNT, EXPERTS) == e).to(tl.int32)
        to = row + tl.cumsum(mine, 0) - 1
        tl.store(rows + first + at, to, mask=mine > 0)
        tl.store(owners + to, e, mask=mine > 0)
        row += tl.sum(mine, 0)


@triton.jit
def _spread(
    x,
    rows,
    starts,
    out,
    scales,
    sums,
    K,
    X_STRIDE,
    EXPERTS,
    TOP: tl.constexpr,
    PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token to the rows of its choices; LARGEST > 0: as codes, with scale and sum."""
    launch_next(PDL)
    after_previous(PDL)
    t, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    v = tl.load(x + t * X_STRIDE + k, mask=k < K, other=0)
    scale, total = 1.0, 0
    if LARGEST > 0:
        v = v.to(tl.float32)
        v, scale = _quantize(v, tl.max(tl.abs(v), axis=0), LARGEST, out.dtype.element_ty)
        if HAS_SUMS:
            total = tl.sum(v.to(tl.int32), 0)
    used = tl.load(starts + EXPERTS)
    for j in range(tl.program_id(1), TOP, PARTS):
        row = tl.load(rows + t * TOP + j).to(tl.int64)
        tl.store(out + row * K + k, v, mask=k < tl.where(row < used, K, 0))
        if LARGEST > 0:
            tl.store(scales + row, scale, mask=row < used)
            if HAS_SUMS:
                tl.store(sums + row, total, mask=row < used)


@triton.jit
def _combine(
    y,
    rows,
    starts,
    weight,
    owners,
    bias,
    out,
    N,
    EXPERTS,
    TOP: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of a token's outputs times their weights, in the order of its choices."""
    launch_next(PDL)
    after_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    used = tl.load(starts + EXPERTS)
    total = tl.zeros((WIDE,), tl.float32)
    for j in tl.static_range(TOP):
        row = tl.load(rows + t * TOP + j).to(tl.int64)
        here = n < tl.where(row < used, N, 0)
        v = floats(y + row * N + n, here)
        if bias is not None:
            expert = tl.load(owners + row).to(tl.int64)
            v += floats(bias + expert * N + n, here)
        total += tl.load(weight + t * TOP + j).to(tl.float32) * v
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _clamped(y, owners, bias, out, N, EXPERTS, ALPHA, LIMIT, WIDE: tl.constexpr, PDL: tl.constexpr):
    """(up + 1) * gate * sigmoid(ALPHA * gate) of outputs (gate, up, gate, up, ...) + bias."""
    launch_next(PDL)
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    gate = floats(y + row * 2 * N + 2 * n, n < N)
    up = floats(y + row * 2 * N + 2 * n + 1, n < N)
    expert = tl.load(owners + row).to(tl.int64)
    here = n < tl.where(expert < EXPERTS, N, 0)
    gate += floats(bias + expert * 2 * N + 2 * n, here)
    up += floats(bias + expert * 2 * N + 2 * n + 1, here)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    v = (up + 1) * (gate * tl.sigmoid(gate * ALPHA))
    tl.store(out + row * N + n, v.to(out.dtype.element_ty), mask=n < N)


def choose(logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`Family.choose`, experts in int32."""
    (tokens, experts), device = logits.shape, logits.device
    weight = torch.empty(tokens, top, dtype=torch.float32, device=device)
    chosen = torch.empty(tokens, top, dtype=torch.int32, device=device)
    logits = side_by_side(logits)
    if tokens:
        _choose[(tokens,)](
            logits,
            weight,
            chosen,
            experts,
            logits.stride(0),
            TOP=top,
            NORMALIZE=normalize,
            WIDE=next_power_of_2(experts),
            PLACES=next_power_of_2(top),
            num_warps=1,
            **overlap(device),
        )
    return weight, chosen


def sort(chosen: Tensor, experts: int) -> Routing:
    """`Family.sort`."""
    device, count = chosen.device, chosen.numel()
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    rows = torch.empty(chosen.shape, dtype=torch.int32, device=device)
    owners = torch.empty(count, dtype=torch.int32, device=device)
    _sort[(experts + 1,)](
        chosen.contiguous(),
        starts,
        rows,
        owners,
        count,
        experts,
        TILE=max(16, min(CHOICES, next_power_of_2(count))),
        num_warps=4,
        **overlap(device),
    )
    return Routing(starts, rows, owners)


def spread(x: Tensor, routing: Routing, activation: str | None = None) -> Tensor | Activations:
    """`Family.spread`, quantized on the way if `activation` says so."""
    starts, rows, _ = routing
    (tokens, k), top, count = x.shape, rows.shape[1], rows.numel()
    sums = activation == "int8"
    x, kind = side_by_side(x), x.dtype if activation is None else CODES[activation]
    out = x.new_empty(count, k, dtype=kind)
    some = count if activation else 0
    scale = x.new_empty(some, dtype=torch.float32)
    total = x.new_empty(count if sums else 0, dtype=torch.int32)
    parts = top if tokens <= FEW else 1
    if tokens:
        wide = next_power_of_2(k)
        _spread[(tokens, parts)](
            x,
            rows,
            starts,
            out,
            scale,
            total,
            k,
            x.stride(0),
            len(starts) - 1,
            TOP=top,
            PARTS=parts,
            LARGEST=LARGEST[activation] if activation else 0,
            HAS_SUMS=sums,
            WIDE=wide,
            num_warps=max(1, min(16, wide // 256)),
            **overlap(x.device),
        )
    return out if activation is None else Activations(out, scale, total, x.dtype)


def combine(y: Tensor, routing: Routing, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`Family.combine`."""
    starts, rows, owners = routing
    (tokens, top), n = rows.shape, y.shape[1]
    y, weight = y.contiguous(), weight.contiguous()
    out = y.new_empty(tokens, n)
    if tokens:
        _combine[(tokens, -(-n // COLUMNS))](
            y,
            rows,
            starts,
            weight,
            owners,
            bias,
            out,
            n,
            len(starts) - 1,
            TOP=top,
            WIDE=COLUMNS,
            num_warps=4,
            **overlap(y.device),
        )
    return out


def clamped(y: Tensor, owners: Tensor, bias: Tensor, alpha: float, limit: float) -> Tensor:
    """`Family.clamped`."""
    m, n = y.shape[0], y.shape[1] // 2
    out = y.new_empty(m, n)
    if m:
        _clamped[(m, -(-n // COLUMNS))](
            y,
            owners,
            bias,
            out,
            n,
            len(bias),
            alpha,
            limit,
            WIDE=COLUMNS,
            num_warps=4,
            **overlap(y.device),
        )
    return out


settle(globals())
