"""Per-token quantization of activations, alone and fused with what comes before it.

One program holds a whole token in registers, so each function reads its input once and writes its
output once. The arithmetic is `kernels/reference.quantize_tokens`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = {"int8": 127, "fp8": 448}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@triton.jit
def _quantize(v, LARGEST: tl.constexpr, CODE: tl.constexpr):
    """A token's values in fp32 -> (codes, scale)."""
    scale = tl.max(tl.abs(v), axis=0) / LARGEST
    scale = tl.where(scale == 0, 1.0, scale)
    q = tl.div_rn(v, scale + v * 0)
    if LARGEST == 127:
        # 1.5 * 2**23 rounds to the nearest integer, ties to even, as torch.round does.
        q = q + 12582912.0 - 12582912.0
        q = tl.minimum(tl.maximum(q, -127.0), 127.0)
    else:
        q = q.to(tl.float8e4nv).to(tl.float32)
    return q.to(CODE), scale


@triton.jit
def quantize(
    x, gate, weight, codes, scales, sums, K, X_STRIDE, GATE_STRIDE, EPS,
    LARGEST: tl.constexpr, FUSE: tl.constexpr, HAS_SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token: x, RMSNorm(x) * weight ("norm") or SiLU(gate) * x ("silu") -> codes, scale, sum."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDE)
    v = tl.load(x + m * X_STRIDE + k, mask=k < K, other=0)
    dtype = v.dtype
    v = v.to(tl.float32)
    if FUSE == "norm":
        v = (v * tl.rsqrt(tl.sum(v * v, axis=0) / K + EPS)).to(dtype).to(tl.float32)
        v = (v * tl.load(weight + k, mask=k < K, other=0).to(tl.float32)).to(dtype).to(tl.float32)
    elif FUSE == "silu":
        g = tl.load(gate + m * GATE_STRIDE + k, mask=k < K, other=0).to(tl.float32)
        g = (g * tl.sigmoid(g)).to(dtype).to(tl.float32)
        v = (g * v).to(dtype).to(tl.float32)
    q, scale = _quantize(v, LARGEST, codes.dtype.element_ty)
    tl.store(codes + m * K + k, q, mask=k < K)
    tl.store(scales + m, scale)
    if HAS_SUMS:
        tl.store(sums + m, tl.sum(q.to(tl.int32), axis=0))


def quantize_tokens(
    x: Tensor, activation: str, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> codes (M, K), scale (M,) fp32.

    dtype: what holds the codes: int8, float8_e4m3fn, or x's own dtype, in which they are exact.
    """
    return _launch(x, activation, dtype)[:2]


def norm_quantize(
    x: Tensor, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm(x) * weight of x (M, K) -> codes (M, K), scale (M,) fp32, sums of int8 codes (M,)."""
    return _launch(x, activation, weight=weight, eps=eps, sums=activation == "int8")


def silu_quantize(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU(gate) * up, both (M, K) -> codes (M, K), scale (M,) fp32, sums of int8 codes (M,)."""
    return _launch(up, activation, gate=gate, sums=activation == "int8")


def _launch(
    x: Tensor,
    activation: str,
    dtype: torch.dtype | None = None,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    codes = torch.empty(m, k, dtype=dtype or CODES[activation], device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    total = torch.empty(m if sums else 0, dtype=torch.int32, device=x.device)
    if m:
        wide = triton.next_power_of_2(k)
        quantize[(m,)](
            x, gate, weight, codes, scale, total, k, x.stride(0), gate.stride(0) if gate is not None
            else 0, eps, LARGEST=LARGEST[activation],
            FUSE="norm" if weight is not None else "silu" if gate is not None else "",
            HAS_SUMS=sums, WIDE=wide, num_warps=max(1, min(16, wide // 512)),
        )  # fmt: skip
    return codes, scale, total
