"""WGMMAs: products of a warpgroup, whose registers are read and written some time later."""

import numpy as np
import torch

from tests.ptx.control import whole
from tests.ptx.floats import as_f32, from_f32
from tests.ptx.integer import MASK, signed
from tests.ptx.mma import OPERANDS, fragment, sum_places
from tests.ptx.parse import Instruction, PtxError, names
from tests.ptx.races import TOGETHER
from tests.ptx.state import Cta, Handler, Lanes, State, Warp

STEP = 32  # bytes of K of one WGMMA


def tile(cta: Cta, descriptor: int, first: int, rows: int) -> np.ndarray:
    """Indices of the bytes (rows, 32) behind a K-major descriptor with 128-byte swizzle."""
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 != 1 or descriptor >> 49 & 7:
        raise PtxError("only the 128-byte swizzle of whole atoms is known")
    row = np.arange(first, first + rows)[:, None]
    linear = start + row // 8 * stride + row % 8 * 128 + np.arange(STEP)
    physical = linear ^ ((linear >> 7 & 7) << 4)
    if physical.min() < 1024 or physical.max() >= len(cta.shared):
        raise PtxError(f"a WGMMA reads shared addresses {physical.min()} to {physical.max()}")
    return physical


def numbers(cta: Cta, at: np.ndarray, kind: str) -> np.ndarray:
    """A tile's bytes as float64."""
    data = torch.from_numpy(np.ascontiguousarray(cta.shared[at]))
    return data.view(OPERANDS[kind][0]).to(torch.float64).numpy()


def multiply(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """This warp's 16 rows of the product."""
    whole(active, "WGMMA")
    n = int(i.op.split("m64n")[1].split("k")[0])
    a_type, b_type = i.op.split(".")[-2:]
    d = names(i.args[0])
    a = names(i.args[1]) if i.args[1].startswith("{") else []
    adds = s.read(w, i.args[3]) != 0
    if adds.any() != adds.all():
        raise PtxError("a WGMMA adds to what it finds in some lanes only")
    if any(int(x) != int(k < 2) for k, x in enumerate(i.args[4:])):
        raise PtxError("only plain WGMMAs are known: no negation, no transposition")
    if unfenced := w.touched.intersection([*d, *a]):
        raise PtxError(f"{sorted(unfenced)[0]} was used without a wgmma.fence behind it")
    descriptors = tuple(s.one(w, x, active) for x in i.args[2 if a else 1 : 3])
    agree(w, (id(i), *descriptors))
    tiles = [tile(w.cta, descriptors[-1], 0, n)]
    if not a:
        tiles.append(tile(w.cta, descriptors[0], w.index % 4 * 16, 16))
    words = np.unique(np.concatenate([t[:, ::4].reshape(-1) for t in tiles]) // 4)
    w.cta.shadow.check_proxy(words)
    w.cta.shadow.read(w.place, TOGETHER, words)
    early = [w.registers[x] for x in a] if s.random.random() < 0.5 else None

    def work() -> None:
        del w.reading[: len(a)], w.summing[: len(d)]  # WGMMAs end in the order of their issue
        w.cta.shadow.check_proxy(words)
        w.cta.shadow.read(w.place, TOGETHER, words)
        if a:
            left = fragment(early or [w.registers[x] for x in a], a_type)
        else:
            left = numbers(w.cta, tiles[1], a_type)
        product = left @ numbers(w.cta, tiles[0], b_type).T  # (16, n), exactly
        part = product[sum_places(len(d))]
        old = np.zeros(part.shape, np.uint64)
        if adds.all():
            old = np.stack([w.registers[name] for name in d])
        if ".s32." in i.op:
            total = np.clip(signed(old, 32) + part.astype(np.int64), -(1 << 31), (1 << 31) - 1)
            sums = total.astype(np.uint64) & MASK[32]
        else:
            sums = from_f32(as_f32(old).astype(np.float64) + part)
        w.registers.update(zip(d, sums, strict=True))

    w.reading += a
    w.summing += d
    w.open_group.append(work)


def agree(w: Warp, product: tuple[int, ...]) -> None:
    """The four warps of a warpgroup multiply the same."""
    seen = w.cta.products.setdefault(w.index // 4, [])
    if w.products == len(seen):
        seen.append(product)
    elif seen[w.products] != product:
        raise PtxError("warps of a warpgroup multiply by different descriptors")
    w.products += 1


def fence(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, i.op)
    w.touched.clear()


def commit(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, i.op)
    w.groups.append(w.open_group)
    w.open_group = []


def wait(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, i.op)
    w.retire(int(i.args[0]))


HANDLERS: dict[str, Handler] = {
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\..*": multiply,
    r"wgmma\.fence\.sync\.aligned": fence,
    r"wgmma\.commit_group\.sync\.aligned": commit,
    r"wgmma\.wait_group\.sync\.aligned": wait,
}
