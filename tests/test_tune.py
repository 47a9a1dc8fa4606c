"""Launches of one's own GPU: what is kept, what is used, and what tuning refuses."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.kernels import registry, tuned
from anybit.kernels.backend import Backend, LayerSpec
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.jit import BuildError
from anybit.kernels.hopper import choices, codebook_linear, lookup, scalar_linear
from anybit.kernels.hopper.chip import H200
from anybit.kernels.mma import linear
from anybit.kernels.mma import tiles as mma_tiles
from anybit.kernels.triton import tiles
from anybit.kernels.triton.tiles import Tile
from anybit.kernels.tuned import Cell, Winner

pytest.importorskip("triton")

from anybit.kernels.triton import backend
from anybit.kernels.triton.layout import layout_of
from anybit.measure import timing, tune
from tests.kernels.mma import GPUS

GPU = "NVIDIA Something 90"
CUDA, HALF, BRAIN = torch.device("cuda", 0), torch.float16, torch.bfloat16
SCHEME, BOOK, N, K = "int4:group=128", "codebook:m=2,v=8,b=8,group=128", 6144, 4096
CELL = Cell("triton", "int4", "float16", 256, 512)
FEW, MANY = Winner(4, "a launch"), Winner(64, "another")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    tuned.forget()
    yield tmp_path
    tuned.forget()


# What is chosen, by families.


class Family(NamedTuple):
    """How a family chooses for a scheme and K inputs.

    Attributes:
        name: Of the backend.
        scheme: Its layer's.
        choose: (tokens, dtype, rows) -> the name of the launch.
        offered: Tokens -> the names that may be tuned.
    """

    name: str
    scheme: str
    choose: Callable[..., str]
    offered: Callable[[int], list[str]]


def triton_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    layout = layout_of(anybit.get_format(SCHEME), None)

    def choose(m: int, dtype: torch.dtype = BRAIN, n: int = N) -> str:
        return str(backend.tile_for(layout, None, dtype, m, n, K, CUDA))

    def offered(m: int) -> list[str]:
        return [str(tile) for tile in tiles.tried("groups", m, N, True)]

    return Family("triton", SCHEME, choose, offered)


def mma_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    gpu, fmt = GPUS["RTX 3090"], anybit.get_format(SCHEME)
    monkeypatch.setattr(linear, "gpu_of", lambda device: gpu)

    def choose(m: int, dtype: torch.dtype = BRAIN, n: int = N) -> str:
        return linear.chosen(fmt, None, dtype, m, n, K, dtype, CUDA, 0)[0].tile.name

    d = decoder_of(SCHEME)
    return Family("mma", SCHEME, choose, lambda m: [t.name for t in mma_tiles.tried(d, gpu, m, N)])


def hopper_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    fmt, seen, by_cost = anybit.get_format(SCHEME), [], choices.choose
    for module in (scalar_linear, linear):
        monkeypatch.setattr(module, "loaded", lambda kernel, device: None)
    monkeypatch.setattr(scalar_linear, "chip_of", lambda device: H200)
    monkeypatch.setattr(choices, "choose", lambda *args: seen.append(by_cost(*args)) or seen[-1])

    def choose(m: int, dtype: torch.dtype = BRAIN, n: int = N) -> str:
        scalar_linear.chosen(fmt, None, dtype, m, n, K, dtype, CUDA, None, 0)
        return seen[-1].name

    def offered(m: int) -> list[str]:
        return [way.name for _, way in choices.ways(decoder_of(SCHEME), m, N, K)]

    return Family("hopper", SCHEME, choose, offered)


def codebook_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    fmt, seen, by_cost = anybit.get_format(BOOK), [], lookup.choose
    launcher = SimpleNamespace(most_clusters=lambda cluster, shared: 16)
    for module in (scalar_linear, codebook_linear):
        monkeypatch.setattr(module, "loaded", lambda kernel, device: launcher)
        monkeypatch.setattr(module, "chip_of", lambda device: H200)

    def spy(*args: Any) -> Any:
        seen.append(by_cost(*args))
        return seen[-1]

    monkeypatch.setattr(codebook_linear, "choose", spy)

    def choose(m: int, dtype: torch.dtype = BRAIN, n: int = N) -> str:
        codebook_linear.chosen(fmt, m, n, K, dtype, CUDA, None)
        return seen[-1].name

    def offered(m: int) -> list[str]:
        return [way.name for _, way in lookup.ways(lookup.lookup(fmt, BRAIN), m, N, K)]

    return Family("hopper", fmt.spec, choose, offered)


@pytest.fixture(params=[triton_family, mma_family, hopper_family, codebook_family])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    made: Family = request.param(monkeypatch)
    return made


def decoder_of(scheme: str) -> Decoder:
    fmt, activation = parse_scheme(scheme)
    return operands.decoder_for(fmt, torch.int8 if activation else BRAIN)


@pytest.mark.parametrize("most", [8, 256])
def test_what_is_tuned_comes_before_the_rules(family: Family, most: int) -> None:
    """For layers that were multiplied before as well."""
    name, scheme, choose, offered = family
    elsewhere = [(most, HALF, N), (most, BRAIN, N // 2), (most + 1, BRAIN, N)]
    rule, rules = choose(most), [choose(*problem) for problem in elsewhere]
    names, cell = offered(most), Cell(name, scheme, "bfloat16", N, K)
    assert len(names) == len(set(names)) > 1
    for other in names:
        tuned.save(GPU, {cell: [Winner(most, other)]})
        assert choose(most) == other
        assert [choose(*problem) for problem in elsewhere] == rules
    tuned.save(GPU, {cell: [Winner(most, "what is no candidate any more")]})
    assert choose(most) == rule
    tuned.save(GPU, {cell: [], cell._replace(backend="another"): [Winner(most, names[-1])]})
    assert choose(most) == rule


def test_the_next_larger_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, choose, offered = mma_family(monkeypatch)
    few, many, rule = offered(4)[-1], offered(64)[-1], choose(15)
    cell = Cell("mma", SCHEME, "bfloat16", N, K)
    tuned.save(GPU, {cell: [Winner(64, many), Winner(4, few)]})
    # What was timed speaks for down to a quarter as many tokens.
    assert [choose(m) for m in (1, 4, 15, 16, 64)] == [few, few, rule, many, many]


def test_between_numbers_of_tokens_the_model_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best for 1,024 tokens is not imposed on 65, but holds where the model agrees."""
    _, _, choose, offered = hopper_family(monkeypatch)
    counts = range(65, 1025, 7)
    rules = [choose(m) for m in counts]
    for other in offered(1024):
        tuned.save(GPU, {Cell("hopper", SCHEME, "bfloat16", N, K): [Winner(1024, other)]})
        found = [choose(m) for m in counts]
        assert all(name in (rule, other) for name, rule in zip(found, rules, strict=True))
        assert choose(1024) == other
        costs = {way.name: time for time, way in choices.ways(decoder_of(SCHEME), 1024, N, K)}
        for m, name in zip(counts, found, strict=True):
            here = {way.name: time for time, way in choices.ways(decoder_of(SCHEME), m, N, K)}
            worse = here.get(other, torch.inf) / min(here.values())
            assert (name == other) == (worse <= costs[other] / min(costs.values()))


