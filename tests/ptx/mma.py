"""Matrices of a warp: mma.sync, and their way from and to shared memory."""

from functools import cache

import numpy as np
import torch

from tests.ptx.control import whole
from tests.ptx.floats import as_f32, from_f32
from tests.ptx.integer import MASK, signed
from tests.ptx.memory import view
from tests.ptx.parse import Instruction, names
from tests.ptx.races import TOGETHER
from tests.ptx.state import WARP, Handler, Lanes, State, Warp, Words

OPERANDS = {  # type, and numbers in a register
    "u8": (torch.uint8, 4),
    "s8": (torch.int8, 4),
    "e4m3": (torch.float8_e4m3fn, 4),
    "f16": (torch.float16, 2),
    "bf16": (torch.bfloat16, 2),
}


def fragment(registers: list[Words], kind: str) -> np.ndarray:
    """A's registers of a warp -> (16, K) float64: rows g and g + 8, K in two halves."""
    dtype, each = OPERANDS[kind]
    out = np.zeros((16, each * 8))
    raw = torch.from_numpy(np.stack(registers).astype(np.uint32).view(np.uint8)).view(dtype)
    values = raw.to(torch.float64).numpy().reshape(len(registers), WARP, each)
    out[places(len(registers), each)] = values
    return out


@cache
def places(registers: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the numbers (registers, lanes, each) of A."""
    n, lane, i = np.ogrid[:registers, :WARP, :each]
    return lane // 4 + 8 * (n % 2), n // 2 * 4 * each + lane % 4 * each + i


@cache
def sum_places(registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the sums (registers, lanes) of 16 rows."""
    n, lane = np.ogrid[:registers, :WARP]
    return lane // 4 + 8 * (n // 2 % 2), n // 4 * 8 + lane % 4 * 2 + n % 2


def product(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, "mma.sync")
    sum_kind, a_kind, b_kind = i.op.split(".")[-4:-1]
    d, a, b, c = (names(x) for x in i.args)
    left = fragment([s.read(w, x) for x in a], a_kind)
    # B (k, n) in registers is laid out as A's upper rows, transposed.
    right = fragment([r for x in b for r in (s.read(w, x), np.zeros(WARP, np.uint64))], b_kind)[:8]
    columns = 4 * OPERANDS[b_kind][1] * len(b)
    sums = left[:, :columns] @ right[:, :columns].T
    part, old = sums[sum_places(len(d))], np.stack([s.read(w, name) for name in c])
    if sum_kind == "s32":  # wraps, without .satfinite
        total = (signed(old, 32) + part.astype(np.int64)).astype(np.uint64) & MASK[32]
    else:
        total = from_f32(as_f32(old).astype(np.float64) + part)
    for to, value in zip(d, total, strict=True):
        s.write(w, to, value, active)


def transpose(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """movmatrix: an 8x8 matrix of 16-bit numbers, two of a row in each lane."""
    whole(active, "movmatrix")
    rows = s.read(w, i.args[1]).astype(np.uint32).view(np.uint16).reshape(8, 8)
    columns = np.ascontiguousarray(rows.T).reshape(-1)
    s.write(w, i.args[0], columns.view(np.uint32).astype(np.uint64), active)


def load(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """ldmatrix: lane 4 g + t gets columns 2t, 2t + 1 of row g; transposed, rows of column g."""
    whole(active, "ldmatrix")
    registers = names(i.args[0])
    at = s.address(w, i.args[1]).astype(np.int64)[: 8 * len(registers)]
    bytes_at, words = view(w.cta, at, 16)
    w.cta.shadow.read(w.place, TOGETHER, words)
    rows = w.cta.shared[bytes_at].view(np.uint16).reshape(len(registers), 8, 8)
    for matrix, to in zip(rows, registers, strict=True):
        mine = np.ascontiguousarray(matrix.T if ".trans" in i.op else matrix)
        s.write(w, to, mine.reshape(-1).view(np.uint32).astype(np.uint64), active)


def store(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """stmatrix, transposed."""
    whole(active, "stmatrix")
    registers = names(i.args[1])
    at = s.address(w, i.args[0]).astype(np.int64)[: 8 * len(registers)]
    bytes_at, words = view(w.cta, at, 16)
    w.cta.shadow.write(w.place, TOGETHER, words)
    pairs = np.stack([s.read(w, name).astype(np.uint32) for name in registers]).view(np.uint16)
    lines = np.ascontiguousarray(pairs.reshape(-1, 8, 8).transpose(0, 2, 1))
    w.cta.shared[bytes_at] = lines.reshape(-1, 8).view(np.uint8)


HANDLERS: dict[str, Handler] = {
    r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(b?f16)\.\2\.f32": product,
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.(s32\.u8\.s8\.s32|f32\.e4m3\.e4m3\.f32)": product,
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": transpose,
    r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16": load,
    r"stmatrix\.sync\.aligned\.m8n8\.x[24]\.trans\.shared\.b16": store,
}
