"""Floating point: fp32 in registers, pairs of fp16 or bf16 in words."""

import numpy as np
import torch

from tests.ptx.integer import MASK, signed
from tests.ptx.parse import Instruction
from tests.ptx.state import Handler, Lanes, State, Warp, Words


def as_f32(x: Words) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def from_f32(x: np.ndarray) -> Words:
    return np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)


def half_type(op: str) -> torch.dtype:
    return torch.bfloat16 if "bf16" in op else torch.float16


def halves(x: Words, dtype: torch.dtype) -> torch.Tensor:
    """(32,) words -> (64,) numbers, the low half first."""
    return torch.from_numpy(x.astype(np.uint32).view(np.int16).copy()).view(dtype)


def join(x: torch.Tensor) -> Words:
    """The reverse of `halves`; x: (32, 2) or (64,)."""
    return x.view(torch.int16).numpy().reshape(-1).view(np.uint32).astype(np.uint64)


def round_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 numbers as float32, rounded once.

    The sum is rounded to odd first (Boldo and Melquiond 2008): 53 bits are enough for 24 then.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    odd = np.ascontiguousarray(total).view(np.int64) & 1 != 0
    move = (error != 0) & ~odd & np.isfinite(total)
    return np.where(move, np.nextafter(total, np.sign(error) * np.inf), total).astype(np.float32)


def single(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """add, sub, mul, fma of fp32; subnormal numbers count, as in hardware without .ftz."""
    a = [as_f32(s.read(w, name)).astype(np.float64) for name in i.args[1:]]
    with np.errstate(over="ignore", invalid="ignore"):
        if i.op.startswith("fma"):
            r = round_f32(a[0] * a[1], a[2])
        else:  # twice 24 bits and two more: rounding to 53 bits first changes nothing
            b = -a[1] if i.op.startswith("sub") else a[1]
            r = (a[0] * b if i.op.startswith("mul") else a[0] + b).astype(np.float32)
    s.write(w, i.args[0], from_f32(r), active)


def pair(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """add, mul, fma of two halves; float64 holds every sum that lies near a tie."""
    dtype = half_type(i.op)
    a = [halves(s.read(w, name), dtype).double() for name in i.args[1:]]
    r = a[0] + a[1] if i.op.startswith("add") else a[0] * a[1]
    s.write(w, i.args[0], join((r + a[2] if len(a) > 2 else r).to(dtype)), active)


def of_silu(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """A power of two, or a quotient."""
    a = [as_f32(s.read(w, name)) for name in i.args[1:]]
    with np.errstate(all="ignore"):
        r = np.exp2(a[0]) if i.op.startswith("ex2") else a[0] / a[1]
    s.write(w, i.args[0], from_f32(r.astype(np.float32)), active)


def from_int(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    value = signed(s.read(w, i.args[1]), 32).astype(np.float32)
    s.write(w, i.args[0], from_f32(value), active)


def widen(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    value = halves(s.read(w, i.args[1]) & MASK[16], half_type(i.op))[::2]
    s.write(w, i.args[0], from_f32(value.float().numpy()), active)


def narrow(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """One fp32 number, or two: the first becomes the upper half."""
    values = [torch.from_numpy(as_f32(s.read(w, name))) for name in i.args[:0:-1]]
    values += [torch.zeros(32)] * (2 - len(values))
    s.write(w, i.args[0], join(torch.stack(values, -1).to(half_type(i.op))), active)


HANDLERS: dict[str, Handler] = {
    r"(add|sub|mul|add\.rn|mul\.rn|fma\.rn)\.f32": single,
    r"(add|mul|fma)\.rn\.(bf16x2|f16x2|f16)": pair,
    r"ex2\.approx\.f32|div\.rn\.f32": of_silu,
    r"cvt\.rn\.f32\.s32": from_int,
    r"cvt\.f32\.(bf16|f16)": widen,
    r"cvt\.rn\.(bf16x2|f16x2|bf16|f16)\.f32": narrow,
}