# The file.


def test_cells_are_added_and_other_versions_ignored() -> None:
    tuned.save(GPU, {CELL: [FEW]})
    path = tuned.save(GPU, {CELL._replace(scheme="fp6"): [MANY, FEW]})
    assert list(path.parent.iterdir()) == [path]
    assert tuned.load(GPU) == {CELL: [FEW], CELL._replace(scheme="fp6"): [FEW, MANY]}
    tuned.save(GPU, {CELL: [MANY]})  # tuned again
    assert tuned.load(GPU)[CELL] == [MANY]
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": "0.0"}))
    tuned.forget()
    assert tuned.load(GPU) == {}
    path.write_text(json.dumps({"version": data["version"], "gpu": GPU, "tiles": []}))
    tuned.forget()
    assert tuned.load(GPU) == {}  # of an older layout
    for damage in ('{"version"', "[]", json.dumps(data | {"launches": [{"scheme": "int4"}]})):
        path.write_text(damage)
        tuned.forget()
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged .* delete it"):
            tuned.load(GPU)


def test_cells_of_other_processes_stay() -> None:
    """One that has read the file before another wrote to it adds to what is there now."""
    tuned.load(GPU)
    other = CELL._replace(backend="hopper")
    path = tuned.save(GPU, {other: [MANY]})
    written = path.read_text()
    path.unlink()
    tuned.forget()
    assert tuned.load(GPU) == {}
    path.write_text(written)
    tuned.save(GPU, {CELL: [FEW]})
    assert set(tuned.load(GPU)) == {other, CELL}


