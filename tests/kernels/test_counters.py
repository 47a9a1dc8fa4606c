"""Counters of CTAs that share tiles: which launches have the same, and when they are zeros."""

import ctypes
import os
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anybit
from anybit.core.format import get_format
from anybit.kernels.cute import counters, driver
from anybit.kernels.cute.counters import LEAST, SLAB, zeros
from anybit.kernels.hopper import scalar_linear
from anybit.nn.linear import QuantLinear

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
CUDA = torch.device("cuda", 0)
GRAPH = 1000  # and the number of its capture: its address
INVALID = 900  # what the driver says of calls that a capture does not allow


class Driver(SimpleNamespace):
    """libcuda, of whose streams some are being captured.

    Args:
        capture: The number of the capture of the current stream; 0: none.
        filled: Addresses whose zeros have been waited for.
    """

    free: int

    def __init__(self) -> None:
        super().__init__(stream=1, capture=0, mode=0, free=1 << 40, filled=[], own=[], pending={})
        self.objects: list[tuple[Any, Any]] = []
        self.owned: dict[int, list[tuple[Any, Any]]] = {}

    def cuStreamGetCaptureInfo_v2(
        self, stream: Any, status: Any, number: Any, graph: Any, *rest: Any
    ) -> int:
        assert stream.value == self.stream
        assert rest == (None, None)
        number._obj.value, graph._obj.value = self.capture, GRAPH + self.capture
        return 0

    def cuUserObjectCreate(self, to: Any, *given: Any) -> int:
        assert given[2:] == (1, counters.NOT_WAITED_FOR)
        to._obj.value = len(self.objects) + 1
        self.objects.append(given[:2])
        return 0

    def cuGraphRetainUserObject(self, graph: Any, owned: Any, count: int, flags: int) -> int:
        assert (count, flags) == (1, counters.MOVED)
        self.owned.setdefault(graph.value - GRAPH, []).append(self.objects[owned.value - 1])
        return 0

    def destroy(self, capture: int) -> None:
        """End the graph of a capture, as the driver does."""
        for what, function in self.owned.pop(capture):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)(what)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def _forbidden(self) -> int:
        return INVALID if self.capture and self.mode != counters.RELAXED else 0

    def cuMemAlloc_v2(self, to: Any, size: Any) -> int:
        to._obj.value, self.free = self.free, self.free + size.value
        return self._forbidden()

    def cuStreamCreate(self, to: Any, flags: int) -> int:
        assert flags == counters.NON_BLOCKING
        to._obj.value = 100 + len(self.own)
        self.own.append(to._obj.value)
        return 0

    def cuMemsetD32Async(self, at: Any, value: int, words: Any, stream: Any) -> int:
        assert value == 0
        assert stream.value in self.own  # no stream of a capture
        self.pending[stream.value] = at.value, words.value
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        self.filled.append(self.pending.pop(stream.value))
        return self._forbidden()

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        self.own.remove(stream.value)
        return 0

    def cuGetErrorString(self, error: int, to: Any) -> int:
        ctypes.cast(to, ctypes.POINTER(ctypes.c_char_p))[0] = b"not while capturing"
        return 0


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see no counters but its own."""
    for name, empty in (("_kept", {}), ("_slabs", {}), ("_lent", []), ("_returned", {})):
        monkeypatch.setattr(counters, name, empty)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "driver", lambda: fake)
    forget(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: fake.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capture != 0)
    return fake


def test_launches_that_may_run_at_once_have_counters_of_their_own(fake: Driver) -> None:
    """Streams, captures of one stream, and streams of one capture."""
    places = [(1, 0), (2, 0), (1, 7), (2, 7), (1, 8)]  # stream, capture
    found = []
    for fake.stream, fake.capture in places:
        found.append(zeros(132, CUDA))
    assert len(set(found)) == len(places)
    assert sorted(found) == [found[0] + 4 * LEAST * i for i in range(len(places))]
    assert fake.filled == [(found[0], SLAB)]
    again = []
    for fake.stream, fake.capture in places:
        again.append(zeros(LEAST, CUDA))
    assert again == found  # launches of one stream, which run one after the other
    assert zeros(1, torch.device("cuda", 1)) not in found
    assert (fake.own, fake.pending, fake.mode) == ([], {}, 0)


def test_more_counters_than_before(fake: Driver) -> None:
    few, many = zeros(1, CUDA), zeros(3 * LEAST, CUDA)
    assert (many, fake.filled) == (few + 4 * LEAST, [(few, SLAB)])
    large = zeros(SLAB + 1, CUDA)
    assert fake.filled[1:] == [(large, SLAB + 1)]
    assert zeros(1, CUDA) == large


def test_counters_of_graphs_that_are_gone_serve_later_captures(fake: Driver) -> None:
    """And of no other graph, whatever a capture has taken."""

    def captured(number: int, words: int = 1) -> int:
        fake.capture = number
        return zeros(words, CUDA)

    one, other = captured(1), captured(2)
    more = captured(1, 2 * LEAST)
    for number in range(3, 100):
        fake.destroy(1)
        assert (captured(number), captured(number, 2 * LEAST)) == (one, more)
        assert len(counters._kept) == 2
        fake.owned[1] = fake.owned.pop(number)
    assert captured(2) == other
    assert captured(100) not in (one, more, other)
    assert fake.filled == [(one, SLAB)]


def test_threads_get_counters_of_their_own(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the interpreter goes on with another thread while the driver takes memory."""
    both = threading.Barrier(2)
    streams, found = threading.local(), []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: streams.own)

    def slow(words: int) -> int:
        time.sleep(0.01)
        fake.free += 4 * words
        return fake.free

    def launch(stream: int) -> None:
        streams.own = stream
        both.wait()
        found.append(zeros(1, CUDA))

    monkeypatch.setattr(counters, "fresh", slow)
    threads = [threading.Thread(target=launch, args=(stream,)) for stream in (5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert abs(found[0] - found[1]) == 4 * LEAST


def test_a_failure_leaves_the_mode_of_the_thread(
    fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.capture = 5
    monkeypatch.setattr(fake, "_forbidden", lambda: INVALID)
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2: not while capturing"):
        zeros(1, CUDA)
    assert fake.mode == 0
    assert counters._kept == {}


def shares_tiles() -> bool:
    return DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def sharing() -> tuple[QuantLinear, int]:
    """A layer, and a number of tokens for which CTAs share tiles."""
    fmt, shape, half = get_format("int4:group=128"), (9216, 4096), torch.float16
    layer = QuantLinear(anybit.quantize_tensor(torch.randn(shape, device=DEVICE), fmt))
    for m in range(33, 513):
        way = scalar_linear.chosen(fmt, None, half, m, *shape, half, CUDA, None, 0)
        if any(launch.work for launch in way.launches):
            return layer, m
    raise AssertionError(f"CTAs share no tiles of {shape}: this shows nothing")


@pytest.mark.skipif(not shares_tiles(), reason="needs Hopper, whose CTAs share tiles")
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_of_one_stream_are_replayed_on_two_at_once(warm: bool) -> None:
    """Captured with and without a launch before, which leaves counters for the stream."""
    layer, m = sharing()
    given = [torch.randn(m, 4096, device=DEVICE, dtype=torch.float16) for _ in range(2)]
    before, stream = set(counters._kept), torch.cuda.Stream()
    graphs, found = [], []
    layer.prepare(torch.float16)
    for x in given:
        if warm:
            with torch.cuda.stream(stream):
                layer(x)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            found.append([layer(x) for _ in range(10)])
    captures = {capture for _, _, capture in set(counters._kept) - before if capture}
    assert len(captures) == 2  # tiles were shared, or this shows nothing
    want = [layer(x) for x in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, own in zip(graphs, streams, strict=True):
            with torch.cuda.stream(own):
                graph.replay()
        torch.cuda.synchronize()
        for ys, y in zip(found, want, strict=True):
            assert all(torch.equal(y, other) for other in ys)


@pytest.mark.skipif(not shares_tiles(), reason="needs Hopper, whose CTAs share tiles")
def test_graphs_that_are_dropped_give_their_counters_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    layer, m = sharing()
    x = torch.randn(m, 4096, device=DEVICE, dtype=torch.float16)
    want, taken = layer(x), []
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        del graph
        torch.cuda.synchronize()
        assert torch.equal(y, want)
        deadline = time.monotonic() + 60
        while counters._lent and time.monotonic() < deadline:  # until the driver's thread says so
            counters.take_back()
        assert not counters._lent
        taken.append(counters._slabs[0])
    assert taken == taken[:1] * len(taken)
