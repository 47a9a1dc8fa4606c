"""More PTX instructions: products, shuffles and matrix loads of a warp; see `ptx_machine.py`.

Importing this adds them to the machine.
"""

from typing import Any

import numpy as np
import torch

from tests.kernels.ptx_instructions import (
    MASK,
    address,
    as_f32,
    from_f32,
    join,
    one,
    signed,
)
from tests.kernels.ptx_machine import LANES, WARP, Instruction, PtxError, Warp, on
from tests.kernels.ptx_wgmma import fragment

Machine = Any  # ptx_machine.Machine


def names(text: str) -> list[str]:
    return [x.strip() for x in text.strip("{}").split(",")]


@on(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(\w+)\.\2\.f32")
def _mma(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("mma.sync of a part of a warp")
    kind = i.op.split(".")[-2]
    d, a, b, c = (names(x) for x in i.args)
    left = fragment([m.read(w, x) for x in a], kind)
    # B (k, n) in registers is laid out as A's upper rows, transposed.
    right = fragment([r for x in b for r in (m.read(w, x), np.zeros(WARP, np.uint64))], kind)[:8]
    product = left[:, : 8 * len(b)] @ right[:, : 8 * len(b)].T
    for j, (to, old) in enumerate(zip(d, c, strict=True)):
        part = product[LANES // 4 + 8 * (j // 2), LANES % 4 * 2 + j % 2]
        m.write(w, to, from_f32(as_f32(m.read(w, old)).astype(np.float64) + part), active)


@on(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16")
def _ldmatrix(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("ldmatrix of a part of a warp")
    at = address(m, w, i.args[1])
    for n, to in enumerate(names(i.args[0])):
        rows = [m.shared_at(w.cta, int(at[8 * n + r]), 16).copy().view(np.uint16) for r in range(8)]
        columns = np.stack(rows)  # lane 4 g + t: columns 2t, 2t + 1 of row g
        if ".trans" in i.op:  # rows 2t, 2t + 1 of column g
            columns = np.ascontiguousarray(columns.T)
        m.write(w, to, columns.reshape(-1).view(np.uint32).astype(np.uint64), active)


@on(r"shfl\.sync\.bfly\.b32")
def _butterfly(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("shfl.sync of a part of a warp")
    m.write(w, i.args[0], m.read(w, i.args[1])[LANES ^ one(m, w, i.args[2], active)], active)


@on(r"barrier\.cluster\.arrive\.relaxed")
def _arrive_relaxed(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    w.cluster_arrivals += 1


@on(r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.b32")
def _send(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    to, barrier, value = address(m, w, i.args[0]), address(m, w, i.args[2]), m.read(w, i.args[1])
    for lane in np.flatnonzero(active):
        view = m.shared_at(w.cta, int(to[lane]), 4)
        b = m.barrier(w.cta, int(barrier[lane]))

        def work(view=view, b=b, word=value[lane]) -> None:
            view[:] = np.array([word], np.uint32).view(np.uint8)
            b.bytes -= 4
            b.check()

        m.later.append(work)


@on(r"mbarrier\.try_wait\.parity(\.acquire\.cluster)?\.shared::cta\.b64")
def _wait(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> bool:
    barrier = m.barrier(w.cta, int(address(m, w, i.args[1])[active][0]))
    parity = one(m, w, i.args[2], active)
    done = barrier.phase != parity
    m.write(w, i.args[0], np.full(WARP, done), active)
    if not done:
        w.waiting = lambda: barrier.phase != parity
    return done


@on(r"cvt\.rn\.(f16|bf16)\.f32")
def _round(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    dtype = torch.bfloat16 if "bf16" in i.op else torch.float16
    low = torch.from_numpy(as_f32(m.read(w, i.args[1])).copy()).to(dtype)
    m.write(w, i.args[0], join(torch.stack([low, torch.zeros_like(low)], -1)), active)


@on(r"cvt\.[su](8|16|32)\.([su])(8|16|32)")
def _convert(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    to, source = (part for part in i.op.split(".")[1:])
    value = m.read(w, i.args[1]) & np.uint64(MASK[source[1:]])
    if source[0] == "s":
        value = signed(value, int(source[1:])).astype(np.uint64)
    m.write(w, i.args[0], value & np.uint64(MASK["32" if to[0] == "s" else to[1:]]), active)


@on(r"mul\.wide\.[su]16")
def _wide16(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a, b = (m.read(w, x) & np.uint64(MASK["16"]) for x in i.args[1:])
    if ".s" in i.op:
        a, b = signed(a, 16), signed(b, 16)
    m.write(w, i.args[0], (a * b).astype(np.uint64) & np.uint64(MASK["32"]), active)


@on(r"min\.relu\.s32")
def _min_relu(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a, b = (signed(m.read(w, x), 32) for x in i.args[1:])
    m.write(w, i.args[0], np.maximum(np.minimum(a, b), 0).astype(np.uint64), active)
