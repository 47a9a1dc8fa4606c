"""How long a piece of work takes on a device, with cold weights, and the least it could take.

On a GPU a time is the median over replays of one CUDA graph that goes through different copies of
the weight in turn, more of them than the L2 cache holds: a model never reads one weight twice in a
row. Those that are compared take turns there. On a CPU it is the median by the clock, of one
behind the other.
"""

import copy
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybit.errors import InvalidInput, Unsupported, in_a_line

T = TypeVar("T")

COLD_BYTES = 160 << 20  # copies of a weight fill at least this: over twice the L2 of any GPU here
LAUNCHES = 20  # matrix products in one graph, at least
SLOW_US = 500  # a product that takes longer is launched once for each copy
ROUNDS = 5  # of turns, of which the median counts
LONG_US = 1000  # a replay; the chip lowers its clock in the first 10 ms of such
TURN_US = 4000  # of them in a turn
ENOUGH_US = 2_000_000  # in all: of what takes this long, the second turn is the last
CPU_SECONDS = 0.5  # for one measurement on a CPU
FLOOR_MEGABYTES = {
    "cuda": (1, 2, 4, 8, 12, 16, 25, 33, 50, 67, 117, 235, 470),
    "cpu": (1, 8, 67),
}


def rotated(weight: Any, nbytes: int) -> list[Any]:
    """Copies of a weight, at least two, which together exceed the caches."""
    count = max(2, math.ceil(COLD_BYTES / max(nbytes, 1 << 20)))
    return [weight, *(copy.deepcopy(weight) for _ in range(count - 1))]


def median_us(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median time in microseconds of one of `calls`, which are made in turn."""
    found = medians_in_turns([calls], device)[0]
    if isinstance(found, Exception):
        raise found
    return found


def medians_in_turns(
    contestants: Sequence[Sequence[Callable[[], Any]]], device: torch.device
) -> list[float | Exception]:
    """`median_us` of several, which take turns on a GPU: all find it as warm as the others do.

    Long products lower the clock within milliseconds, by up to a fifth. A pause, or a kernel that
    takes less power, raises it again: what came behind one was faster by that. What one of them
    raises, at any time, is its result, and the others go on.

    Returns:
        Microseconds, or what the calls raised.
    """
    if device.type != "cuda":
        return [_caught(_clock_us, calls) for calls in contestants]
    graphs = [_caught(_Graph, calls) for calls in contestants]
    order = random.Random(0)
    for _ in range(1 + ROUNDS):  # the first one warms up
        for at in order.sample(range(len(graphs)), len(graphs)):
            graph = graphs[at]
            if isinstance(graph, _Graph) and not graph.enough:
                error = _caught(graph.turn)
                graphs[at] = graph if error is None else error
    return [graph.median() if isinstance(graph, _Graph) else graph for graph in graphs]


def _caught(call: Callable[..., T], *args: Any) -> T | Exception:
    """What a call returns or raises; kernels of other packages raise anything."""
    try:
        return call(*args)
    except Exception as error:
        return error


class _Graph:
    """A CUDA graph of whole rounds of some calls; the host's launching costs nothing in it."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        self.times: list[float] = []  # of a replay, of every turn
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:  # compiles and tunes what is not yet
                call()
            rough = _event_us(calls[-1])
        rounds = math.ceil((LAUNCHES if rough < SLOW_US else 1) / len(calls))
        self.launches = rounds * len(calls)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which gives torch's free memory back to the driver each time.
        with torch.cuda.stream(stream):
            self.graph.capture_begin()
            try:
                for _ in range(rounds):
                    for call in calls:
                        call()
            finally:
                self.graph.capture_end()
        self.plan(_event_us(self.graph.replay))

    def plan(self, us: float) -> None:
        """What a turn is, for replays of so many microseconds."""
        self.unmeasured = us < TURN_US  # whether a turn has a replay that does not count
        self.replays = max(1, round(TURN_US / us)) if us > LONG_US else 1  # of a turn

    def turn(self) -> None:
        """Some replays, one behind the other."""
        if self.unmeasured:
            self.graph.replay()
        self.times.append(_event_us(self.measured) / self.replays)

    @property
    def enough(self) -> bool:
        """Whether a turn more would take too long for what it adds."""
        return len(self.times) > 1 and sum(self.times) * self.replays > ENOUGH_US

    def measured(self) -> None:
        for _ in range(self.replays):
            self.graph.replay()

    def median(self) -> float:
        """Microseconds of a call."""
        return median(self.times[1:]) / self.launches


def _event_us(call: Callable[[], Any]) -> float:
    """One call on the current stream, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1e3


def _clock_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Each call by the clock: a CPU runs it to the end before it returns.

    Every one is made once before: its copy of a weight may be laid out at its first call.
    """
    for call in calls:
        call()
    times: list[float] = []
    stop = time.perf_counter() + CPU_SECONDS
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


class ReadFloor:
    """Time to read some bytes and do nothing else: interpolated between measured points."""

    def __init__(self, points: Iterable[tuple[int, float]]):
        """points: two or more of (bytes, microseconds)."""
        self.points = sorted(points)
        if len(self.points) < 2:
            raise InvalidInput(f"a read floor needs 2 or more points, not {len(self.points)}")

    def __call__(self, nbytes: int) -> float:
        """Microseconds; beyond the points, the nearest two go on as a straight line."""
        at = bisect_left(self.points, (nbytes, 0.0))
        at = min(max(at, 1), len(self.points) - 1)
        (size0, us0), (size1, us1) = self.points[at - 1 : at + 1]
        us = us0 + (us1 - us0) * (nbytes - size0) / (size1 - size0)
        return us if nbytes >= size0 else max(us, us0 * nbytes / size0)

    @classmethod
    def measure(cls, device: torch.device, megabytes: Sequence[int] | None = None) -> "ReadFloor":
        """Read random data of every size from rotated copies, as weights are read."""
        points = []
        for size in (mb * 1_000_000 for mb in megabytes or FLOOR_MEGABYTES[device.type]):
            words = size // 4096 * 1024
            count = max(2, math.ceil(COLD_BYTES / size))
            data = [torch.randn(words, device=device) for _ in range(count)]
            points.append((words * 4, min(median_us(c, device) for c in _readers(data, device))))
        return cls(points)


def _readers(data: list[Tensor], device: torch.device) -> Iterator[list[Callable[[], Any]]]:
    """Ways to read whole tensors; the fastest at each size is the floor."""
    if device.type == "cpu":
        yield [t.sum for t in data]
        ones = torch.ones(1024)
        yield [partial(torch.mv, t.view(-1, 1024), ones) for t in data]
        return
    from anybit.kernels.triton.read import CONFIGS, read

    for config in CONFIGS:
        yield [partial(read, t.view(torch.int32), config) for t in data]


def check_alive(device: torch.device, what: str) -> None:
    """Unsupported where `what`, the last that ran, left a GPU of which nothing is to be had."""
    try:
        synchronize(device)
    except RuntimeError as error:
        raise Unsupported(
            f"{what} left the GPU unusable ({in_a_line(error)}); measure other formats, and "
            "report this one"
        ) from error


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU does, and raise what it died of."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
