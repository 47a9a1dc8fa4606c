"""Tiles of one's own GPU: what is kept, what is used, and what tuning refuses."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.packed import Packed
from anybit.kernels import tuned
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.jit import BuildError
from anybit.kernels.mma import linear
from anybit.kernels.mma import tiles as mma_tiles
from anybit.kernels.mma.tiles import Gpu
from anybit.kernels.mma.tiles import Tile as MmaTile
from anybit.kernels.triton import tiles
from anybit.kernels.triton.tiles import Tile

pytest.importorskip("triton")

from anybit.kernels.triton import backend
from anybit.kernels.triton.layout import layout_of
from anybit.measure import timing, tune
from tests.kernels.mma import GPUS

GPU = "NVIDIA Something 90"
FEW, MANY = Tile(rows=32, tokens=8, split=2), Tile(rows=128, tokens=64, warps=8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    tuned.load.cache_clear()
    backend.tile_for.cache_clear()
    yield tmp_path
    tuned.load.cache_clear()
    backend.tile_for.cache_clear()


def test_tuned_tiles_come_before_the_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.save(GPU, {("int4", 256, 512): [(64, MANY), (4, FEW)]})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    layout = layout_of(anybit.get_format("int4"), None)

    def tile(m: int, n: int = 256, device: str = "cuda") -> Tile:
        return backend.tile_for(layout, None, m, n, 512, torch.device(device))

    assert [tile(m) for m in (1, 4, 5, 64)] == [FEW, FEW, MANY, MANY]
    assert tile(65) == tiles.choose("rows", 65, 256)  # beyond what was tuned
    assert tile(1, n=128) == tiles.choose("rows", 1, 128)  # another shape
    assert tile(1, device="cpu") == tiles.choose("rows", 1, 256)


def test_cells_are_added_and_other_versions_ignored() -> None:
    tuned.save(GPU, {("int4", 256, 512): [(4, FEW)]})
    path = tuned.save(GPU, {("fp6", 128, 128): [(4, MANY)]})
    assert list(path.parent.iterdir()) == [path]
    assert set(tuned.load(GPU)) == {("int4", 256, 512), ("fp6", 128, 128)}
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": "0.0"}))
    tuned.load.cache_clear()
    assert tuned.load(GPU) == {}
    for damage in ('{"version"', "[]", json.dumps(data | {"tiles": [{"scheme": "int4"}]})):
        path.write_text(damage)
        tuned.load.cache_clear()
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged .* delete it"):
            tuned.load(GPU)


@pytest.mark.parametrize("scheme", ["int4:group=32", "liquid:group=32@int8"])
def test_every_candidate_is_right_and_timed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0)
    some = [Tile(rows=32, tokens=8, warps=1), Tile(rows=64, tokens=16, split=2)]
    monkeypatch.setattr(tune, "candidates", lambda *args: iter(some))
    fmt, activation = anybit.core.scheme.parse_scheme(scheme)
    packed = anybit.quantize_tensor(torch.randn(40, 256), fmt)
    [(name, times)] = tune.time_triton(packed, activation, 3)
    assert name == scheme
    assert list(times) == some
    assert all(us > 0 for us in times.values())

    monkeypatch.setattr(backend, "multiply", lambda x, *args: x.new_zeros(3, 40))
    with pytest.raises(RuntimeError, match="wrong by 1"):
        list(tune.time_triton(packed, activation, 3))


@pytest.mark.parametrize("family", ["rows", "groups", "planes", "tables"])
@pytest.mark.parametrize("m", [1, 16, 64, 1024])
def test_candidates(family: str, m: int) -> None:
    found = list(tune.candidates(family, m, 4096, dense=True))
    assert 3 <= len(found) == len(set(found)) <= 40
    assert all(t.kernel != "gemm" or t.tokens >= min(m, 32) for t in found)


@pytest.mark.parametrize("scheme", ["int4", "int4@int8", "liquid@int8", "fp6@int8", "fp6@fp8"])
def test_quantized_activations_are_never_left_out(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS multiplies the activations as they are."""
    fmt, activation = anybit.core.scheme.parse_scheme(scheme)
    offered: list[Tile] = []

    def listed(*args: object) -> Iterator[Tile]:
        offered.extend(candidates(*args))
        return iter(())

    candidates = tune.candidates
    monkeypatch.setattr(tune, "candidates", listed)
    list(tune.time_triton(anybit.quantize_tensor(torch.randn(40, 256), fmt), activation, 100))
    assert (Tile("dense") in offered) == (activation is None)


