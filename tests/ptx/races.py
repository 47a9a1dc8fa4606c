"""Who has accessed shared memory, and who may know of it.

Every warp counts its synchronizations. A clock holds a count for every warp of the cluster, and one
for copies: what others did up to there has happened before. Barriers pass clocks on. Of every word
of shared memory the last write and the last read are known, so an access that nothing orders behind
another thread's is an error, whatever the order of events was (as in FastTrack, Flanagan and
Freund 2009, with warps for threads).

Within a warp, lanes are ordered by `bar.warp.sync`. A lane that arrives somewhere alone releases
its own accesses, and those of the others up to the last `bar.warp.sync`.
"""

import numpy as np

from tests.ptx.parse import PtxError

THREADS = 33  # of a warp: its lanes, and instructions of the whole warp
TOGETHER = 32


class Clocks:
    """The clocks of a cluster's warps; the last one is that of copies.

    Args:
        warps: Warps of the cluster.
    """

    def __init__(self, warps: int):
        self.warps = warps
        self.known = np.zeros((warps + 1, warps + 1), np.int64)
        np.fill_diagonal(self.known, 2)  # 1 is for having started
        self.busy = np.zeros(warps, bool)  # warps with accesses since their count last changed

    def new(self) -> np.ndarray:
        """A barrier's clock."""
        return np.zeros(self.warps + 1, np.int64)

    def now(self, warp: int) -> int:
        """A warp's own count."""
        return int(self.known[warp, warp])

    def advance(self, warp: int) -> None:
        """`bar.warp.sync`: lanes know of each other's accesses."""
        self.known[warp, warp] += 1
        self.busy[warp] = False

    def release(self, warp: int, clock: np.ndarray) -> None:
        """All lanes of a warp arrive at the barrier of this clock."""
        np.maximum(clock, self.known[warp], out=clock)
        self.advance(warp)

    def release_part(self, warp: int, clock: np.ndarray) -> None:
        """Some lanes arrive: see `Shadow.settle` for what they did themselves."""
        known = self.known[warp].copy()
        known[warp] -= 1
        np.maximum(clock, known, out=clock)

    def acquire(self, warp: int, clock: np.ndarray) -> None:
        """A warp has waited for the barrier of this clock."""
        np.maximum(self.known[warp], clock, out=self.known[warp])

    def land(self, clock: np.ndarray) -> int:
        """A copy is complete, and says so to the barrier of this clock; its count."""
        self.known[self.warps, self.warps] += 1
        clock[self.warps] = self.now(self.warps)
        return int(clock[self.warps])


class Shadow:
    """The last accesses to each 32-bit word of a CTA's shared memory.

    Args:
        size: Bytes.
        clocks: Of the cluster's warps.
    """

    def __init__(self, size: int, clocks: Clocks):
        self.clocks = clocks
        words = -(-size // 4)
        self.writer, self.reader = (np.zeros(words, np.int64) for _ in range(2))  # threads
        self.written, self.was_read = (np.zeros(words, np.int64) for _ in range(2))  # when
        self.unfenced = np.zeros(words, bool)  # written, and no `fence.proxy.async` yet
        self.taken = np.zeros(words, bool)  # by mbarriers

    def read(self, warp: int, lane: np.ndarray | int, words: np.ndarray) -> None:
        """Lanes read words: after whoever wrote them.

        Args:
            warp: The warp.
            lane: One lane, or those of every row of `words`; `TOGETHER` for the whole warp.
            words: Indices of words.

        Raises:
            PtxError: Nothing orders the read behind the write.
        """
        me = warp * THREADS + lane
        self._check(warp, me, self.writer[words], self.written[words], "reads what", "wrote")
        self.clocks.busy[warp] = True
        self.reader[words] = me
        self.was_read[words] = self.clocks.now(warp)

    def write(self, warp: int, lane: np.ndarray | int, words: np.ndarray) -> None:
        """Lanes write words, after whoever wrote or read them; arguments as of `read`."""
        self.may_write(warp, lane, words)
        self.clocks.busy[warp] = True
        self.writer[words] = warp * THREADS + lane
        self.written[words] = self.clocks.now(warp)
        self.unfenced[words] = True

    def may_write(self, warp: int, lane: np.ndarray | int, words: np.ndarray) -> None:
        """Check that lanes may write words, or start a copy that will."""
        if self.taken[words].any():
            raise PtxError("an mbarrier is overwritten")
        me = warp * THREADS + lane
        self._check(warp, me, self.writer[words], self.written[words], "overwrites what", "wrote")
        self._check(warp, me, self.reader[words], self.was_read[words], "overwrites what", "reads")

    def check_proxy(self, words: np.ndarray | slice) -> None:
        """Check that copies and WGMMAs see what threads wrote."""
        if self.unfenced[words].any():
            raise PtxError("the async proxy meets a thread's store without fence.proxy.async")

    def fence(self, warp: int, active: np.ndarray) -> None:
        """`fence.proxy.async` of some lanes; of what their warp wrote together if all take part."""
        self.unfenced &= ~self.by(warp, active, self.writer)

    def settle(self, warp: int, active: np.ndarray) -> None:
        """Some lanes arrive alone: their own accesses are released as well."""
        if not self.clocks.busy[warp]:
            return
        now = self.clocks.now(warp)
        for who, when in ((self.writer, self.written), (self.reader, self.was_read)):
            when[self.by(warp, active, who) & (when == now)] = now - 1

    def land(self, words: slice | np.ndarray, count: int, unfenced: bool) -> None:
        """A copy has written words; `unfenced`: not through the async proxy."""
        self.writer[words] = self.reader[words] = self.clocks.warps * THREADS
        self.written[words] = count
        self.was_read[words] = 0
        self.unfenced[words] = unfenced

    def by(self, warp: int, active: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Where one of these lanes was last."""
        lanes = np.append(active, active.all())
        mine = (who >= warp * THREADS) & (who < (warp + 1) * THREADS)
        mine[mine] = lanes[who[mine] % THREADS]
        return mine

    def _check(
        self,
        warp: int,
        me: np.ndarray | int,
        who: np.ndarray,
        when: np.ndarray,
        does: str,
        did: str,
    ) -> None:
        first = self.clocks.known[warp] + 1  # count of each warp that is not known yet
        first[warp] -= 1  # within a warp, the access must lie before its last synchronization
        late = when >= first[who // THREADS]
        if not late.any():
            return
        bad = late & (who != me) & (when > 0)
        if bad.any():
            a, b = int(np.broadcast_to(me, bad.shape)[bad][0]), int(who[bad][0])
            raise PtxError(f"a race: {self._name(a)} {does} {self._name(b)} {did}")

    def _name(self, thread: int) -> str:
        warp, lane = divmod(thread, THREADS)
        if warp == self.clocks.warps:
            return "a copy"
        return f"warp {warp}" + ("" if lane == TOGETHER else f" lane {lane}")
