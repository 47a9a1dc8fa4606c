"""What PTX instructions mean; see `ptx_machine.py`."""

import re
from typing import Any

import numpy as np
import torch

from tests.kernels.ptx_machine import (
    LANES,
    WARP,
    WINDOW,
    Barrier,
    Cta,
    Instruction,
    PtxError,
    Warp,
    on,
)

Machine = Any  # ptx_machine.Machine
MASK = {"8": 0xFF, "16": 0xFFFF, "32": 0xFFFFFFFF, "64": 0xFFFFFFFFFFFFFFFF}


def signed(x: np.ndarray, bits: int) -> np.ndarray:
    x = x & np.uint64(MASK[str(bits)])
    if bits == 64:
        return x.view(np.int64)
    wide = x.astype(np.int64)
    return np.where(wide >> (bits - 1) != 0, wide - (1 << bits), wide)


def as_f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def from_f32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)


def halves(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.uint32).view(np.int16).copy()).view(dtype)


def join(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().reshape(-1).view(np.uint32).astype(np.uint64)


@on(r"(bra|bra\.uni)")
def _bra(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    w.pc[active] = int(i.args[0])


@on(r"ret")
def _ret(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    w.live = w.live & ~active


@on(r"griddepcontrol\..*|fence\..*|prefetch\..*|setmaxnreg\..*|bar\.warp\.sync|wgmma\.fence.*")
def _nothing(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    pass


@on(r"(add|sub|mul\.lo|and|or|xor|shl|shr|min|max|div|rem|neg|not|mad\.lo)\.[subp]\w+")
def _integer(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    name, kind = i.op.rsplit(".", 1)
    bits = 64 if kind.endswith("64") else 16 if kind.endswith("16") else 32
    if kind == "pred":
        bits = 32
    a = [m.read(w, x) for x in i.args[1:]]
    if kind.startswith("s") and name in ("min", "max", "div", "rem", "shr"):
        a = [signed(x, bits) for x in a]
    else:
        a = [x & np.uint64(MASK[str(bits)]) for x in a]
    with np.errstate(over="ignore"):
        if name in ("shl", "shr"):
            n = np.minimum(a[1].astype(np.int64), bits - 1).astype(a[0].dtype)
            r = a[0] << n if name == "shl" else a[0] >> n
        elif name in ("div", "rem"):
            b = np.where(active, a[1], 1)
            if (b == 0).any():
                raise PtxError("division by zero")
            q = np.trunc(a[0] / b).astype(np.int64)  # operands are below 2**53
            r = q if name == "div" else a[0] - q * b
        elif name == "not":
            r = (a[0] == 0) if kind == "pred" else ~a[0]
        else:
            r = {
                "add": lambda: a[0] + a[1],
                "sub": lambda: a[0] - a[1],
                "neg": lambda: np.uint64(0) - a[0],
                "mul.lo": lambda: a[0] * a[1],
                "mad.lo": lambda: a[0] * a[1] + a[2],
                "and": lambda: a[0] & a[1],
                "or": lambda: a[0] | a[1],
                "xor": lambda: a[0] ^ a[1],
                "min": lambda: np.minimum(a[0], a[1]),
                "max": lambda: np.maximum(a[0], a[1]),
            }[name]()
    m.write(w, i.args[0], r.astype(np.uint64) & np.uint64(MASK[str(bits)]), active)


@on(r"mul\.(wide|hi)\.[su]32")
def _wide(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a, b = (m.read(w, x) & np.uint64(MASK["32"]) for x in i.args[1:])
    if ".s" in i.op:
        a, b = signed(a, 32), signed(b, 32)
    product = (a * b).astype(np.uint64)
    m.write(w, i.args[0], product >> np.uint64(32) if ".hi" in i.op else product, active)


@on(r"mul\.hi\.[su](16|32)")
def _high(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    bits = int(i.op[-2:])
    a, b = (m.read(w, x) & np.uint64(MASK[str(bits)]) for x in i.args[1:])
    if ".s" in i.op:
        a, b = signed(a, bits), signed(b, bits)
    high = (a * b >> type(a[0])(bits)).astype(np.uint64) & np.uint64(MASK[str(bits)])
    m.write(w, i.args[0], high, active)


@on(r"shf\.l\.wrap\.b32")
def _shf(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    low, high, n = (m.read(w, x) & np.uint64(MASK["32"]) for x in i.args[1:])
    wide = (high << np.uint64(32) | low) << (n & np.uint64(31))
    m.write(w, i.args[0], wide >> np.uint64(32) & np.uint64(MASK["32"]), active)


@on(r"prmt\.b32")
def _prmt(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a, b, s = (m.read(w, x) & np.uint64(MASK["32"]) for x in i.args[1:])
    both, r = b << np.uint64(32) | a, np.zeros(WARP, np.uint64)
    for at in range(4):
        digit = s >> np.uint64(4 * at)
        byte = both >> (digit & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        r |= np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * at)
    m.write(w, i.args[0], r, active)


@on(r"selp\.\w+")
def _selp(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a, b, p = (m.read(w, x) for x in i.args[1:])
    m.write(w, i.args[0], np.where(p != 0, a, b), active)


@on(r"setp\.(eq|ne|lt|le|gt|ge)\.[sub]\d+")
def _setp(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    _, how, kind = i.op.split(".")
    bits = int(kind[1:])
    a, b = (m.read(w, x) for x in i.args[1:])
    if kind[0] == "s":
        a, b = signed(a, bits), signed(b, bits)
    else:
        a, b = a & np.uint64(MASK[kind[1:]]), b & np.uint64(MASK[kind[1:]])
    r = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[how]
    m.write(w, i.args[0], r, active)


@on(r"mov\.\w+|cvta\..*|cvt\.u64\.u32|cvt\.u32\.u64")
def _mov(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    to, source = i.args
    bits = 16 if i.op.endswith("32") else 32  # of each part of a pair
    mask = np.uint64(MASK[str(bits)])
    if source.startswith("{"):
        low, high = (m.read(w, x.strip()) & mask for x in source[1:-1].split(","))
        m.write(w, to, high << np.uint64(bits) | low, active)
    elif to.startswith("{"):
        value = m.read(w, source)
        low, high = (x.strip() for x in to[1:-1].split(","))
        m.write(w, low, value & mask, active)
        m.write(w, high, value >> np.uint64(bits) & mask, active)
    else:
        value = m.read(w, source)
        m.write(w, to, value & np.uint64(MASK["32"]) if i.op.endswith("b32") else value, active)


@on(r"cvt\.s64\.s32")
def _widen(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    m.write(w, i.args[0], signed(m.read(w, i.args[1]), 32).astype(np.uint64), active)


@on(r"cvt\.rn\.f32\.s32")
def _to_float(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    m.write(w, i.args[0], from_f32(signed(m.read(w, i.args[1]), 32).astype(np.float32)), active)


@on(r"cvt\.f32\.(bf16|f16)")
def _half_to_float(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    dtype = torch.bfloat16 if i.op.endswith("bf16") else torch.float16
    low = halves(m.read(w, i.args[1]) & np.uint64(0xFFFF), dtype)[::2]
    m.write(w, i.args[0], from_f32(low.float().numpy()), active)


@on(r"cvt\.rn\.(bf16x2|f16x2)\.f32")
def _pack(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    dtype = torch.bfloat16 if "bf16" in i.op else torch.float16
    high, low = (as_f32(m.read(w, x)) for x in i.args[1:])
    both = torch.from_numpy(np.stack([low, high], -1)).to(dtype)
    m.write(w, i.args[0], join(both), active)


@on(r"(add|mul|fma)(\.rn)?\.f32")
def _float(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    a = [as_f32(m.read(w, x)).astype(np.float64) for x in i.args[1:]]
    r = a[0] + a[1] if i.op.startswith("add") else a[0] * a[1]
    m.write(w, i.args[0], from_f32(r + a[2] if len(a) > 2 else r), active)


@on(r"(add|mul|fma)\.rn\.(bf16x2|f16x2)")
def _half2(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    dtype = torch.bfloat16 if "bf16" in i.op else torch.float16
    a = [halves(m.read(w, x), dtype).double() for x in i.args[1:]]
    r = a[0] + a[1] if i.op.startswith("add") else a[0] * a[1]
    m.write(w, i.args[0], join((r + a[2] if len(a) > 2 else r).to(dtype)), active)


# Warps and CTAs.


@on(r"shfl\.sync\.idx\.b32")
def _shfl(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    source = int(m.read(w, i.args[2])[0])
    m.write(w, i.args[0], np.full(WARP, m.read(w, i.args[1])[source]), active)


@on(r"elect\.sync")
def _elect(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("elect.sync of a part of a warp")
    lane, predicate = i.args[0].split("|")
    m.write(w, lane, np.zeros(WARP), active)
    m.write(w, predicate, LANES == 0, active)


@on(r"bar\.sync")
def _bar(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> bool:
    if not active.all():
        raise PtxError("bar.sync of a part of a warp")
    name = int(m.read(w, i.args[0])[0])
    need = int(m.read(w, i.args[1])[0]) // WARP if len(i.args) > 1 else len(w.cta.warps)
    state = w.cta.named.setdefault(name, [0, 0])
    generation = state[1]
    state[0] += 1
    if state[0] == need:
        state[0], state[1] = 0, generation + 1
        return True
    w.waiting = lambda: state[1] != generation
    return False


@on(r"barrier\.cluster\.arrive")
def _cluster_arrive(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    w.cluster_arrivals += 1


@on(r"barrier\.cluster\.wait")
def _cluster_wait(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> bool:
    mine = w.cluster_arrivals
    w.waiting = lambda: all(x.cluster_arrivals >= mine for cta in m.ctas for x in cta.warps)
    return False


@on(r"mapa\.shared::cluster\.u32")
def _mapa(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    address, rank = (m.read(w, x) for x in i.args[1:])
    m.write(w, i.args[0], address + (rank + np.uint64(1)) * np.uint64(WINDOW), active)


# mbarriers and copies.


def address(m: Machine, w: Warp, text: str) -> np.ndarray:
    """[register+offset] -> addresses of all lanes."""
    base, _, offset = text.strip("[]").replace(" ", "").partition("+")
    with np.errstate(over="ignore"):
        return m.read(w, base) + np.uint64(int(offset or 0) & (1 << 64) - 1)


def one(m: Machine, w: Warp, name: str, active: np.ndarray) -> int:
    return int(m.read(w, name)[active][0])


@on(r"mbarrier\.init\.shared\.b64")
def _mb_init(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    count = m.read(w, i.args[1])
    for lane in np.flatnonzero(active):
        at = int(address(m, w, i.args[0])[lane])
        w.cta.barriers[at] = Barrier(int(count[lane]), int(count[lane]))


@on(r"mbarrier\.arrive\.expect_tx\.shared\.b64")
def _mb_expect(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    for lane in np.flatnonzero(active):
        b = m.barrier(w.cta, int(address(m, w, i.args[1])[lane]))
        b.bytes += int(m.read(w, i.args[2])[lane])
        b.pending -= 1
        b.check()


@on(r"mbarrier\.arrive\.shared(::cluster)?\.b64")
def _mb_arrive(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    for lane in np.flatnonzero(active):
        b = m.barrier(w.cta, int(address(m, w, i.args[1])[lane]))
        b.pending -= int(m.read(w, i.args[2])[lane]) if len(i.args) > 2 else 1
        b.check()


@on(r"mbarrier\.try_wait\.parity\.shared\.b64")
def _mb_wait(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> bool:
    barrier = m.barrier(w.cta, int(address(m, w, i.args[1])[active][0]))
    parity = one(m, w, i.args[2], active)
    done = barrier.phase != parity
    m.write(w, i.args[0], np.full(WARP, done), active)
    if not done:
        w.waiting = lambda: barrier.phase != parity
    return done


def land(m: Machine, ctas: list[Cta], to: int, mbar: int, pieces: list) -> None:
    """Asynchronously: bytes to shared memory, then to the barrier's count."""

    def work() -> None:
        for cta in ctas:
            for offset, data in pieces:
                m.shared_at(cta, to + offset, 16)  # checks
                cta.shared[to + offset : to + offset + len(data)] = data
            b = m.barrier(cta, mbar)
            b.bytes -= sum(len(d) for _, d in pieces)
            b.check()

    m.later.append(work)


@on(r"cp\.async\.bulk\.shared::cluster\.global\..*")
def _bulk(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    where = [address(m, w, i.args[n]) for n in (0, 1, 3)]
    for lane in np.flatnonzero(active):  # each starts its own
        to, source, mbar = (int(a[lane]) for a in where)
        size = int(m.read(w, i.args[2])[lane])
        if to % 16 or source % 16 or size % 16:
            raise PtxError("an unaligned bulk copy")
        land(m, [w.cta], to, mbar, [(0, m.global_at(source, size).copy())])


@on(r"cp\.async\.cg\.shared\.global")
def _copy(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    to, source, size = address(m, w, i.args[0]), address(m, w, i.args[1]), int(i.args[2])
    for lane in np.flatnonzero(active):
        w.copies.append((int(to[lane]), m.global_at(int(source[lane]), size).copy()))


@on(r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64")
def _copied(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    copies, mbar = w.copies, int(address(m, w, i.args[0])[active][0])
    w.copies = []

    def work() -> None:
        for to, data in copies:
            m.shared_at(w.cta, to, len(data))[:] = data
        b = m.barrier(w.cta, mbar)
        b.pending -= int(active.sum())
        b.check()

    m.later.append(work)


@on(r"cp\.async\.bulk\.tensor\.2d\..*")
def _tensor(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if active.sum() != 1:
        raise PtxError("a tensor copy of several threads")
    to = int(address(m, w, i.args[0])[active][0])
    name, column, row = re.findall(r"[%\w.]+", i.args[1])
    tensor = m.values[m.parameters[one(m, w, name, active)]]
    column = int(signed(m.read(w, column), 32)[active][0]) * tensor.element
    row = int(signed(m.read(w, row), 32)[active][0])
    mbar = int(address(m, w, i.args[2])[active][0])
    ctas = [w.cta]
    if "multicast" in i.op:
        mask = one(m, w, i.args[3], active)
        ctas = [cta for cta in m.ctas if mask >> cta.rank & 1]
    if to % 1024:
        raise PtxError("a swizzled tensor copy must start at a multiple of 1024")
    pieces = []
    for r in range(tensor.box):
        line = np.zeros(128, np.uint8)
        if 0 <= row + r < len(tensor.rows):
            part = tensor.rows[row + r, column : column + 128]
            line[: len(part)] = part
        for c in range(8):  # 128-byte swizzle: 16-byte chunks trade places by row
            pieces.append((r * 128 + (c ^ (r % 8)) * 16, line[16 * c : 16 * c + 16]))
    land(m, ctas, to, mbar, pieces)


# Loads and stores.


@on(r"ld\.param\.b(32|64)")
def _ld_param(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    value = m.values[i.args[1].strip("[]")]
    m.write(w, i.args[0], np.full(WARP, int(value) & (1 << 64) - 1, np.uint64), active)


@on(r"(ld|st)\.(shared|shared::cluster|global)(\.v[24])?\.[bu](16|32)")
def _memory(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    load = i.op.startswith("ld")
    where, what = (i.args[1], i.args[0]) if load else (i.args[0], i.args[1])
    names = [n.strip() for n in what.strip("{}").split(",")]
    size = 2 if i.op.endswith("16") else 4
    at = address(m, w, where)
    dtype = np.uint16 if size == 2 else np.uint32
    values = np.zeros((WARP, len(names)), np.uint64)
    if not load:
        values = np.stack([m.read(w, n) for n in names], -1)
    for lane in np.flatnonzero(active):
        a = int(at[lane])
        if ".global" in i.op:
            view = m.global_at(a, size * len(names))
        else:
            view = m.shared_at(w.cta, a, size * len(names))
        if load:
            values[lane] = view.view(dtype)
        else:
            view[:] = values[lane].astype(dtype).view(np.uint8)
    if load:
        for n, name in enumerate(names):
            m.write(w, name, values[:, n], active)


@on(r"stmatrix\.sync\.aligned\.m8n8\.x[24]\.trans\.shared\.b16")
def _stmatrix(m: Machine, w: Warp, active: np.ndarray, i: Instruction) -> None:
    if not active.all():
        raise PtxError("stmatrix of a part of a warp")
    at = address(m, w, i.args[0])
    for n, name in enumerate(x.strip() for x in i.args[1].strip("{}").split(",")):
        pairs = m.read(w, name).astype(np.uint32).view(np.uint16).reshape(8, 8)  # row, column
        for row, line in enumerate(pairs.T):
            view = m.shared_at(w.cta, int(at[8 * n + row]), 16)
            view[:] = np.ascontiguousarray(line).view(np.uint8)
