"""What reaches the driver: a fake libcuda looks at every launch."""

import ctypes
import json
import sys
import threading
from ctypes import POINTER, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.kernels.cute import driver
from anybit.kernels.cute.driver import Attribute, Config, sizes
from anybit.kernels.hopper import launch
from anybit.kernels.hopper.launch import ClusterLauncher, GemmLauncher

GEMM, CODEBOOK = GemmLauncher.arguments, ClusterLauncher.arguments
META = {"entry": "kernel", "shared": 4096, "threads": 288, "cluster": 2, "box": 8}


class Driver(SimpleNamespace):
    """libcuda's functions. Launches are read as the driver does, and kept as dictionaries."""

    def __init__(self, arguments: type[ctypes.Structure]):
        self.launches: list[dict[str, Any]] = []
        self.calls: list[tuple] = []
        wanted = (ctypes.c_int, POINTER(Config), c_void_p, POINTER(c_void_p), c_void_p)

        def start(config: Any, kernel: int, parameters: Any, extra: int) -> int:
            c = config.contents
            found = {"grid": c.grid[0], "stream": c.stream, "shared": c.shared, "count": c.count}
            found["block"], found["cluster"] = c.block[0], c.attributes[0].value[0]
            for i, (name, kind) in enumerate(arguments._fields_):  # type: ignore[misc]
                value: Any = kind.from_address(parameters[i])
                found[name] = list(value) if isinstance(value, ctypes.Array) else value.value
            self.launches.append(found)
            return 0

        super().__init__(cuLaunchKernelEx=ctypes.CFUNCTYPE(*wanted)(start))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def called(*args: Any) -> int:
            self.calls.append((name, *args))
            return 0

        return called

    def cuTensorMapEncodeTiled(self, to: c_void_p, *rest: Any) -> int:
        address, (k, m) = rest[2], rest[3]
        words = (c_uint64 * 16).from_address(to.value or 0)
        words[0], words[1], words[2] = address.value, m, k
        return 0


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    launch.tensor_map.cache_clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    file = tmp_path / "a.kernel"
    file.write_bytes(json.dumps(META).encode() + b"\n\x7fELF")
    return file


class Activations:
    """What a launcher asks of a tensor on a GPU."""

    dtype = torch.float16
    device = torch.device("cuda", 0)

    def __init__(self, address: int, *shape: int):
        self.address, self.shape = address, shape

    def data_ptr(self) -> int:
        return self.address


def use(monkeypatch: pytest.MonkeyPatch, arguments: type[ctypes.Structure]) -> Driver:
    fake = Driver(arguments)
    monkeypatch.setattr(driver, "driver", lambda: fake)
    return fake


def test_structs_are_those_of_cuda_and_of_the_kernels() -> None:
    assert sizes(GEMM) == [128, 8, *[8] * 12, *[4] * 5, 1]
    assert sizes(CODEBOOK) == [*[8] * 8, *[4] * 6]
    assert ctypes.sizeof(Config) == 56  # CUlaunchConfig and CUlaunchAttribute, by cuda.h
    assert ctypes.sizeof(Attribute) == 72
    assert Config.stream.offset == 32


def gemm_launch(i: int) -> tuple[dict[str, Any], int]:
    """The i-th launch's parameters, all of them different, and its CTAs."""
    values: dict[str, Any] = {name: i * 1000 + 16 * j for j, (name, _) in enumerate(GEMM._fields_)}  # type: ignore[misc]
    x = Activations(i << 20, i, 128 * i)
    return values | {"x": x, "m": i, "k": 128 * i}, 3 * i


def belongs(found: dict[str, Any], i: int) -> bool:
    """Whether everything that the driver saw is of the i-th launch."""
    values, grid = gemm_launch(i)
    x, m, k = values["x"], values["m"], values["k"]
    seen_map = (c_uint64 * 16).from_buffer_copy(bytes(found["x_map"]))
    names = [name for name, _ in GEMM._fields_[2:-1]]  # type: ignore[misc]
    return (
        all(found[name] == values[name] for name in names)
        and list(seen_map[:3]) == [x.data_ptr(), m, k]
        and found["x_shape"] == [m, k]
        and found["grid"] == grid
    )


