"""Recurrences from token to token: convolutions, Mamba 2, the gated delta rule, and norms.

A launch for the convolution, and one for the state: heads that share channels of the convolution
would otherwise read its window while another one moves it on. A program of the second keeps its
part of a head's state in registers, for all tokens of a text. The arithmetic is the definitions' in
`kernels/recurrences.py`, rounded where they round.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.recurrences import Convolution, DeltaRule, Scan, StateSpace
from anybit.kernels.scans import Ragged, Ring, Singles
from anybit.kernels.triton.activation import after_previous, launch_next, overlap, side_by_side
from anybit.kernels.triton.lang import floats, settle
from anybit.kernels.triton.tiles import next_power_of_2

CHANNELS = 256  # of a program of `_convolve`
STATE = 2048  # numbers of a state in a program, of 4 warps


@triton.jit
def _sigmoid_times(x):
    return x * tl.sigmoid(x)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where that is small; x itself from 20 on, as in torch."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _text(rows, seen, lengths, starts, to, L):
    """Of a program's text: its number, its row, whether that holds its states, the first of its
    outputs, how many tokens it has, and the row that its states go to. Row 0 is nobody's."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    going = (tl.load(seen + i) > 0) & (row > 0)
    first, count = i * L, L
    if starts is not None:
        first = tl.load(starts + i).to(tl.int64)
        count = tl.load(starts + i + 1) - first.to(tl.int32)
    if lengths is not None:
        count = tl.minimum(tl.load(lengths + i).to(tl.int32), L)
    target = row * 0
    if to is not None:
        target = tl.load(to + i).to(tl.int64)
    return i, row, going, first, tl.where(row > 0, count, 0), target


@triton.jit
def _input(first, t, row, places, i, RING):
    """Where the input t of a text lies: behind its first, or in its row of a ring."""
    at = first + t
    if places is not None:
        at = row * RING + (tl.load(places + i) + t) % RING
    return at


@triton.jit
def _kept(kept, i, TEXTS, which: tl.constexpr):
    """Behind how many tokens a text's states are wanted, too, and the row that gets them."""
    at, row = 0, 0
    if kept is not None:
        at = tl.load(kept + 2 * which * TEXTS + i)
        row = tl.load(kept + (2 * which + 1) * TEXTS + i)
    return at, row


@triton.jit
def _at(x, own, c, live, going, first, t, row, places, i, RING, C, X_STRIDE, K: tl.constexpr):
    """Channels of the token t of a text; of its window, where that is negative."""
    there = _input(first, t, row, places, i, RING)
    v = tl.load(x + there * X_STRIDE + c, mask=live & (t >= 0), other=0)
    return v + tl.load(own + (t + K - 1) * C, mask=live & (t < 0) & going, other=0)


