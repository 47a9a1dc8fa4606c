"""Tiles of one's own GPU: what is kept, what is used, and what tuning refuses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import anybit
from anybit.kernels.triton import tiles, tuned
from anybit.kernels.triton.tiles import Tile

pytest.importorskip("triton")

from anybit.kernels.triton import backend
from anybit.kernels.triton.layout import layout_of
from anybit.measure import timing, tune

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
    times = tune.time_tiles(packed, activation, 3)
    assert list(times) == some
    assert all(us > 0 for us in times.values())

    monkeypatch.setattr(backend, "multiply", lambda x, *args: x.new_zeros(3, 40))
    with pytest.raises(RuntimeError, match="wrong by 1"):
        tune.time_tiles(packed, activation, 3)


@pytest.mark.parametrize("family", ["rows", "groups", "planes", "tables", "psumbook"])
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
    tune.time_tiles(anybit.quantize_tensor(torch.randn(40, 256), fmt), activation, 100)
    assert (Tile("dense") in offered) == (activation is None)


def test_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="torch sees none"):
        tune.tune(["int4"], [(128, 128)], [1], print, torch.device("cpu"))
