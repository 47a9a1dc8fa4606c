"""What happens to tokens between two products: residual, RMSNorm, SiLU * up, quantization; fused.

One program holds a whole token in registers, so each function reads its input once and writes its
output once. The arithmetic is `kernels/reference.quantize_tokens`, and every intermediate result is
rounded to the activations' dtype as it is in separate operations.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.core.rotation import block
from anybit.kernels import reference
from anybit.kernels.backend import CODES, Pairs
from anybit.kernels.between import Unturned, finished
from anybit.kernels.triton.lang import INTERPRET, floats, settle
from anybit.kernels.triton.tiles import next_power_of_2

LARGEST = {"int8": 127, "fp8": 448}
BLOCKS = 8  # that a program of one warp rotates; measured on an H200
ALONE = 2048  # blocks, up to which each has a program: instructions take longer than reading
WIDEST = 4096  # columns of a token that one program rotates and quantizes
COLUMNS = 1024  # of a program that multiplies SiLU(gate) and up, or quantizes a part of a token
PROGRAMS = 64  # of that kind are faster than one for each token, or four times as many that rotate
FINER = tl.constexpr(reference.FINER)
NOTHING = (None, None, None)


@triton.jit
def _divided(v, scale):
    """v / scale, correctly rounded: a product and its rest instead of a division for each value."""
    if INTERPRET:  # rounds fused multiply-adds twice
        return tl.div_rn(v, scale + v * 0)
    power = tl.where(scale < 1e-30, 1267650600228229401496703205376.0, 1.0)  # 2**100
    v, scale = v * power, scale * power
    inverse = tl.div_rn(1.0, scale)
    q = v * inverse
    return tl.fma(tl.fma(-q, scale, v), inverse, q)


@triton.jit
def _quantize(v, most, LARGEST: tl.constexpr, CODE: tl.constexpr):
    """A token's values in fp32, and the largest of them -> (codes, scale)."""
    scale = tl.div_rn(most, most * 0 + LARGEST)
    scale = tl.where(scale == 0, 1.0, scale)
    q = _divided(v, scale)
    if LARGEST == 448:
        q = q.to(tl.float8e4nv).to(tl.float32)
    else:
        # 1.5 * 2**23 rounds to the nearest integer, ties to even, as torch.round does, and the
        # lowest byte of the sum is that integer.
        q = tl.minimum(tl.maximum(q, -127.0), 127.0) + 12582912.0
        q = q.to(tl.int32, bitcast=True) if CODE == tl.int8 else q - 12582912.0
    return q.to(CODE), scale


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the next kernel start to launch."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for what the previous kernel has written.

    What is read before that is weights, and what a step is given. Kernels further back may still
    run then, but none of the step before: a step begins with a kernel that waits for all of them
    to end, torch's look-up of embeddings.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _silu(gate, up, dtype):
    g = gate.to(tl.float32)
    g = (g * tl.sigmoid(g)).to(dtype).to(tl.float32)
    return (g * up.to(tl.float32)).to(dtype)


@triton.jit
def _transformed(v, SIZE: tl.constexpr):
    """v (blocks, SIZE) fp32 times Sylvester's Hadamard matrix, normalized.

    That is sums and differences of columns whose numbers differ in one bit, for each bit. A thread
    has neighbouring columns in registers, and the lanes exchange theirs once for the other bits: a
    product with the matrix takes as long on tensor cores as reading it, and 16 blocks at a time.
    """
    ROWS: tl.constexpr = v.shape[0]
    for bit in tl.static_range(7):
        if SIZE >> bit > 1:
            x = tl.reshape(v, (ROWS, SIZE >> bit + 1, 2, 1 << bit))
            a, b = tl.split(tl.permute(x, (0, 1, 3, 2)))
            v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, SIZE))
    return v * (1 / tl.sqrt(SIZE * 1.0))


@triton.jit
def of_columns(turn, bias, k, mask):
    """What `turned` needs of columns k; of no kernel's making. Zeros where there is nothing."""
    t, b = 0.0, 0.0
    if turn is not None:
        t = floats(turn + k, mask)
    if bias is not None:
        b = floats(bias + k, mask)
    return t, b


