"""Loads and stores of threads."""

from collections.abc import Iterator

import numpy as np

from tests.ptx.parse import Instruction, PtxError, names
from tests.ptx.state import SHARED_BASE, WARP, WINDOW, Cta, Handler, Lanes, State, Warp, Words


def parameter(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    value = s.values[i.args[1].strip("[]")]
    if not isinstance(value, int):
        raise PtxError("a tensor map is loaded as a number")
    s.write(w, i.args[0], np.full(WARP, value & (1 << 64) - 1, np.uint64), active)


def windows(s: State, w: Warp, at: Words, active: Lanes) -> Iterator[tuple[Cta, np.ndarray, Words]]:
    """(CTA, lanes, their addresses in its window) for every CTA that lanes name."""
    of = at // np.uint64(WINDOW)
    for window in np.unique(of[active]):
        lanes = np.flatnonzero(active & (of == window))
        cta, _ = s.cta_at(w, int(at[lanes[0]]))
        yield cta, lanes, at[lanes].astype(np.int64) % WINDOW


def view(cta: Cta, at: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of bytes (lanes, size) and of words in a CTA's shared memory, checked."""
    bad = (at % min(size, 16) != 0) | (at < SHARED_BASE) | (at > len(cta.shared) - size)
    if bad.any():
        raise PtxError(f"shared address {at[bad][0]} for {size} bytes")
    return at[:, None] + np.arange(size), at[:, None] // 4 + np.arange(-(-size // 4))


def access(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """ld and st of shared and global memory."""
    load = i.op.startswith("ld")
    where, what = (i.args[1], i.args[0]) if load else (i.args[0], i.args[1])
    registers = names(what)
    bits = int(i.op.rsplit(".", 1)[1][1:])
    size, dtype = bits // 8 * len(registers), np.dtype(f"u{bits // 8}")
    at = s.address(w, where)
    values = np.zeros((WARP, len(registers)), np.uint64)
    if not load:
        values = np.stack([s.read(w, name) for name in registers], -1)
    raw = values.astype(dtype).view(np.uint8).reshape(WARP, size)
    if ".global" in i.op:
        lanes = np.flatnonzero(active)
        for memory, here, places in s.globals_at(at, lanes, size):
            if load:
                raw[here] = memory[places]
            else:
                memory[places] = raw[here]
    else:
        for cta, lanes, local in windows(s, w, at, active):
            bytes_at, words = view(cta, local, size)
            if load:
                cta.shadow.read(w.place, lanes[:, None], words)
                raw[lanes] = cta.shared[bytes_at]
            else:
                cta.shadow.write(w.place, lanes[:, None], words)
                cta.shared[bytes_at] = raw[lanes]
    if load:
        values = raw.view(dtype).astype(np.uint64)
        for n, name in enumerate(registers):
            s.write(w, name, values[:, n], active)


def add(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """`atom.add` in global memory: lanes one after another; returns what was there."""
    at, value = s.address(w, i.args[1]), s.read(w, i.args[2])
    before = np.zeros(WARP, np.uint64)
    for lane in np.flatnonzero(active):
        word = s.global_at(int(at[lane]), 4).view(np.uint32)
        before[lane] = word[0]
        word[0] += np.uint32(value[lane])
    s.write(w, i.args[0], before, active)


HANDLERS: dict[str, Handler] = {
    r"atom\.add\.acq_rel\.gpu\.global\.u32": add,
    r"ld\.param\.[bu](32|64)": parameter,
    r"ld\.(shared|(relaxed\.gpu\.)?global(\.nc|\.cg)?)(\.v[24])?\.[bu](16|32)": access,
    r"st\.(shared|shared::cluster|global)(\.v[24])?\.[bu](16|32)": access,
}
