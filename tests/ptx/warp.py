"""What lanes of a warp tell each other."""

import numpy as np

from tests.ptx.control import whole
from tests.ptx.parse import Instruction, PtxError
from tests.ptx.state import LANES, Handler, Lanes, State, Warp


def shuffle(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """From a lane that each names, or from the lane whose number differs in some bits."""
    whole(active, i.op)
    if s.one(w, i.args[3], active) & 31 != 31:
        raise PtxError("shfl.sync of a segment")
    operand = s.read(w, i.args[2]).astype(np.int64) & 31
    source = LANES ^ operand if ".bfly" in i.op else operand
    s.write(w, i.args[0], s.read(w, i.args[1])[source], active)


def elect(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    whole(active, "elect.sync")
    lane, predicate = i.args[0].split("|")
    s.write(w, lane, LANES * 0, active)
    s.write(w, predicate, LANES == 0, active)


def ballot(s: State, w: Warp, active: Lanes, i: Instruction) -> None:
    """A bit of each lane, by its predicate."""
    whole(active, i.op)
    bits = (s.read(w, i.args[1]) != 0).astype(np.uint64) << LANES.astype(np.uint64)
    s.write(w, i.args[0], np.full(len(bits), np.bitwise_or.reduce(bits)), active)


HANDLERS: dict[str, Handler] = {
    r"shfl\.sync\.(idx|bfly)\.b32": shuffle,
    r"elect\.sync": elect,
    r"vote\.sync\.ballot\.b32": ballot,
}
