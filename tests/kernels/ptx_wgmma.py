"""PTX of the matrix unit: WGMMAs, whose registers are read and written some time later.

Importing this adds them to the machine.
"""

from typing import Any

import numpy as np
import torch

from tests.kernels.ptx_instructions import MASK, as_f32, from_f32, signed
from tests.kernels.ptx_machine import LANES, WARP, Instruction, PtxError, Warp, on

Machine = Any  # ptx_machine.Machine


@on(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\..*")
def _wgmma(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("WGMMA of a part of a warp")
    n = int(i.op.split("m64n")[1].split("k")[0])
    a_type, b_type = i.op.split(".")[-2:]
    d = [x.strip() for x in i.args[0].strip("{}").split(",")]
    a = [x.strip() for x in i.args[1].strip("{}").split(",")]
    if (m.read(w, i.args[3]) == 0).any():
        raise PtxError("only accumulating WGMMAs are known")
    descriptor = int(m.read(w, i.args[2])[0])
    registers = [m.read(w, x) for x in a] if m.random.random() < 0.5 else None

    def work() -> None:
        del w.reading[: len(a)]  # WGMMAs end in the order of their issue
        operand = fragment([m.read(w, x) for x in a] if registers is None else registers, a_type)
        b = tile(w.cta.shared, descriptor, n, 32, b_type)
        product = operand @ b.T  # (16, n) of this warp, exactly
        rows, columns = LANES // 4, LANES % 4 * 2
        for j in range(n // 8):
            for c in range(4):
                part = product[rows + 8 * (c // 2), 8 * j + columns + c % 2]
                name = d[4 * j + c]
                old = m.read(w, name)
                if ".s32." in i.op:
                    new = (signed(old, 32) + part.astype(np.int64)).astype(np.uint64)
                    new &= np.uint64(MASK["32"])
                else:
                    new = from_f32(as_f32(old).astype(np.float64) + part)
                m.write(w, name, new, active)

    w.reading += a
    w.open_group.append(work)


def fragment(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """A's registers of a warp -> (16, K) float64: rows g and g + 8, K in two halves."""
    dtype, each = OPERANDS[kind]
    out = np.zeros((16, each * 8))
    for i, register in enumerate(registers):
        raw = torch.from_numpy(register.astype(np.uint32).view(np.uint8).copy()).view(dtype)
        values = raw.to(torch.float64).numpy().reshape(WARP, each)
        for lane in range(WARP):
            column = i // 2 * 4 * each + lane % 4 * each
            out[lane // 4 + 8 * (i % 2), column : column + each] = values[lane]
    return out


def tile(shared: np.ndarray, descriptor: int, n: int, width: int, kind: str) -> np.ndarray:
    """B (n, 32 bytes) behind a K-major descriptor with 128-byte swizzle, as float64."""
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 != 1:
        raise PtxError("only the 128-byte swizzle is known")
    rows = np.arange(n)[:, None]
    linear = start + rows // 8 * stride + rows % 8 * 128 + np.arange(width)
    physical = linear ^ ((linear >> 7 & 7) << 4)
    data = np.ascontiguousarray(shared[physical])
    dtype = OPERANDS[kind][0]
    return torch.from_numpy(data).view(dtype).to(torch.float64).numpy()


OPERANDS = {
    "u8": (torch.uint8, 4),
    "s8": (torch.int8, 4),
    "e4m3": (torch.float8_e4m3fn, 4),
    "f16": (torch.float16, 2),
    "bf16": (torch.bfloat16, 2),
}


@on(r"wgmma\.commit_group\.sync\.aligned")
def _commit(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    w.groups.append(w.open_group)
    w.open_group = []


@on(r"wgmma\.wait_group\.sync\.aligned")
def _wait(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    m.retire(w, int(i.args[0]))