def test_only_one_process_writes_at_a_time(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(tmp_path, os.O_RDONLY)
    with tuned.alone(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


# Timing.


def exact(packed: Packed, spilling: str, wrong: float = 0.0) -> Callable[..., Tensor]:
    """Stands for the kernels; one does not compile. It is told a kernel, or a choice."""

    def multiply(x: Tensor, scale: Any, sums: Any, weight: Any, bias: Any, dtype: Any, told: Any):
        if getattr(told, "tile", told).name == spilling:
            raise BuildError("it spills")
        y = x.double() @ packed.dequantize().double().T * (1 + wrong)
        return (y if scale is None else y * scale[:, None]).to(dtype)

    return multiply


@pytest.mark.parametrize("scheme", [SCHEME, "liquid@int8"])
@pytest.mark.parametrize("name", ["mma", "hopper"])
def test_every_candidate_is_compared_and_takes_its_turn(
    name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "gpu_of", lambda device: GPUS["RTX 3090"])
    monkeypatch.setattr(scalar_linear, "chip_of", lambda device: H200)
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)  # two copies
    turns: list[int] = []

    def in_turns(contestants: list[list[Any]], device: torch.device) -> list[Any]:
        turns.append(len(contestants))
        assert all(len({*calls}) == len(calls) > 1 for calls in contestants)  # cold weights
        return [float(at) for at in range(len(contestants))]

    monkeypatch.setattr(tune, "medians_in_turns", in_turns)
    fmt, activation = parse_scheme(scheme)
    packed = anybit.quantize_tensor(torch.randn(40, 256), fmt)
    d, counts = decoder_of(scheme), [3, 100]
    every = {
        "mma": [[t.name for t in mma_tiles.tried(d, GPUS["RTX 3090"], m, 40)] for m in counts],
        "hopper": [[way.name for _, way in choices.ways(d, m, 40, 256)] for m in counts],
    }[name]
    spilling, family = every[1][1], {"mma": linear, "hopper": scalar_linear}[name]
    monkeypatch.setattr(family, "multiply", exact(packed, spilling))
    found = dict(tune.time_layer(name, packed, activation, BRAIN, counts))
    for names, m in zip(every, counts, strict=True):
        assert list(found[m]) == [each for each in names if each != spilling]
        assert list(found[m].values()) == list(range(len(found[m])))
    assert turns == [len(times) for times in found.values()]

    monkeypatch.setattr(tune, "medians_in_turns", lambda calls, device: [ValueError("a fault")])
    with pytest.raises(ValueError, match="a fault"):
        next(tune.time_layer(name, packed, activation, BRAIN, [1]))
    monkeypatch.setattr(family, "multiply", exact(packed, spilling, wrong=0.1))
    with pytest.raises(RuntimeError, match=f"{fmt.spec} M=3 .*: wrong by 1"):
        next(tune.time_layer(name, packed, activation, BRAIN, counts))


def test_codebooks_have_plans_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook_linear, "chip_of", lambda device: H200)
    monkeypatch.setattr(timing, "CPU_SECONDS", 0)
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)
    packed = anybit.quantize_tensor(torch.randn(40, 256), BOOK)

    def multiply(x: Tensor, weight: Any, bias: None, way: Any) -> Tensor:
        return (x.double() @ packed.dequantize().double().T).to(x.dtype)

    monkeypatch.setattr(codebook_linear, "multiply", multiply)
    found = dict(tune.time_layer("hopper", packed, None, BRAIN, [4, 16, 100, 16384]))
    tiles_of = {m: [name for name in times if "cluster" not in name] for m, times in found.items()}
    assert not tiles_of[4]
    assert 0 < len(tiles_of[16]) < len(found[16])
    assert tiles_of[100] == list(found[100])
    assert found[4]
    assert not found[16384]  # by a dense weight


