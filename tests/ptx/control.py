"""Branches, barriers of threads and clusters, kernels that overlap, registers."""

from collections.abc import Callable

import numpy as np

from tests.ptx.parse import Instruction, PtxError
from tests.ptx.state import ALL, WARP, WINDOW, Cta, Handler, Lanes, NamedBarrier, State, Warp

REGISTERS = 65536  # of a multiprocessor


def whole(active: Lanes, name: str) -> None:
    """Refuse an instruction that all lanes of a warp must reach."""
    if active is not ALL and not active.all():
        raise PtxError(f"{name} of a part of a warp")


def branch(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    w.jump(active, int(i.args[0]))


def leave(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    if w.at is not None:
        w.pc, w.at = np.full(WARP, w.at), None
    w.live = w.live & ~active


def nothing(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """A hint."""


# Threads of a CTA.


def sync_warp(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, "bar.warp.sync")
    if s.one(w, i.args[0], active) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise PtxError("bar.warp.sync of some lanes")
    s.clocks.advance(w.place)


def sync(s: State, w: Warp, active: Lanes, i: Instruction) -> bool | None:
    """`bar.sync` and `bar.arrive`."""
    whole(active, i.op)
    number = s.one(w, i.args[0], active)
    threads = s.one(w, i.args[1], active) if len(i.args) > 1 else len(w.cta.warps) * WARP
    if number > 15 or threads % WARP or not 0 < threads <= len(w.cta.warps) * WARP:
        raise PtxError(f"{i.op} of barrier {number} and {threads} threads")
    need = threads // WARP
    state = w.cta.named.setdefault(number, NamedBarrier(need, s.clocks.new()))
    if state.arrived and state.need != need:
        raise PtxError(f"barrier {number} is for {state.need} warps, not {need}")
    generation = state.generation
    state.need = need
    state.arrived += 1
    s.clocks.release(w.place, state.clock)
    if state.arrived == need:
        state.arrived, state.generation = 0, generation + 1
    if i.op == "bar.arrive":
        return None

    def complete() -> bool:
        if state.generation == generation:
            return False
        s.clocks.acquire(w.place, state.clock)
        return True

    return complete() or wait(w, complete)


def wait(w: Warp, until: Callable[[], bool]) -> bool:
    w.waiting = until
    return False


# CTAs of a cluster.


def arrive_cluster(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, i.op)
    if w.cluster_arrivals > w.cluster_waits:
        raise PtxError("barrier.cluster.arrive twice, without a wait")
    w.cluster_arrivals += 1
    if "relaxed" not in i.op:
        s.clocks.release(w.place, s.cluster_clock)
    else:  # that the CTA runs, and its mbarriers after a fence
        s.cluster_clock[w.place] = max(s.cluster_clock[w.place], 1)
        if w.fenced is not None:
            np.maximum(s.cluster_clock, w.fenced, out=s.cluster_clock)


def wait_cluster(s: State, w: Warp, active: Lanes, i: Instruction) -> bool:
    whole(active, i.op)
    if w.cluster_arrivals == w.cluster_waits:
        raise PtxError("barrier.cluster.wait without an arrival")
    w.cluster_waits += 1
    turn = w.cluster_waits

    def complete() -> bool:
        others = (x for cta in s.ctas for x in cta.warps if not x.left())
        if not all(x.cluster_arrivals >= turn for x in others):
            return False
        s.clocks.acquire(w.place, s.cluster_clock)
        return True

    return wait(w, complete)


def map_address(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    address, rank = (s.read(w, name) for name in i.args[1:])
    s.write(w, i.args[0], address + (rank + np.uint64(1)) * np.uint64(WINDOW), active)


# The kernels before and behind this one.


def wait_previous(s: State, w: Warp, active: Lanes, i: Instruction) -> bool | None:
    w.cta.waited = True
    return wait(w, lambda: not s.previous_runs) if s.previous_runs else None


def launch_next(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    w.cta.launched = True


# Registers.


def share(threads: int, ctas: int) -> int:
    """Registers of each thread of a kernel that leaves room for some CTAs on a multiprocessor."""
    return min(REGISTERS // (threads * ctas) // 8 * 8, 255)


def set_registers(s: State, w: Warp, active: Lanes, i: Instruction) -> bool | None:
    """`setmaxnreg`: registers that one warpgroup gives away and another takes."""
    whole(active, i.op)
    want = int(i.args[0])
    if want % 8 or not 24 <= want <= 256:
        raise PtxError(f"{want} registers: not a multiple of 8 from 24 to 256")
    more, cta = want - w.held, w.cta
    if (more < 0) == (".inc" in i.op):
        raise PtxError(f"{i.op} from {w.held} to {want} registers")

    def take() -> bool:
        if cta.free_registers < more * WARP:
            return False
        cta.free_registers -= more * WARP
        w.held = want
        return True

    return take() or wait(w, take)


def check_end(cta: Cta) -> None:
    """What must hold when all warps of a CTA have left."""
    for first in range(0, len(cta.warps), 4):
        if len({w.held for w in cta.warps[first : first + 4]}) > 1:
            raise PtxError("warps of a warpgroup disagree on setmaxnreg")
    if cta.launched and not cta.waited:
        raise PtxError("griddepcontrol.launch_dependents, but nobody waits")
    for w in cta.warps:
        if w.groups or w.open_group:
            raise PtxError("a warp left with WGMMAs in flight")
        if w.copies or any(w.copy_groups):
            raise PtxError("a warp left without waiting for cp.async")


HANDLERS: dict[str, Handler] = {
    r"bra(\.uni)?": branch,
    r"fence\.acq_rel\.gpu": nothing,  # of global memory, which no shadow watches
    r"ret": leave,
    r"prefetch\..*": nothing,
    r"bar\.warp\.sync": sync_warp,
    r"bar\.(sync|arrive)": sync,
    r"barrier\.cluster\.arrive(\.relaxed)?": arrive_cluster,
    r"barrier\.cluster\.wait": wait_cluster,
    r"mapa\.shared::cluster\.u32": map_address,
    r"griddepcontrol\.wait": wait_previous,
    r"griddepcontrol\.launch_dependents": launch_next,
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32": set_registers,
}