@triton.jit
def turned(v, turn, bias, numbers, SIZE: tl.constexpr):
    """`Unturned.turned` of columns, whole blocks of SIZE; v as it is where `turn` is None.

    numbers: by `of_columns`.
    """
    if turn is not None:
        dtype = v.dtype
        blocks = tl.reshape(v.to(tl.float32), (v.numel // SIZE, SIZE))
        v = (tl.reshape(_transformed(blocks, SIZE), v.shape) * numbers[0]).to(dtype)
        if bias is not None:
            v = (v.to(tl.float32) + numbers[1]).to(dtype)
    return v


@triton.jit
def _clear(sums, m, here, ROWS):
    """Zero in the sums of rows of tokens m, which have two at most."""
    if sums is not None:
        tl.store(sums + 2 * m, 0, mask=here & (2 * m < ROWS))
        tl.store(sums + 2 * m + 1, 0, mask=here & (2 * m + 1 < ROWS))


@triton.jit
def _rotate(
    x, gate, vector, out, most, sums, x_turn, x_bias, gate_turn, gate_bias, UNITS, ROW, ROWS,
    X_STRIDE, GATE_STRIDE, AFTER: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """H (vector * x), or vector * (H x), of TILE blocks of SIZE columns. A token has ROW.

    gate: x is SiLU(gate) * x. most, sums: as in `_silu_mul`, of blocks. x_turn, ...: of `Unturned`
    outputs, in blocks of SIZE as well.
    """
    launch_next(PDL)
    unit = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    k = (unit % ROW * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    live = (unit < UNITS)[:, None]
    scale = tl.load(vector + k).to(tl.float32)
    of_x, of_gate = of_columns(x_turn, x_bias, k, live), of_columns(gate_turn, gate_bias, k, live)
    after_previous(PDL)
    v = tl.load(x + (unit // ROW * X_STRIDE)[:, None] + k, mask=live, other=0)
    dtype = v.dtype
    v = turned(v, x_turn, x_bias, of_x, SIZE)
    if gate is not None:
        g = tl.load(gate + (unit // ROW * GATE_STRIDE)[:, None] + k, mask=live, other=0)
        v = _silu(turned(g, gate_turn, gate_bias, of_gate, SIZE), v, dtype)
    v = v.to(tl.float32)
    v = _transformed(v, SIZE) * scale if AFTER else _transformed(v * scale, SIZE)
    at = unit[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    v = v.to(dtype)
    tl.store(out + at, v, mask=live)
    if most is not None:
        tl.store(most + unit, tl.max(tl.abs(v.to(tl.float32)), axis=1), mask=unit < UNITS)
        _clear(sums, unit // ROW, (unit % ROW == 0) & (unit < UNITS), ROWS)


@triton.jit(do_not_specialize=["pairs"])
def _token(
    x, other, weight, vector, out, scales, sums, residual, pairs, most, x_turn, x_bias, other_turn,
    other_bias, K, X_STRIDE, OTHER_STRIDE, EPS, LARGEST: tl.constexpr, FUSE: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TURN: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row of a token: x, RMSNorm(x + other) * weight ("norm") or SiLU(other) * x ("silu").

    SIZE > 0: then rotated, in blocks of that size. LARGEST > 0: quantized to codes, scale and sum;
    0: stored as it is. pairs: how many tokens have two rows of codes, the other for what the first
    has rounded off; see `backend.Pairs`. residual: gets x + other. MOST > 0: WIDE columns of the
    row, whose largest value is one of MOST of its token, and whose sum is added to that of others.
    x_turn, ...: of `Unturned` outputs, in blocks of TURN.
    """
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    m, second = row, False
    if pairs is not None:  # of no kernel's making
        two = tl.load(pairs)
        m = row - tl.minimum((row + 1) // 2, two)
        second = (row < 2 * two) & (row % 2 == 1)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    w = k
    if FUSE == "norm":  # from memory, and of no other kernel's making
        w = tl.load(weight + k, mask=k < K, other=0)
    of_x = of_columns(x_turn, x_bias, k, k < K)
    of_other = of_columns(other_turn, other_bias, k, k < K)
    after_previous(PDL)
    v = tl.load(x + m * X_STRIDE + k, mask=k < K, other=0)
    dtype = v.dtype
    v = turned(v, x_turn, x_bias, of_x, TURN)
    if FUSE == "silu":
        g = tl.load(other + m * OTHER_STRIDE + k, mask=k < K, other=0)
        v = _silu(turned(g, other_turn, other_bias, of_other, TURN), v, dtype)
    v = v.to(tl.float32)
    if FUSE == "norm":
        if other is not None:
            d = tl.load(other + m * OTHER_STRIDE + k, mask=k < K, other=0)
            d = turned(d, other_turn, other_bias, of_other, TURN)
            v = (v + d.to(tl.float32)).to(dtype)
            tl.store(residual + m * K + k, v, mask=k < K)
            v = v.to(tl.float32)
        v = (v * tl.rsqrt(tl.sum(v * v, axis=0) / K + EPS)).to(dtype).to(tl.float32)
        v = (v * w.to(tl.float32)).to(dtype).to(tl.float32)
    if SIZE > 0:
        v = v * floats(vector + k, k < K)
        blocks = tl.reshape(v, (WIDE // SIZE, SIZE))
        v = tl.reshape(_transformed(blocks, SIZE), (WIDE,))
        v = v.to(dtype).to(tl.float32)
    if LARGEST == 0:
        tl.store(out + m * K + k, v.to(dtype), mask=k < K)
    else:
        if MOST > 0:
            each = tl.arange(0, triton.next_power_of_2(MOST))
            largest = tl.max(tl.load(most + m * MOST + each, mask=each < MOST, other=0), axis=0)
        else:
            largest = tl.max(tl.abs(v), axis=0)
        q, scale = _quantize(v, largest, LARGEST, out.dtype.element_ty)
        if pairs is not None:
            rest = (_divided(v, scale) - q.to(tl.float32)) * FINER + 12582912.0 - 12582912.0
            rest = tl.minimum(tl.maximum(rest, -127.0), 127.0).to(out.dtype.element_ty)
            q, scale = tl.where(second, rest, q), tl.where(second, scale / FINER, scale)
        tl.store(out + row * K + k, q, mask=k < K)
        tl.store(scales + row, scale)  # by all programs of a row, if there are several
        if sums is not None:
            total = tl.sum(q.to(tl.int32), axis=0)
            if MOST > 0:
                tl.atomic_add(sums + row, total, sem="relaxed")
            else:
                tl.store(sums + row, total)


@triton.jit
def _silu_mul(
    gate,
    up,
    out,
    most,
    sums,
    K,
    ROWS,
    GATE_STRIDE,
    UP_STRIDE,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """SiLU(gate) * up for WIDE columns of a token.

    most: gets the largest value of them. sums: begins with zero in ROWS rows, as `_token` adds.
    """
    launch_next(PDL)
    after_previous(PDL)
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    g = tl.load(gate + m * GATE_STRIDE + k, mask=k < K, other=0)
    u = tl.load(up + m * UP_STRIDE + k, mask=k < K, other=0)
    y = _silu(g, u, g.dtype)
    tl.store(out + m * K + k, y, mask=k < K)
    if most is not None:
        at = m * tl.num_programs(1) + tl.program_id(1)
        tl.store(most + at, tl.max(tl.abs(y.to(tl.float32)), axis=0))
        _clear(sums, m, tl.program_id(1) == 0, ROWS)


class Parts(NamedTuple):
    """What is known of tokens (M, K) that several programs quantize, each a part of one.

    Attributes:
        most: (M, parts) fp32, the largest value of each; None: one program has a whole token.
        sums: Of codes, one for each row of them, int32; zero. None: nobody asks for them.
    """

    most: Tensor | None
    sums: Tensor | None

    @property
    def rows(self) -> int:
        return 0 if self.sums is None else len(self.sums)


WHOLE = Parts(None, None)


@triton.jit
def _columns(x, order, out, N, X_STRIDE, WIDE: tl.constexpr, PDL: tl.constexpr):
    """N columns of a token in another order, WIDE of them in a program."""
    launch_next(PDL)
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    k = tl.load(order + n, mask=n < N, other=0)
    after_previous(PDL)
    tl.store(out + m * N + n, tl.load(x + m * X_STRIDE + k, mask=n < N), mask=n < N)


def columns(x: Tensor, order: Tensor) -> Tensor:
    """x (M, K) with columns in another order (N,)."""
    x, n = side_by_side(x), len(order)
    out = x.new_empty(len(x), n)
    if len(x):
        _columns[(len(x), -(-n // COLUMNS))](
            x, order, out, n, x.stride(0), WIDE=COLUMNS, num_warps=4, **overlap(x.device)
        )
    return out


def read(x: Tensor | Unturned) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What kernels take of outputs: numbers as they read them; vector and bias of `Unturned`."""
    y, vector, bias = x if isinstance(x, Unturned) else (x, None, None)
    return side_by_side(y), vector, bias


def rotate(
    x: Tensor | Unturned,
    vector: Tensor,
    after: bool,
    gate: Tensor | Unturned | None = None,
    parts: Parts = WHOLE,
) -> Tensor:
    """`Family.rotate` of tokens (M, K), or of SiLU(gate) * x."""
    x, *x_turn = read(x)
    gate, *gate_turn = NOTHING if gate is None else read(gate)
    m, k = x.shape
    size = block(k)
    strides = x.stride(0), 0 if gate is None else gate.stride(0)
    out = x.new_empty(m, k)
    units = m * (k // size)
    tile = 1 if units <= ALONE else BLOCKS
    if units:
        _rotate[(-(-units // tile),)](
            x,
            gate,
            vector,
            out,
            *parts,
            *x_turn,
            *gate_turn,
            units,
            k // size,
            parts.rows,
            *strides,
            AFTER=after,
            SIZE=size,
            TILE=tile,
            num_warps=1,
            **overlap(x.device),
            enable_fp_fusion=False,  # or a token's bits would depend on the tile
        )
    return out


def quantize(
    x: Tensor | Unturned,
    activation: str,
    dtype: torch.dtype | None = None,
    gate: Tensor | Unturned | None = None,
    norm: tuple[Tensor | Unturned | None, Tensor, float] | None = None,
    sums: bool = False,
    vector: Tensor | None = None,
    pairs: Pairs | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (M, K), or what comes of it -> codes (M, K), scale (M,) fp32, sums (M,) int32, residual.

    pairs: which tokens get a second row of int8 codes; M is the number of its rows then.

    gate (M, K): SiLU(gate) * x. norm: (delta, weight (K,), epsilon) for RMSNorm(x + delta) *
    weight; the residual is x + delta, or x where delta is None. sums: whether to add up the codes.
    dtype: what holds them: int8, float8_e4m3fn, or x's own, in which they are exact. vector (K,):
    of a rotation before that.
    """
    m, k = (y := x.y if isinstance(x, Unturned) else x).shape
    rows = pairs.rows if pairs else m
    out = y.new_empty(rows, k, dtype=dtype or CODES[activation])
    scale = y.new_empty(rows, dtype=torch.float32)
    total = y.new_empty(rows if sums else 0, dtype=torch.int32)
    residual, parts = None, Parts(None, total if sums else None)
    few = m * -(-k // COLUMNS) <= (PROGRAMS if vector is None else 4 * PROGRAMS)
    if k > WIDEST and (vector is not None or (gate is not None and few)):
        if norm is not None:
            x, residual = add_norm(y, *norm)
        if few:
            columns = COLUMNS if vector is None else block(k)
            most = y.new_empty(m, -(-k // columns), dtype=torch.float32)
            parts = parts._replace(most=most)
        if vector is not None:
            x = rotate(x, vector, False, gate, parts)
        elif gate is not None:
            x = silu_mul(finished(gate), finished(x), parts)
        gate = norm = vector = None
    own = _launch(x, out, LARGEST[activation], gate, norm, scale, vector, pairs, parts)
    return out, scale, total, own if residual is None else residual


def add_norm(
    x: Tensor, delta: Tensor | Unturned | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + delta) * weight and x + delta, all (M, K); without a delta, of x."""
    out = x.new_empty(x.shape)
    return out, _launch(x, out, norm=(delta, weight, eps))


def silu_mul(gate: Tensor, up: Tensor, parts: Parts = WHOLE) -> Tensor:
    """SiLU(gate) * up, both (M, K)."""
    m, k = up.shape
    gate, up = side_by_side(gate), side_by_side(up)
    out = up.new_empty(m, k)
    if m:
        _silu_mul[(m, -(-k // COLUMNS))](
            gate,
            up,
            out,
            *parts,
            k,
            parts.rows,
            gate.stride(0),
            up.stride(0),
            WIDE=COLUMNS,
            num_warps=4,
            **overlap(up.device),
        )
    return out


def _launch(
    x: Tensor | Unturned,
    out: Tensor,
    largest: int = 0,
    gate: Tensor | Unturned | None = None,
    norm: tuple[Tensor | Unturned | None, Tensor, float] | None = None,
    scale: Tensor | None = None,
    vector: Tensor | None = None,
    pairs: Pairs | None = None,
    parts: Parts = WHOLE,
) -> Tensor:
    """Run `_token`; the residual."""
    delta, weight, eps = norm or (None, None, 0.0)
    other = gate if norm is None else delta
    x, *x_turn = read(x)
    other, *other_turn = NOTHING if other is None else read(other)
    m, k = x.shape
    residual = x if delta is None else x.new_empty(m, k)
    count = 0 if parts.most is None else parts.most.shape[1]
    wide, size = COLUMNS if count else next_power_of_2(k), 0 if vector is None else block(k)
    if m:
        _token[(len(out), -(-k // wide))](
            x, other, weight, vector, out, scale, parts.sums, residual,
            None if pairs is None else pairs.count, parts.most, *x_turn, *other_turn, k,
            x.stride(0), 0 if other is None else other.stride(0), eps, LARGEST=largest,
            FUSE="norm" if norm is not None else "silu" if gate is not None else "", WIDE=wide,
            SIZE=size, TURN=block(k), MOST=count, num_warps=warps(wide), **overlap(x.device),
        )  # fmt: skip
    return residual


def warps(columns: int) -> int:
    """Of a program that holds so many columns of a token."""
    return max(1, min(32, columns // 256))


def side_by_side(x: Tensor) -> Tensor:
    """x, or a copy with a token's values next to each other, as the kernels read them."""
    return x if x.stride(1) == 1 else x.contiguous()


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch options: on Hopper and later, a kernel is launched while the previous one ends."""
    nvidia = device.type == "cuda" and not torch.version.hip
    if nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


settle(globals())
