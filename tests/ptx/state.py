"""What a cluster consists of while it runs: warps, registers, memory, barriers.

Instructions are functions of (state, warp, active lanes, instruction); False means that the warp
must wait. The modules that define them have a table `HANDLERS` of patterns of names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from tests.ptx.parse import Instruction, PtxError
from tests.ptx.races import Clocks, Shadow

WARP = 32
LANES = np.arange(WARP)
ALL = np.ones(WARP, bool)  # lanes; itself, not a copy, where an instruction runs in all of them
ALL.flags.writeable = False
SHARED_BASE = 1024  # of dynamic shared memory in each CTA's window
WINDOW = 1 << 24  # shared addresses of CTA r + 1 of the cluster start at (r + 1) * WINDOW
FULL = (1 << 64) - 1
NOTHING = np.zeros(WARP, np.uint64)

Lanes = np.ndarray  # (32,) bool
Words = np.ndarray  # (32,) uint64: a register of all lanes
Work = Callable[[], None]


@cache
def base_and_offset(text: str) -> tuple[str, np.uint64]:
    """Of [register+offset]."""
    base, _, offset = text.strip("[]").replace(" ", "").partition("+")
    return base, np.uint64(int(offset or 0) & FULL)


def numbers(active: Lanes) -> list[int]:
    """Of active lanes."""
    return [int(lane) for lane in np.flatnonzero(active)]


@dataclass
class InUse:
    """Global memory that the previous kernel may read or write until `griddepcontrol.wait`."""

    array: np.ndarray


@dataclass
class TensorMap:
    """What a kernel's tensor map stands for: a matrix, and a box of 128 bytes of some rows.

    Args:
        rows: (rows, bytes) of uint8.
        box: Rows that a copy brings.
        element: Bytes of a number.
        in_use: As `InUse`.
    """

    rows: np.ndarray
    box: int
    element: int
    in_use: bool = False


Parameter = np.ndarray | InUse | TensorMap | int


@dataclass
class Barrier:
    """An mbarrier.

    Args:
        count: Arrivals of a phase.
        clock: What its arrivals have released.
        pending: Arrivals that this phase still waits for.
        bytes: Those that it still waits for.
        phase: Parity of the phase that is not complete.
        announced: Whether its initialization was made visible to copies and to other CTAs.
    """

    count: int
    clock: np.ndarray
    pending: int
    bytes: int = 0
    phase: int = 0
    announced: bool = False

    def check(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.pending < 0:
            raise PtxError("an mbarrier got more arrivals than it expects")
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


@dataclass
class NamedBarrier:
    """A barrier of `bar.sync`: warps that have arrived of those needed, and what they released."""

    need: int
    clock: np.ndarray
    arrived: int = 0
    generation: int = 0


@dataclass
class Cta:
    rank: int
    index: int
    shared: np.ndarray
    shadow: Shadow
    free_registers: int = 0
    barriers: dict[int, Barrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    warps: "list[Warp]" = field(default_factory=list)
    launched: bool = False  # the next kernel, by `griddepcontrol.launch_dependents`
    waited: bool = False  # for the previous kernel
    products: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # of warpgroups


@dataclass
class Warp:
    """32 lanes.

    Args:
        index: Its number in the CTA.
        place: Its number in the cluster.
        held: Registers of each of its threads.
        at: The next instruction of all 32 lanes; None where they differ, and `pc` is each one's.
        fixed: Operands that never change: numbers, special registers.
        waiting: A condition that must hold before it goes on.
        open_group: WGMMAs that are not committed; `groups`: committed ones, oldest first.
        reading: Registers of A, and `summing` of the sums, of WGMMAs in flight.
        touched: Registers that other instructions have used since the last `wgmma.fence`.
        copies: Those of `cp.async` without an arrival or a group: (shared address, lane, bytes).
        copy_groups: Groups of `cp.async` that nobody has waited for, oldest first.
    """

    index: int
    place: int
    cta: Cta
    held: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    at: int | None = 0
    pc: np.ndarray = field(default_factory=lambda: np.zeros(WARP, np.int64))
    live: np.ndarray = field(default_factory=lambda: ALL)
    fixed: dict[str, np.ndarray] = field(default_factory=dict)
    waiting: Callable[[], bool] | None = None
    open_group: list[Work] = field(default_factory=list)
    groups: list[list[Work]] = field(default_factory=list)
    reading: list[str] = field(default_factory=list)
    summing: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    products: int = 0
    cluster_arrivals: int = 0
    cluster_waits: int = 0
    fenced: np.ndarray | None = None  # its clock at its last `fence.mbarrier_init`
    copies: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    copy_groups: list[list[tuple[int, int, np.ndarray]]] = field(default_factory=list)

    def jump(self, active: Lanes, to: int) -> None:
        """Some lanes go on there."""
        if active is ALL:
            self.at = to
            return
        if self.at is not None:
            self.pc, self.at = np.full(WARP, self.at), None
        self.pc[active] = to
        if self.live is ALL and (self.pc == to).all():
            self.at = to

    def next(self) -> int:
        """The next instruction of the live lanes that are furthest behind."""
        return int(self.pc[self.live].min()) if self.at is None else self.at

    def left(self) -> bool:
        return self.live is not ALL and not self.live.any()

    def retire(self, keep: int) -> None:
        """Do the oldest groups of WGMMAs until `keep` are left."""
        while len(self.groups) > keep:
            for work in self.groups.pop(0):
                work()


class State:
    """A running cluster.

    Args:
        names: Names of the kernel's parameters; `values`: addresses, integers, tensor maps.
        memory: (first address, bytes, whether they are in use by the previous kernel).
        specials: Values of names that are no registers.
        ctas: CTAs of the cluster.
        random: Decides what happens when.
    """

    def __init__(
        self,
        names: list[str],
        values: dict[str, int | TensorMap],
        memory: list[tuple[int, np.ndarray, bool]],
        specials: dict[str, int],
        ctas: list[Cta],
        clocks: Clocks,
        random: np.random.Generator,
    ):
        self.names, self.values, self.memory, self.specials = names, values, memory, specials
        self.ctas, self.clocks, self.random = ctas, clocks, random
        self.later: list[Work] = []  # copies on their way
        self.cluster_clock = clocks.new()  # of `barrier.cluster`
        in_use = [m.in_use for m in values.values() if isinstance(m, TensorMap)]
        self.previous_runs = any(in_use) or any(used for _, _, used in memory)

    # Operands.

    def read(self, warp: Warp, name: str) -> Words:
        """An operand's 64 raw bits in every lane."""
        found = warp.registers.get(name)
        if found is not None:
            if name in warp.summing:
                raise PtxError(f"{name} is read while a WGMMA adds to it")
            warp.touched.add(name)
            return found
        found = warp.fixed.get(name)
        if found is None:
            found = warp.fixed[name] = self.constant(warp, name)
        return found

    def constant(self, warp: Warp, name: str) -> Words:
        """A number, or a register that no instruction writes."""
        if name == "%tid.x":
            return (warp.index * WARP + LANES).astype(np.uint64)
        if name == "%laneid":
            return LANES.astype(np.uint64)
        if name == "%ctaid.x":
            return np.full(WARP, warp.cta.index, np.uint64)
        if name in self.specials:
            return np.full(WARP, self.specials[name], np.uint64)
        if name in self.values:  # the address of a parameter
            return np.full(WARP, self.names.index(name), np.uint64)
        if name.startswith("0f"):
            return np.full(WARP, int(name[2:], 16), np.uint64)
        if name.startswith("0d"):
            raise PtxError("no doubles")
        try:
            value = int(name, 0)
        except ValueError:
            raise PtxError(f"{name} is read before it is written") from None
        return np.full(WARP, value & FULL, np.uint64)

    def write(self, warp: Warp, name: str, value: np.ndarray, active: Lanes) -> None:
        """A register of the active lanes."""
        if name == "_":
            return
        if name in warp.reading:
            raise PtxError(f"{name} is written while a WGMMA may read it")
        if name in warp.summing:
            raise PtxError(f"{name} is written while a WGMMA adds to it")
        warp.touched.add(name)
        value = value.astype(np.uint64, copy=False)
        if active is not ALL:
            value = np.where(active, value, warp.registers.get(name, NOTHING))
        warp.registers[name] = value

    def one(self, warp: Warp, name: str, active: Lanes) -> int:
        """An operand that is the same in all active lanes."""
        values = self.read(warp, name)[active]
        if (values != values[0]).any():
            raise PtxError(f"{name} differs from lane to lane")
        return int(values[0])

    def address(self, warp: Warp, text: str) -> Words:
        """[register+offset] -> addresses of all lanes."""
        base, offset = base_and_offset(text)
        return self.read(warp, base) + offset

    # Memory.

    def cta_at(self, warp: Warp, address: int) -> tuple[Cta, int]:
        """A shared address of a warp as (CTA that has it, address in its own window)."""
        if address < WINDOW:
            return warp.cta, address
        rank = address // WINDOW - 1
        if rank >= len(self.ctas):
            raise PtxError(f"the cluster has no CTA {rank}")
        other = self.ctas[rank]
        if all(w.left() for w in other.warps):
            raise PtxError(f"the shared memory of CTA {rank}, which has left")
        if not self.clocks.known[warp.place][[w.place for w in other.warps]].any():
            raise PtxError(f"the shared memory of CTA {rank}, which may not have started")
        return other, address % WINDOW

    def shared_at(self, cta: Cta, address: int, size: int) -> np.ndarray:
        """A view of `size` bytes of a CTA's own shared memory."""
        if address % min(size, 16) or not SHARED_BASE <= address <= len(cta.shared) - size:
            raise PtxError(f"shared address {address} for {size} bytes")
        return cta.shared[address : address + size]

    def global_at(self, address: int, size: int) -> np.ndarray:
        """A view of `size` bytes of global memory."""
        for base, array, in_use in self.memory:
            if base <= address <= base + len(array) - size:
                if address % min(size, 16):
                    raise PtxError(f"unaligned global address: {address - base}, {size} bytes")
                if in_use:
                    self.check_previous()
                return array[address - base : address - base + size]
        raise PtxError(f"global address {address:#x} for {size} bytes belongs to nothing")

    def globals_at(
        self, at: Words, lanes: np.ndarray, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(array, lanes, indices (lanes, size) of their bytes) for every array that lanes name."""
        of = at[lanes] >> np.uint64(32)  # arrays begin at multiples of 2**32
        for one in np.unique(of):
            here = lanes[of == one]
            local = at[here]
            uneven = local[local % np.uint64(min(size, 16)) != 0]
            for address in (*uneven[:1], local.min(), local.max()):
                self.global_at(int(address), size)
            first = (local & np.uint64(0xFFFFFFFF)).astype(np.int64)
            yield self.memory[int(one) - 1][1], here, first[:, None] + np.arange(size)

    def check_previous(self) -> None:
        """Refuse what must wait for the previous kernel."""
        if self.previous_runs:
            raise PtxError("memory that the previous kernel may use, before griddepcontrol.wait")

    def barrier(self, cta: Cta, address: int) -> Barrier:
        """The mbarrier at a CTA's own shared address."""
        if address not in cta.barriers:
            raise PtxError(f"no mbarrier at {address}")
        return cta.barriers[address]


Handler = Callable[[State, Warp, Lanes, Instruction], bool | None]
