"""The time of a launch, by one model for all kernels of Hopper GPUs; the choice is the least time.

A family says what a launch does (`Work`): what its busiest multiprocessor multiplies, decodes and
copies, what all of them read, and what is done once. What that costs (`Costs`) is data, one file
for a GPU: `benchmarks/tiles.py` times every candidate of a product, and fits the file to the times.
Other GPUs of the family take the same costs, with their own multiprocessors and memory.

Nothing here is a table of shapes, and nothing is measured when a user multiplies: the choice fixes
the order of sums.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Numbers here may be tensors, with a number for each of many launches: the costs are fitted so.
Number = Any
FILE = Path(__file__).with_name("costs_h200.json")


class Work(NamedTuple):
    """What a launch does.

    Attributes:
        kind: Whose costs it has, such as "wgmma 16".
        steps: K tiles that the busiest CTA (or warp, where warps split K) takes in turn.
        beside: CTAs (or warps) that share its multiprocessor.
        multiply: Of the matrix unit, for a K tile: cycles at its peak rate.
        decode: Of the other units, for a K tile: cycles in which its instructions are issued.
        scale: Cycles in which a K tile's sums are multiplied by scales of groups.
        copied: Bytes that the busiest multiprocessor copies into shared memory.
        read: Bytes of the memory that all of them read and write once.
        again: Bytes of weights that CTAs at different places of K may read again.
        uneven: K tiles of the busiest multiprocessor, over those of all in the mean.
        ends: Outputs that the busiest one writes while it could multiply.
        late: Such outputs, where another warpgroup multiplies meanwhile.
        turns: Warps that end on the busiest one, in all turns.
        meets: Parts of tiles whose sums meet those of other CTAs in the memory.
        outputs: Of a tile, for these.
        clusters: Whether CTAs of a cluster split K.
        crowded: Whether such clusters find no room beside the next launch's.
    """

    kind: str
    steps: Number
    beside: Number
    multiply: Number
    decode: Number
    copied: Number
    read: Number
    uneven: Number
    ends: Number
    scale: Number = 0
    again: Number = 0
    late: Number = 0
    turns: Number = 0
    meets: Number = 0
    outputs: Number = 0
    clusters: Number = False
    crowded: Number = False


class Costs(NamedTuple):
    """Cycles of a unit of `Work`, by its names; and how sharply the slowest part decides.

    Attributes:
        start: Of a launch.
        alone_multiply: With `alone_decode` and `wait`, of a K tile of one CTA, however few share
            its multiprocessor.
        step: Of a K tile, beside what is decoded.
        parts, body: Exponents, less 1, of the norms over a step's parts and over all of its
            multiprocessor's work and the memory's; `copying`, less 2, with the copies.
        uneven: Exponent.
        again: Of the bytes that may be read again, the part that is.
        meet: Of a part that meets others, and `joined` of each of its outputs.
        apart, crowd: Parts of the time more, where CTAs share tiles, and where clusters crowd.
    """

    start: Number = 0
    multiply: Number = 0
    decode: Number = 0
    step: Number = 0
    alone_multiply: Number = 0
    alone_decode: Number = 0
    wait: Number = 0
    parts: Number = 1
    body: Number = 1
    copying: Number = 1
    copied: Number = 0
    read: Number = 0
    again: Number = 0
    uneven: Number = 1
    ends: Number = 0
    late: Number = 0
    turns: Number = 0
    meet: Number = 0
    joined: Number = 0
    clusters: Number = 0
    apart: Number = 0
    crowd: Number = 0


@cache
def fitted_costs() -> dict[str, dict[str, float]]:
    """The file: costs by a kind, or by the first word of several."""
    data: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


@cache
def costs_of(kind: str) -> Costs:
    """The costs of a kind: its own, and those of all whose first word is the same."""
    data = fitted_costs()
    return Costs(**data[kind.partition(" ")[0]] | data[kind])


def cycles(work: Work, read: float, costs: Costs | None = None) -> Number:
    """Clock cycles of a launch. read: bytes that the GPU's memory can bring in a cycle."""
    c = costs or costs_of(work.kind)
    step = norm(
        1 + c.parts,
        work.beside * c.multiply * work.multiply,
        work.beside * (c.decode * work.decode + c.step),
        c.alone_multiply * work.multiply + c.alone_decode * work.decode + work.scale + c.wait,
    )
    memory = c.read * (work.read + c.again * work.again) / read * work.uneven**c.uneven
    body = norm(2 + c.copying, norm(1 + c.body, work.steps * step, memory), c.copied * work.copied)
    body = body * (1 + c.crowd * work.crowded) * (1 + c.apart * (work.meets > 0))
    once = c.start + c.clusters * work.clusters + work.meets * (c.meet + c.joined * work.outputs)
    return body + once + c.ends * work.ends + c.late * work.late + c.turns * work.turns


def norm(sharpness: Number, *parts: Number) -> Number:
    """Between the sum of some times (1) and the longest of them."""
    total = sum(parts) + 1e-9  # powers of parts of it do not overflow
    return total * sum((part / total) ** sharpness for part in parts) ** (1 / sharpness)
