"""mbarriers in shared memory, and the fences that show them and data to copies."""

import numpy as np

from tests.ptx.parse import Instruction, PtxError
from tests.ptx.state import Barrier, Handler, Lanes, State, Warp, numbers

MOST = (1 << 20) - 1  # arrivals, and bytes


def _words(address: int) -> np.ndarray:
    return np.array([address // 4, address // 4 + 1])


def release(s: State, w: Warp, active: Lanes, clock: np.ndarray) -> None:
    """Active lanes let others know of their accesses."""
    if active.all():
        s.clocks.release(w.place, clock)
        return
    for cta in s.ctas:
        cta.shadow.settle(w.place, active)
    s.clocks.release_part(w.place, clock)


def find(s: State, w: Warp, lane: int, address: int) -> Barrier:
    """A barrier that a thread uses; its initialization must have happened before."""
    cta, local = s.cta_at(w, address)
    barrier = s.barrier(cta, local)
    if cta is w.cta:
        cta.shadow.read(w.place, lane, _words(local))
    elif not barrier.announced:
        raise PtxError("an mbarrier of another CTA, without fence.mbarrier_init")
    return barrier


def init(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    at, count = s.address(w, i.args[0]), s.read(w, i.args[1])
    for lane in numbers(active):
        address, n = int(at[lane]), int(count[lane])
        if address in w.cta.barriers or not 0 < n <= MOST:
            raise PtxError(f"an mbarrier is initialized twice, or for {n} arrivals")
        s.shared_at(w.cta, address, 8)
        w.cta.shadow.write(w.place, lane, _words(address))
        w.cta.shadow.taken[_words(address)] = True
        w.cta.barriers[address] = Barrier(n, s.clocks.new(), n)


def fence(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """`fence.mbarrier_init` and `fence.proxy.async`: of what these lanes did."""
    mine = w.cta.shadow.by(w.place, active, w.cta.shadow.writer)
    for address, barrier in w.cta.barriers.items():
        barrier.announced |= bool(mine[address // 4])
    if "mbarrier_init" in i.op:
        w.fenced = s.clocks.known[w.place].copy()
        s.clocks.advance(w.place)
        return
    for cta in s.ctas:
        cta.shadow.fence(w.place, active)


def arrive(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """`mbarrier.arrive`, with a number of arrivals or of bytes to expect."""
    at = s.address(w, i.args[1])
    value = s.read(w, i.args[2]) if len(i.args) > 2 else np.ones(len(at), np.uint64)
    seen: list[Barrier] = []
    for lane in numbers(active):
        barrier = find(s, w, lane, int(at[lane]))
        if not any(barrier is b for b in seen):
            release(s, w, active, barrier.clock)
            seen.append(barrier)
        if "expect_tx" in i.op:
            barrier.bytes += int(value[lane])
            barrier.pending -= 1
            if abs(barrier.bytes) > MOST:
                raise PtxError(f"an mbarrier for {barrier.bytes} bytes")
        else:
            barrier.pending -= int(value[lane])
        barrier.check()


def wait(s: State, w: Warp, active: Lanes, i: Instruction) -> bool:
    """`try_wait.parity`: the phase of this parity is complete; false only after a while."""
    address, parity = s.address(w, i.args[1])[active], s.one(w, i.args[2], active)
    if (address != address[0]).any():
        raise PtxError("lanes wait for different mbarriers")
    if parity > 1:
        raise PtxError(f"a parity of {parity}")
    barrier = find(s, w, numbers(active)[0], int(address[0]))

    def complete() -> bool:
        if barrier.phase == parity:
            return False
        s.clocks.acquire(w.place, barrier.clock)
        return True

    done = complete()
    s.write(w, i.args[0], np.full(len(active), done), active)
    if not done:
        w.waiting = complete
    return done


HANDLERS: dict[str, Handler] = {
    r"mbarrier\.init\.shared(::cta)?\.b64": init,
    r"mbarrier\.arrive(\.expect_tx)?\.shared(::cta|::cluster)?\.b64": arrive,
    r"mbarrier\.try_wait\.parity(\.acquire\.cluster)?\.shared(::cta)?\.b64": wait,
    r"fence\.mbarrier_init\.release\.cluster": fence,
    r"fence\.proxy\.async(\.shared::cta)?": fence,
}
