"""Copies to shared memory that land some time later: bulk, tensor, cp.async, st.async."""

import re

import numpy as np

from tests.ptx import mbarrier
from tests.ptx.control import whole
from tests.ptx.integer import signed
from tests.ptx.memory import view
from tests.ptx.parse import Instruction, PtxError
from tests.ptx.state import Cta, Handler, Lanes, State, TensorMap, Warp, numbers

NEVER = 1 << 62  # when a copy lands that nobody has waited for

Piece = tuple[int, np.ndarray]  # address in the CTA's window, bytes


def land(s: State, cta: Cta, mbar: int, pieces: list[Piece], unfenced: bool = False) -> None:
    """Bytes arrive in shared memory; the clock of their mbarrier learns of it."""
    count = s.clocks.land(s.barrier(cta, mbar).clock)
    for to, data in pieces:
        cta.shared[to : to + len(data)] = data
        cta.shadow.land(slice(to // 4, (to + len(data)) // 4), count, unfenced)


def start(s: State, w: Warp, lane: int, ctas: list[Cta], mbar: int, pieces: list[Piece]) -> None:
    """A copy of the async proxy, which counts its bytes at an mbarrier of every CTA."""
    for cta in ctas:
        if not s.barrier(cta, mbar).announced:
            raise PtxError("a copy counts at an mbarrier that no fence has made visible to it")
        for to, data in pieces:
            if not 0 <= to - 1024 <= len(cta.shared) - 1024 - len(data):
                raise PtxError(f"shared address {to} for {len(data)} bytes")
            words = np.arange(to // 4, (to + len(data)) // 4)
            cta.shadow.may_write(w.place, lane, words)
            cta.shadow.check_proxy(words)

    def work() -> None:
        for cta in ctas:
            land(s, cta, mbar, pieces)
            barrier = s.barrier(cta, mbar)
            barrier.bytes -= sum(len(data) for _, data in pieces)
            barrier.check()

    s.later.append(work)


def bulk(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    where = [s.address(w, i.args[n]) for n in (0, 1, 3)]
    sizes = s.read(w, i.args[2])
    for lane in numbers(active):  # each starts its own
        to, source, mbar = (int(a[lane]) for a in where)
        size = int(sizes[lane])
        if to % 16 or source % 16 or size % 16 or not size:
            raise PtxError(f"a bulk copy of {size} bytes from {source} to {to}")
        start(s, w, lane, [w.cta], mbar, [(to, s.global_at(source, size).copy())])


def prefetch(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Nothing but a check of what is named."""
    where, sizes = s.address(w, i.args[0]), s.read(w, i.args[1])
    for lane in numbers(active):
        source, size = int(where[lane]), int(sizes[lane])
        if source % 16 or size % 16 or not size:
            raise PtxError(f"a prefetch of {size} bytes from {source}")
        s.global_at(source, size)


def tensor(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """A box of a matrix, with the 128-byte swizzle: 16-byte chunks trade places by row."""
    if active.sum() != 1:
        raise PtxError("a tensor copy of several threads")
    to = int(s.address(w, i.args[0])[active][0])
    name, column_name, row_name = re.findall(r"[%\w.]+", i.args[1])
    source = s.values[s.names[s.one(w, name, active)]]
    if not isinstance(source, TensorMap):
        raise PtxError("a tensor copy without a tensor map")
    if source.in_use:
        s.check_previous()
    column = int(signed(s.read(w, column_name), 32)[active][0]) * source.element
    row = int(signed(s.read(w, row_name), 32)[active][0])
    ctas = [w.cta]
    if "multicast" in i.op:
        mask = s.one(w, i.args[3], active)
        ctas = [cta for cta in s.ctas if mask >> cta.rank & 1]
    if to % 1024:
        raise PtxError("a swizzled tensor copy must start at a multiple of 1024")
    box = np.zeros((source.box, 128), np.uint8)
    part = source.rows[max(row, 0) : row + source.box, max(column, 0) : column + 128]
    first, left = max(-row, 0), max(-column, 0)
    box[first : first + part.shape[0], left : left + part.shape[1]] = part
    chunks = box.reshape(source.box, 8, 16)
    rows = np.arange(source.box)[:, None]
    swizzled = chunks[rows, np.arange(8) ^ rows % 8].reshape(-1)
    mbar = int(s.address(w, i.args[2])[active][0])
    start(s, w, numbers(active)[0], ctas, mbar, [(to, swizzled)])


def copy(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """`cp.async`: every lane its own bytes, in the generic proxy; zeros behind those it reads."""
    to, source, size = s.address(w, i.args[0]), s.address(w, i.args[1]), int(i.args[2])
    read = s.read(w, i.args[3]) if len(i.args) > 3 else np.full(32, size)
    lanes = np.flatnonzero(active)
    places, words = view(w.cta, to[lanes].astype(np.int64), size)
    if len(np.unique(words)) < words.size:
        raise PtxError("a race: lanes of one cp.async write the same bytes")
    w.cta.shadow.may_write(w.place, lanes[:, None], words)
    w.cta.shadow.land(words, NEVER, unfenced=True)  # on their way: nobody may use these words
    for lane, at in zip(lanes.tolist(), places[:, 0].tolist(), strict=True):
        data = np.zeros(size, np.uint8)
        if count := int(read[lane]):
            data[:count] = s.global_at(int(source[lane]), count)
        w.copies.append((at, lane, data))


def commit(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """The copies of all lanes since the last commit become a group."""
    whole(active, i.op)
    w.copy_groups.append(w.copies)
    w.copies = []


def wait_group(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """All but the last groups have landed: as if every lane had stored its own bytes now."""
    whole(active, i.op)
    while len(w.copy_groups) > int(i.args[0]):
        landed = w.copy_groups.pop(0)
        for size in {len(data) for _, _, data in landed}:
            at, lanes, data = zip(*(c for c in landed if len(c[2]) == size), strict=True)
            places, words = view(w.cta, np.array(at), size)
            w.cta.shadow.land(words, 0, unfenced=True)
            w.cta.shadow.write(w.place, np.array(lanes)[:, None], words)
            w.cta.shared[places] = np.stack(data)


def arrive_after(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """Arrivals of lanes when their `cp.async` so far have landed."""
    mbar = int(s.address(w, i.args[0])[active][0])
    pieces = [(to, data) for to, lane, data in w.copies if active[lane]]
    w.copies = [copy for copy in w.copies if not active[copy[1]]]
    barrier = mbarrier.find(s, w, numbers(active)[0], mbar)

    def work() -> None:
        land(s, w.cta, mbar, pieces, unfenced=True)
        barrier.pending -= int(active.sum())
        barrier.check()

    s.later.append(work)


def send(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """`st.async`: a word into a CTA's shared memory, counted at an mbarrier there."""
    to, mbar, value = s.address(w, i.args[0]), s.address(w, i.args[2]), s.read(w, i.args[1])
    for lane in numbers(active):
        cta, at = s.cta_at(w, int(to[lane]))
        owner, mbar_at = s.cta_at(w, int(mbar[lane]))
        if owner is not cta:
            raise PtxError("st.async counts in another CTA than it writes to")
        s.shared_at(cta, at, 4)
        data = np.array([value[lane]], np.uint32).view(np.uint8)
        # Its count is a release: who waits for it knows what this warp knew.
        s.clocks.release_part(w.place, s.barrier(cta, mbar_at).clock)
        start(s, w, lane, [cta], mbar_at, [(at, data)])


HANDLERS: dict[str, Handler] = {
    r"cp\.async\.bulk\.prefetch\.L2\.global": prefetch,
    r"cp\.async\.bulk\.shared::(cta|cluster)\.global\..*": bulk,
    r"cp\.async\.bulk\.tensor\.2d\..*": tensor,
    r"cp\.async\.c[ag]\.shared\.global": copy,
    r"cp\.async\.commit_group": commit,
    r"cp\.async\.wait_group": wait_group,
    r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64": arrive_after,
    r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.b32": send,
}