def test_a_gemm_launch(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    fake = use(monkeypatch, GEMM)
    launcher = GemmLauncher(path, 3)
    attribute = next(call for call in fake.calls if call[0] == "cuKernelSetAttribute")
    assert attribute[1:3] == (driver.SHARED_LIMIT, 4096)
    for i in (1, 2):
        launcher.launch(*gemm_launch(i), overlap=i == 1)
    assert [belongs(found, i) for i, found in enumerate(fake.launches, 1)] == [True] * 2
    for found, count in zip(fake.launches, (2, 1), strict=True):
        assert (found["block"], found["cluster"], found["shared"]) == (288, 2, 4096)
        assert (found["stream"], found["accumulate"], found["count"]) == (77, 1, count)


def test_a_codebook_launch(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    fake = use(monkeypatch, CODEBOOK)
    launcher = ClusterLauncher(path, 0)
    names = [name for name, _ in CODEBOOK._fields_]  # type: ignore[misc]
    numbers = [16, 1, 2, 3, 4, 5, 0, 0, 2, 640, 512, 8, 1, 1], [32, *range(1, 13), 0]
    for each, grid, shared in zip(numbers, (24, 22), (9000, 800), strict=True):
        values = dict(zip(names, each, strict=True))
        launcher.launch(values | {"shared": shared}, grid, bool(values["early"]))
    assert [[found[name] for name in names] for found in fake.launches] == [*numbers]
    rest = [[found[name] for name in ("grid", "cluster", "shared")] for found in fake.launches]
    assert rest == [[24, 8, 9000], [22, 11, 800]]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_driver_is_asked_for_clusters_as_they_are_launched(
    monkeypatch: pytest.MonkeyPatch, path: Path, overlap: bool
) -> None:
    """It knows a cluster's size by an attribute alone, whatever was launched before."""

    def most_clusters(count: Any, kernel: Any, given: Any) -> int:
        config: Any = ctypes.cast(given, POINTER(Config)).contents
        found = [config.attributes[i] for i in range(config.count)]
        of_cluster = [each.value[0] for each in found if each.id == driver.CLUSTER]
        if len(found) != 1 or not of_cluster or config.grid[0] % of_cluster[0]:
            return 1
        ctypes.cast(count, POINTER(ctypes.c_int))[0] = 132 // of_cluster[0]
        return 0

    fake = use(monkeypatch, CODEBOOK)
    fake.cuOccupancyMaxActiveClusters = most_clusters
    launcher = ClusterLauncher(path, 0)
    assert launcher.most_clusters(14, 9000) == 9
    values = {name: 8 for name, _ in CODEBOOK._fields_}  # type: ignore[misc]
    launcher.launch(values | {"shared": 9000}, 24, overlap)
    assert launcher.most_clusters(8, 9000) == 16
    fake.cuOccupancyMaxActiveClusters = lambda *args: 912  # an error
    fake.cuGetErrorString = lambda error, text: 0
    assert launcher.most_clusters(4, 9000) == 0


def test_threads_launch_the_same_kernel(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """No launch has a pointer or a number of another thread's."""
    fake = use(monkeypatch, GEMM)
    launcher = GemmLauncher(path, 0)
    threads, each = 4, 500
    ready = threading.Barrier(threads)

    def work(first: int) -> None:
        ready.wait()
        for i in range(first, threads * each + 1, threads):
            launcher.launch(*gemm_launch(i), overlap=True)

    monkeypatch.setattr(launch, "tensor_map", lru_cache(64)(launch.tensor_map.__wrapped__))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=work, args=(1 + i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found["m"] for found in fake.launches) == list(range(1, threads * each + 1))
    wrong = [found["m"] for found in fake.launches if not belongs(found, found["m"])]
    assert wrong == []