@triton.jit(do_not_specialize=["TEXTS"])
def _convolve(
    x,
    weight,
    bias,
    window,
    rows,
    seen,
    lengths,
    starts,
    places,
    kept,
    to,
    out,
    L,
    RING,
    TEXTS,
    C,
    X_STRIDE,
    K: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of a text: sums over each token and the K - 1 before it; then the window."""
    launch_next(PDL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    live = c < C
    after_previous(PDL)
    i, row, going, first, count, target = _text(rows, seen, lengths, starts, to, L)
    own = window + row * (K - 1) * C + c
    for t in range(count):
        total = tl.zeros((WIDE,), tl.float32)
        for j in tl.static_range(K):
            v = _at(
                x, own, c, live, going, first, t + j - (K - 1), row, places, i, RING, C, X_STRIDE, K
            )
            w = tl.load(weight + c * K + j, mask=live, other=0)
            total += v.to(tl.float32) * w.to(tl.float32)
        if bias is not None:
            total += floats(bias + c, live)
        y = total.to(out.dtype.element_ty)
        if SILU:
            y = _sigmoid_times(y.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + (first + t) * C + c, y, mask=live)
    KEPT: tl.constexpr = 2 if kept is not None else 0
    LAST: tl.constexpr = 1 if to is not None else 0
    for which in tl.static_range(KEPT + LAST):
        at, place = count, target
        if which < KEPT:
            at, place = _kept(kept, i, TEXTS, which)
        for j in tl.static_range(K - 1):  # what is read later lies behind what is written
            v = _at(
                x, own, c, live, going, first, at + j - (K - 1), row, places, i, RING, C, X_STRIDE,
                K,
            )  # fmt: skip
            after = window + (place.to(tl.int64) * (K - 1) + j) * C + c
            tl.store(after, v, mask=live & (place > 0) & (row > 0))


@triton.jit
def _keep(state, s, at, live, SIZE: tl.constexpr, passed, wanted, row):
    """Store a state to a row if so many tokens have passed."""
    if (passed == wanted) & (row > 0):
        tl.store(state + row.to(tl.int64) * SIZE + at, s, mask=live)


@triton.jit(do_not_specialize=["TEXTS"])
def _space(
    mixed,
    dt,
    a,
    d,
    dt_bias,
    state,
    rows,
    seen,
    lengths,
    starts,
    places,
    kept,
    to,
    out,
    L,
    RING,
    TEXTS,
    DT_STRIDE,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE channels of a head of a text, with all their states, of which WIDE is no less."""
    launch_next(PDL)
    PARTS: tl.constexpr = (DIM + TILE - 1) // TILE
    head = tl.program_id(1) // PARTS
    group = head // (HEADS // GROUPS)
    c = tl.program_id(1) % PARTS * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    factor, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    after_previous(PDL)
    i, row, going, first, count, target = _text(rows, seen, lengths, starts, to, L)
    one, place = _kept(kept, i, TEXTS, 0)
    other, other_place = _kept(kept, i, TEXTS, 1)
    at = (head * DIM + c)[:, None] * STATES + n[None, :]
    live = (c < DIM)[:, None] & (n < STATES)[None, :]
    SIZE: tl.constexpr = HEADS * DIM * STATES
    MIXED: tl.constexpr = HEADS * DIM + 2 * GROUPS * STATES
    s = tl.load(state + row * SIZE + at, mask=live & going, other=0)
    for t in range(count):
        token = first + t
        v = mixed + token * MIXED
        x = floats(v + head * DIM + c, c < DIM)
        v += HEADS * DIM + group * STATES
        b = floats(v + n, n < STATES)
        read = floats(v + GROUPS * STATES + n, n < STATES)
        how = dt + _input(first, t, row, places, i, RING) * DT_STRIDE + head
        step = _softplus(tl.load(how).to(tl.float32) + bias)
        s = s * tl.exp(step * factor) + (x * step)[:, None] * b[None, :]
        y = tl.sum(s * read[None, :], 1) + x * skip
        tl.store(out + token * HEADS * DIM + head * DIM + c, y, mask=c < DIM)
        if kept is not None:
            _keep(state, s, at, live, SIZE, t + 1, one, place)
            _keep(state, s, at, live, SIZE, t + 1, other, other_place)
    if to is not None:
        tl.store(state + target * SIZE + at, s, mask=live & (target > 0) & (row > 0))


@triton.jit
def _unit(v):
    return v * tl.rsqrt(tl.sum(v * v, 0) + 1e-6)


@triton.jit(do_not_specialize=["TEXTS"])
def _delta(
    mixed,
    strengths,
    a,
    dt_bias,
    state,
    rows,
    seen,
    lengths,
    starts,
    places,
    kept,
    to,
    out,
    L,
    RING,
    TEXTS,
    S_STRIDE,
    HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE channels of a head of V of a text, with the states of all channels of K."""
    launch_next(PDL)
    PARTS: tl.constexpr = (V_DIM + TILE - 1) // TILE
    head = tl.program_id(1) // PARTS
    v_at = tl.program_id(1) % PARTS * TILE + tl.arange(0, TILE)
    k_at = tl.arange(0, WIDE)
    factor, bias = tl.load(a + head), tl.load(dt_bias + head)
    after_previous(PDL)
    i, row, going, first, count, target = _text(rows, seen, lengths, starts, to, L)
    one, place = _kept(kept, i, TEXTS, 0)
    other, other_place = _kept(kept, i, TEXTS, 1)
    at = (head * DIM + k_at)[:, None] * V_DIM + v_at[None, :]
    live = (k_at < DIM)[:, None] & (v_at < V_DIM)[None, :]
    SIZE: tl.constexpr = V_HEADS * DIM * V_DIM
    MIXED: tl.constexpr = 2 * HEADS * DIM + V_HEADS * V_DIM
    s = tl.load(state + row * SIZE + at, mask=live & going, other=0)
    for t in range(count):
        token = first + t
        own = mixed + token * MIXED + head // (V_HEADS // HEADS) * DIM + k_at
        q = _unit(floats(own, k_at < DIM)) * SCALE
        k = _unit(floats(own + HEADS * DIM, k_at < DIM))
        own = mixed + token * MIXED + 2 * HEADS * DIM + head * V_DIM + v_at
        v = floats(own, v_at < V_DIM)
        how = strengths + _input(first, t, row, places, i, RING) * S_STRIDE + head
        beta = tl.sigmoid(tl.load(how).to(tl.float32))
        step = factor * _softplus(tl.load(how + V_HEADS).to(tl.float32) + bias)
        s = s * tl.exp(step)
        off = v - tl.sum(s * k[:, None], 0)
        s += (beta * k)[:, None] * off[None, :]
        y = tl.sum(s * q[:, None], 0)
        tl.store(out + token * V_HEADS * V_DIM + head * V_DIM + v_at, y, mask=v_at < V_DIM)
        if kept is not None:
            _keep(state, s, at, live, SIZE, t + 1, one, place)
            _keep(state, s, at, live, SIZE, t + 1, other, other_place)
    if to is not None:
        tl.store(state + target * SIZE + at, s, mask=live & (target > 0) & (row > 0))


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    N,
    GATE_STRIDE,
    EPS,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    FIRST: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A group of N channels of a token. SHARED: all groups have the same weight."""
    launch_next(PDL)
    t, group, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    w = 1.0
    if weight is not None:
        own = weight if SHARED else weight + group * N
        w = floats(own + k, k < N)
    after_previous(PDL)
    at = group * N + k
    v = tl.load(x + t * GROUPS * N + at, mask=k < N, other=0)
    by = _sigmoid_times(floats(gate + t * GATE_STRIDE + at, k < N))
    if FIRST:
        v = v * by
    if weight is not None:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / N + EPS) * w
    if not FIRST:
        v = v * by
    tl.store(out + t * GROUPS * N + at, v.to(out.dtype.element_ty), mask=k < N)


Known = Convolution | StateSpace | DeltaRule


def known(scan: Scan) -> TypeGuard[Known]:
    """Whether there are kernels for a recurrence."""
    conv = scan.conv if isinstance(scan, StateSpace | DeltaRule) else scan
    return isinstance(conv, Convolution) and conv.act in (None, F.silu)


def recur(
    scan: Known,
    states: list[Tensor],
    x: Tensor,
    texts: Singles | Ring | Ragged,
    rows: Tensor,
    seen: Tensor,
    to: Tensor | None,
) -> Tensor:
    """`Family.recur` of texts of a few tokens, or known on the device alone."""
    size, device, count, ring = texts.size, x.device, len(rows), 0
    where: list[Tensor | None] = [None] * 4
    if isinstance(texts, Ring):
        ring, x = x.shape[1], x.flatten(0, 1)
        where, tokens = [texts.lengths, None, texts.first, None], count * size
    else:
        x, tokens = side_by_side(x), len(x)
        if isinstance(texts, Ragged):
            where = [None, texts.starts, None, texts.wanted]
    given = (rows, seen, *where, to)
    empty = torch.zeros if isinstance(texts, Ragged) else torch.empty  # padding may be anything
    conv = scan if isinstance(scan, Convolution) else scan.conv
    channels, taps = conv.weight.shape
    mixed = empty(tokens, channels, dtype=x.dtype, device=device)
    _convolve[(count, -(-channels // CHANNELS))](
        x, conv.weight, conv.bias, states[0], *given, mixed, size, ring, count, channels,
        x.stride(0), K=taps, SILU=conv.act is not None, WIDE=CHANNELS, num_warps=4,
        **overlap(device),
    )  # fmt: skip
    if isinstance(scan, Convolution):
        return mixed
    out = empty(tokens, scan.width, dtype=torch.float32, device=device)
    heads = scan.a.numel()
    if isinstance(scan, StateSpace):
        kernel, weights = _space, (scan.a, scan.d, scan.dt_bias)
        sizes = {"HEADS": heads, "GROUPS": len(scan.a), "DIM": scan.dim, "STATES": scan.states}
        wide, dim = next_power_of_2(scan.states), scan.dim
    else:
        kernel, weights = _delta, (scan.a, scan.dt_bias)
        sizes = {"HEADS": scan.heads, "V_HEADS": heads, "DIM": scan.dim, "V_DIM": scan.v_dim}
        sizes["SCALE"] = scan.dim**-0.5
        wide, dim = next_power_of_2(scan.dim), scan.v_dim
    tile = min(next_power_of_2(dim), max(1, STATE // wide))
    kernel[(count, heads * -(-dim // tile))](
        mixed, x[:, channels:], *weights, states[1], *given, out, size, ring, count, x.stride(0),
        TILE=tile, WIDE=wide, num_warps=4, **sizes, **overlap(device),
    )  # fmt: skip
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, gate_first: bool
) -> Tensor:
    """`Family.gated_norm`."""
    tokens, n = len(x), x.shape[1] // groups
    x, gate = x.contiguous(), side_by_side(gate)
    out = x.new_empty(x.shape, dtype=gate.dtype)
    if tokens:
        wide = next_power_of_2(n)
        _gated_norm[(tokens, groups)](
            x,
            gate,
            weight,
            out,
            n,
            gate.stride(0),
            eps,
            GROUPS=groups,
            SHARED=weight is not None and len(weight) < groups,
            FIRST=gate_first,
            WIDE=wide,
            num_warps=max(1, min(16, wide // 256)),
            **overlap(x.device),
        )
    return out


settle(globals())
