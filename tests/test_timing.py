"""Times of work that is compared: turns, what one raises, the read floor."""

from functools import partial
from typing import Any

import pytest
import torch

from anybit.measure import timing
from anybit.measure.timing import ReadFloor

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLOOR = ReadFloor([(1_000_000, 3.0), (2_000_000, 4.0), (10_000_000, 20.0)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for tests: few copies, short measurements."""
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.002)


# The read floor.


@pytest.mark.parametrize(
    ("nbytes", "us"),
    [
        (1_000_000, 3.0),  # a point is itself
        (1_500_000, 3.5),
        (6_000_000, 12.0),
        (10_000_000, 20.0),
        (14_000_000, 28.0),  # beyond the points the last segment goes on
        (500_000, 2.5),  # and the first, towards the cost of a launch
    ],
)
def test_the_floor_is_linear_between_points_and_beyond(nbytes, us):
    assert FLOOR(nbytes) == pytest.approx(us)


def test_the_floor_of_few_bytes_is_positive_whatever_was_measured():
    noisy = ReadFloor([(1_000_000, 3.0), (2_000_000, 9.0)])
    assert noisy(100_000) == pytest.approx(0.3)  # the line would give a negative time


def test_a_floor_needs_two_points():
    with pytest.raises(ValueError, match="2 or more points, not 1"):
        ReadFloor([(1, 1.0)])


def test_the_measured_floor_holds_the_sizes_asked_for():
    floor = ReadFloor.measure(CPU, (1, 2))
    assert [size for size, _ in floor.points] == [999_424, 1_998_848]
    assert all(us > 0 for _, us in floor.points)


# Turns.


class Graph:
    """Stands for a CUDA graph: `name` says when it breaks; its turns are noted."""

    turns: list[str]

    def __init__(self, calls: list[str]) -> None:
        (self.name,) = calls
        self.enough = False
        if self.name == "no graph":
            raise RuntimeError("no kernel")

    def turn(self) -> None:
        self.turns.append(self.name)
        if self.name == "no turn":
            raise ValueError("no memory")
        self.enough = self.name == "long" and self.turns.count("long") == 2

    def median(self) -> float:
        return float(len(self.name))


def test_contestants_on_a_gpu_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one turn a round, in another order each time; what one raises is its result."""
    monkeypatch.setattr(timing, "_Graph", Graph)
    Graph.turns = turns = []
    names = ["a", "no graph", "bb", "no turn", "ccc", "long"]
    found = timing.medians_in_turns([[name] for name in names], GPU)  # type: ignore[list-item]
    assert [found[i] for i in (0, 2, 4, 5)] == [1.0, 2.0, 3.0, 4.0]
    assert isinstance(found[1], RuntimeError)
    assert isinstance(found[3], ValueError)
    assert turns.count("no turn") == 1
    assert turns.count("long") == 2
    short = [name for name in turns if name in ("a", "bb", "ccc")]
    rounds = [tuple(short[i : i + 3]) for i in range(0, len(short), 3)]
    assert len(rounds) == 1 + timing.ROUNDS
    assert all(sorted(order) == ["a", "bb", "ccc"] for order in rounds)
    assert len(set(rounds)) > 1


def test_what_raises_on_a_cpu_stops_no_other() -> None:
    def broken() -> None:
        raise KeyError("x")

    found = timing.medians_in_turns([[broken], [lambda: None]], CPU)
    assert isinstance(found[0], KeyError)
    assert isinstance(found[1], float)
    with pytest.raises(KeyError):
        timing.median_us([broken], CPU)


def test_every_copy_is_called_once_before_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call may lay out its copy's weight, which takes longer than the product."""
    clock, calls = [0.0], [0] * 8
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def product(copy: int) -> None:
        clock[0] += 1e-6 if calls[copy] else 1.0
        calls[copy] += 1

    copies = [partial(product, copy) for copy in range(len(calls))]
    assert timing.median_us(copies, CPU) == pytest.approx(1.0)
    assert max(calls) - min(calls) <= 1  # they take turns


@pytest.mark.parametrize(
    ("us", "unmeasured", "replays", "turns"),
    [(100.0, 1, 1, 6), (2000.0, 1, 2, 6), (8000.0, 0, 1, 6), (1.5e6, 0, 1, 2)],
)
def test_a_turn_is_long_enough_and_not_longer(
    monkeypatch: pytest.MonkeyPatch, us: float, unmeasured: int, replays: int, turns: int
) -> None:
    """A turn of short replays has one that does not count; its time is a replay's."""
    launched: list[float] = []

    class Replayed:
        def replay(self) -> None:
            launched.append(us)

    def event_us(call: Any) -> float:
        before = len(launched)
        call()
        return sum(launched[before:])

    monkeypatch.setattr(timing, "_event_us", event_us)
    graph = timing._Graph.__new__(timing._Graph)
    graph.times, graph.launches, graph.graph = [], 10, Replayed()  # type: ignore[assignment]
    graph.plan(us)
    for _ in range(6):
        if not graph.enough:
            graph.turn()
    assert graph.times == [us] * turns
    assert len(launched) == turns * (unmeasured + replays)
    assert graph.median() == us / 10
