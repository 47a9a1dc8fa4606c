"""The machine: launches a kernel, and decides whose turn it is."""

import re
from collections.abc import Sequence

import numpy as np

from tests.ptx import control, copies, floats, integer, kept, mbarrier, memory, mma, warp, wgmma
from tests.ptx.parse import Instruction, PtxError, parse
from tests.ptx.races import Clocks, Shadow
from tests.ptx.state import (
    ALL,
    SHARED_BASE,
    WARP,
    Cta,
    Handler,
    InUse,
    Parameter,
    State,
    TensorMap,
    Warp,
)

HANDLERS: dict[str, Handler] = {
    **control.HANDLERS,
    **integer.HANDLERS,
    **floats.HANDLERS,
    **memory.HANDLERS,
    **mbarrier.HANDLERS,
    **copies.HANDLERS,
    **warp.HANDLERS,
    **mma.HANDLERS,
    **wgmma.HANDLERS,
}


def handler(op: str) -> Handler:
    """What an instruction does.

    Raises:
        PtxError: Nobody knows it.
    """
    found = [fn for pattern, fn in HANDLERS.items() if re.fullmatch(pattern, op)]
    if len(found) != 1:
        raise PtxError(f"this machine does not know {op}" if not found else f"{op} is ambiguous")
    return found[0]


class Machine:
    """One kernel, ready to be launched on numpy arrays.

    Args:
        ptx: The text of a PTX file with one kernel.

    Raises:
        PtxError: It has an instruction that the machine does not know.
    """

    def __init__(self, ptx: str):
        self.ptx = ptx
        self.program = parse(ptx)
        known = {op: handler(op) for op in {i.op for i in self.program.code}}
        self.code: list[tuple[Instruction, Handler]] = [
            (instruction, known[instruction.op]) for instruction in self.program.code
        ]

    def launch(
        self,
        parameters: Sequence[Parameter],
        grid: int,
        threads: int,
        shared: int,
        cluster: int = 1,
        seed: int = 0,
    ) -> None:
        """Run the kernel to its end, or write what it wrote the last time (see `kept`).

        Args:
            parameters: Arrays are global memory, which the kernel writes to; see `InUse`.
            grid: CTAs.
            threads: Of a CTA.
            shared: Bytes of dynamic shared memory of a CTA.
            cluster: CTAs of a cluster.
            seed: Of the order of events; with even ones, WGMMAs end as late as possible, and
                clusters run from the first to the last.

        Raises:
            PtxError: The program broke a rule, or waits forever.
        """
        self.random = np.random.default_rng(seed)
        self.eager = 0.0 if seed % 2 == 0 else 0.2  # how soon a WGMMA ends that nobody waits for
        self.grid, self.threads, self.shared = grid, threads, shared
        self.memory: list[tuple[int, np.ndarray, bool]] = []
        self.values: dict[str, int | TensorMap] = {}
        for name, value in zip(self.program.parameters, parameters, strict=True):
            if isinstance(value, (np.ndarray, InUse)):
                array = value.array if isinstance(value, InUse) else value
                base = (len(self.memory) + 1) << 32
                data = array.reshape(-1).view(np.uint8)
                self.memory.append((base, data, isinstance(value, InUse)))
                self.values[name] = base
            else:
                self.values[name] = value
        written = [data for _, data, _ in self.memory]
        place = kept.place(self.ptx, parameters, grid, threads, shared, cluster, seed)
        if kept.read(place, written):
            return
        before, starts = [data.copy() for data in written], range(0, grid, cluster)
        for start in reversed(starts) if seed % 2 else starts:
            self._run(self._cluster(start, cluster))
        kept.write(place, before, written)

    def _cluster(self, start: int, size: int) -> State:
        """A cluster about to start."""
        warps = self.threads // WARP
        clocks = Clocks(size * warps)
        held = control.share(self.threads, self.program.ctas)
        total = SHARED_BASE + -(-self.shared // 4) * 4
        ctas = [
            Cta(rank, start + rank, np.full(total, 0xA5, np.uint8), Shadow(total, clocks))
            for rank in range(size)
        ]
        for cta in ctas:
            cta.warps = [Warp(i, cta.rank * warps + i, cta, held) for i in range(warps)]
        specials = {"%nctaid.x": self.grid, "%ntid.x": self.threads}
        if self.program.shared:
            specials[self.program.shared] = SHARED_BASE
        names = self.program.parameters
        return State(names, self.values, self.memory, specials, ctas, clocks, self.random)

    def _run(self, state: State) -> None:
        """Warps take turns at random, and copies land at random, until all have left."""
        warps = [w for cta in state.ctas for w in cta.warps]
        while warps:
            warp = warps[self.random.integers(len(warps))]
            ran = self._turn(state, warp)
            if state.later and self.random.random() < 0.3:
                state.later.pop(self.random.integers(len(state.later)))()
            if not ran and not state.later and not any(self._turn(state, w) for w in warps):
                if not state.previous_runs:
                    at = {
                        f"cta {w.cta.rank} warp {w.index}": self.code[w.next()][0].text
                        for w in warps
                    }
                    raise PtxError(f"deadlock: {at}")
                state.previous_runs = False  # the previous kernel takes as long as it can
            if warp.left():
                warps = [w for w in warps if not w.left()]
        if state.later:
            raise PtxError(f"the cluster left with {len(state.later)} copies in flight")
        if state.previous_runs:  # the next kernel waits for this one alone
            raise PtxError("the cluster left before the previous kernel had ended")
        for cta in state.ctas:
            control.check_end(cta)

    def _turn(self, state: State, warp: Warp) -> bool:
        """Let a warp run for a while; returns whether it did anything."""
        if warp.groups and self.random.random() < self.eager:
            warp.retire(len(warp.groups) - 1)
        if warp.waiting is not None:
            if not warp.waiting():
                return False
            warp.waiting = None
        for _ in range(int(self.random.integers(4, 60))):
            if warp.left() or not self._step(state, warp):
                break
        return True

    def _step(self, state: State, warp: Warp) -> bool:
        """One instruction of the lanes that are furthest behind; False when the warp must wait."""
        at = warp.next()
        instruction, run = self.code[at]
        active = ALL if warp.at is not None else warp.live & (warp.pc == at)
        warp.jump(active, at + 1)
        try:
            if instruction.predicate is not None:
                taken = state.read(warp, instruction.predicate) != 0
                active = active & (~taken if instruction.negated else taken)
            lanes = np.count_nonzero(active)
            if lanes == WARP:
                active = ALL
            return not lanes or run(state, warp, active, instruction) is not False
        except PtxError as error:
            raise PtxError(f"{error} at: {instruction.text}") from None
        except Exception as error:
            raise PtxError(f"{error!r} at: {instruction.text}") from error