@pytest.mark.parametrize("scheme", ["int4:group=32", "liquid:group=32@int8"])
def test_triton_is_right_and_timed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0)
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)  # two copies, of which each is interpreted
    some = [Tile(rows=32, tokens=8, warps=1), Tile(rows=64, tokens=16, split=2)]
    monkeypatch.setattr(tiles, "tried", lambda *args: iter(some))
    fmt, activation = parse_scheme(scheme)
    packed = anybit.quantize_tensor(torch.randn(40, 256), fmt)
    [(m, times)] = tune.time_layer("triton", packed, activation, HALF, [3])
    assert m == 3
    assert list(times) == [str(tile) for tile in some]
    assert all(us > 0 for us in times.values())


def test_the_fastest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both dtypes, in the order of numbers of tokens."""
    asked: list[Any] = []

    def time_layer(name: str, packed: Any, activation: str | None, dtype: Any, counts: list[int]):
        asked.append((name, packed, activation, counts))
        yield counts[0], {"slow": 2.0, f"fast for {dtype}": 1.5}
        yield counts[1], {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "choose", lambda layer: "hopper")
    monkeypatch.setattr(tune, "random_weight", lambda layer: layer.shape)
    monkeypatch.setattr(tune, "time_layer", time_layer)
    said: list[str] = []
    path = tune.tune(["liquid@int8"], [(40, 256)], [16, 3], said.append)
    assert path == tuned.tuned_file(GPU)
    assert asked == [("hopper", (40, 256), "int8", [3, 16])] * 2
    half = Cell("hopper", "liquid@int8", "float16", 40, 256)
    assert tuned.load(GPU) == {
        half: [Winner(3, "fast for torch.float16")],
        half._replace(dtype="bfloat16"): [Winner(3, "fast for torch.bfloat16")],
    }
    assert said[:2] == [
        "liquid@int8 in float16 40x256 M=3: 1.5 us, fast for torch.float16",
        "liquid@int8 in float16 40x256 M=16: nothing to choose from; the rule's stays",
    ]


# Candidates.


@pytest.mark.parametrize("family", ["rows", "groups", "planes", "tables"])
@pytest.mark.parametrize("m", [1, 16, 64, 1024])
def test_triton_has_candidates(family: str, m: int) -> None:
    found = tiles.tried(family, m, 4096, dense=True)
    assert found[0] == tiles.choose(family, m, 4096, dense=True)
    assert 3 <= len(found) == len(set(found)) <= 40
    assert all(t.kernel != "gemm" or t.tokens >= min(m, 32) for t in found)


@pytest.mark.parametrize("scheme", ["int4", "int4@int8", "liquid@int8", "fp6@int8", "fp6@fp8"])
def test_quantized_activations_are_never_left_out(scheme: str) -> None:
    """cuBLAS multiplies the activations as they are."""
    fmt, activation = parse_scheme(scheme)
    packed = anybit.quantize_tensor(torch.randn(40, 256), fmt)
    prepared = backend.prepare(packed, activation)
    found = backend.candidates(torch.randn(100, 256, dtype=HALF), prepared)
    assert (str(Tile("dense")) in found) == (activation is None)


@pytest.mark.parametrize("m", [1, 16, 17, 64, 100, 1024])
@pytest.mark.parametrize("name", GPUS)
def test_candidates_fit_the_gpu(name: str, m: int) -> None:
    gpu = GPUS[name]
    for scheme in (SCHEME, "liquid@int8", "fp6"):
        d = decoder_of(scheme)
        found = mma_tiles.tried(d, gpu, m, 4096)
        assert found[0] == mma_tiles.choose(d, gpu, m, 4096)
        assert 3 <= len(set(found)) == len(found) <= 14
        assert all(mma_tiles.shared_bytes(tile, d) <= gpu.shared for tile in found)


def test_a_backend_without_candidates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerSpec(anybit.get_format("int4"), None, (8, 128), CUDA)
    for name in ("hopper", "mma", "triton"):
        monkeypatch.setattr(registry, "choose", lambda layer, name=name: name)
        assert tune.tuned_backend(layer) == name
        assert registry.get_backend(name).does(Backend.candidates)
    monkeypatch.setattr(registry, "choose", lambda layer: "dense")
    monkeypatch.setattr(registry, "refusals", lambda layer: {"triton": "is absent", "dense": None})
    with pytest.raises(ValueError, match=r"dense multiplies it, .* nothing to tune: triton is abs"):
        tune.tuned_backend(layer)


def test_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="torch sees none"):
        tune.tune(["int4"], [(128, 128)], [1], print, torch.device("cpu"))