# The kernels for `mma.sync`, on a GPU that is only described.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = GPUS["RTX 3090"]
    monkeypatch.setattr(mma_tiles, "gpu_of", lambda device: found)
    monkeypatch.setattr(linear, "gpu_of", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    linear.chosen.cache_clear()
    yield found
    linear.chosen.cache_clear()


def exact(packed: Packed, spilling: MmaTile, wrong: float = 0.0) -> Callable[..., Tensor]:
    """Stands for the kernels; one tile does not compile."""

    def multiply(x: Tensor, scale: Any, sums: Any, weight: Any, bias: Any, dtype: Any, kernel: Any):
        if kernel.tile == spilling:
            raise BuildError("it spills")
        y = x.double() @ packed.dequantize().double().T * (1 + wrong)
        return (y if scale is None else y * scale[:, None]).to(dtype)

    return multiply


@pytest.mark.parametrize("scheme", ["int4:group=128", "liquid@int8"])
def test_the_fastest_kernel_comes_before_the_rule(
    scheme: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, activation = anybit.core.scheme.parse_scheme(scheme)
    packed = anybit.quantize_tensor(torch.randn(40, 256), fmt)
    device = torch.device("cpu")

    def choose(dtype: torch.dtype, m: int) -> MmaTile:
        operand = torch.int8 if activation else dtype
        return linear.chosen(fmt, activation, operand, m, 40, 256, dtype, device, 0)[0].tile

    rule = {m: choose(torch.bfloat16, m) for m in (3, 64)}
    others = tune.candidates_mma(decoder_of(scheme), gpu, 3, 40)[1:]
    fast, spilling = others[0], others[1]
    monkeypatch.setattr(linear, "multiply", exact(packed, spilling))
    # A stub timer: by the tile, and the rule's is never the best.
    monkeypatch.setattr(
        tune, "median_us", lambda calls, device: 1.0 if calls[0].args[1] == fast else 2.0
    )
    found = dict(tune.time_mma(packed, activation, 3))
    assert list(found) == [f"{scheme} in float16", f"{scheme} in bfloat16"]
    for times in found.values():
        assert rule[3] in times
        assert spilling not in times
        assert min(times, key=times.__getitem__) == fast
    tuned.save(GPU, {(f"{scheme} in bfloat16", 40, 256): [(16, fast)]})
    assert [choose(torch.bfloat16, m) for m in (1, 3, 16)] == [fast] * 3
    assert choose(torch.bfloat16, 64) == rule[64]  # beyond what was tuned
    assert choose(torch.float16, 3) == rule[3]  # another dtype

    monkeypatch.setattr(linear, "multiply", exact(packed, spilling, wrong=0.1))
    with pytest.raises(RuntimeError, match="wrong by 1"):
        list(tune.time_mma(packed, activation, 3))


def decoder_of(scheme: str) -> Decoder:
    fmt, activation = anybit.core.scheme.parse_scheme(scheme)
    return operands.decoder_for(fmt, torch.int8 if activation else torch.bfloat16)


@pytest.mark.parametrize("m", [1, 16, 17, 64, 100, 1024])
@pytest.mark.parametrize("name", GPUS)
def test_candidates_fit_the_gpu(name: str, m: int) -> None:
    gpu = GPUS[name]
    for scheme in ("int4:group=128", "liquid@int8", "fp6"):
        d = decoder_of(scheme)
        found = tune.candidates_mma(d, gpu, m, 4096)
        assert found[0] == mma_tiles.choose(d, gpu, m, 4096)
        assert 3 <= len(set(found)) == len(found) <= 14
        assert all(mma_tiles.shared_bytes(tile, d) <= gpu.shared for tile in found)


def test_what_is_tuned_reaches_shapes_that_were_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    layout = layout_of(anybit.get_format("int4"), None)
    given = layout, None, 4, 256, 512, torch.device("cuda")
    before = backend.tile_for(*given)
    assert before != FEW
    tuned.save(GPU, {("int4", 256, 512): [(4, FEW)]})
    assert backend.tile_for(*given) == FEW


def test_cells_of_other_processes_stay() -> None:
    """One that has read the file before another wrote to it adds to what is there now."""
    tuned.load(GPU)
    path = tuned.save(GPU, {("fp6", 128, 128): [(4, MANY)]})
    written = path.read_text()
    path.unlink()
    tuned.forget()
    assert tuned.load(GPU) == {}
    path.write_text(written)
    tuned.save(GPU, {("int4", 256, 512): [(4, FEW)]})
    assert set(tuned.load(GPU)) == {("int4", 256, 512), ("fp6", 128, 128)}


def test_only_one_process_writes_at_a_time(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(tmp_path, os.O_RDONLY)
    with tuned.alone(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_both_families_share_a_file() -> None:
    cell, other = ("int4", 256, 512), MmaTile(16, kind="narrow")
    tuned.save(GPU, {cell: [(4, FEW)]})
    tuned.save(GPU, {cell: [(8, other)]})
    assert tuned.tile_for(Tile, GPU, *("int4", 1, 256, 512)) == FEW
    assert tuned.tile_for(MmaTile, GPU, *("int4", 1, 256, 512)) == other
    tuned.save(GPU, {cell: [(8, replace(other, warps=8))]})  # tuned again
    assert tuned.load(GPU)[cell] == [(4, FEW), (8, replace(other, warps=8))]


def test_tune_asks_the_backend_that_multiplies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerSpec(anybit.get_format("int4"), None, (8, 128), torch.device("cuda"))
    answers: dict[str, str | None] = {"mma": None, "triton": None}
    monkeypatch.setattr(
        tune, "get_backend",
        lambda name: SimpleNamespace(refuse=lambda layer: answers[name]),
    )  # fmt: skip
    assert tune.backend_for(layer) == "mma"
    books = layer._replace(format=anybit.get_format("codebook:m=1,v=4"))
    assert tune.backend_for(books) == "triton"  # the other has no tiles to choose from
    answers["mma"] = "takes no such layer"
    assert tune.backend_for(layer) == "triton"
    answers["triton"] = "is not installed"
    with pytest.raises(ValueError, match="mma takes no such layer; triton is not installed"):
        tune.backend_for(layer)


def test_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="torch sees none"):
        tune.tune(["int4"], [(128, 128)], [1], print, torch.device("cpu"))
