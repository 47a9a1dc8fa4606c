"""The `mma.sync` family without a GPU: its kernels, who is refused, what is launched."""

import csv
import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.formats.presets import HOPPER
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import cubin, driver, jit, operands
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.launch import ProductArguments, ProductLauncher
from anybit.kernels.hopper import choices
from anybit.kernels.mma import build, selftest, tiles
from anybit.kernels.mma.tiles import Tile
from tests.kernels.mma import GPUS, KB
from tests.needs import EVERY_KERNEL, pairs

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
CUDA = torch.device("cuda", 0)
SCALAR = [scheme for scheme in HOPPER if parse_scheme(scheme)[0].lookup is None]


def decoders(scheme: str) -> Iterator[Decoder]:
    fmt, activation = parse_scheme(scheme)
    for dtype in (torch.float16, torch.bfloat16):
        found = decoder(fmt, operands.operand_of(activation, dtype))
        assert isinstance(found, Decoder)
        yield found


@pytest.mark.parametrize("name", ["A100", "RTX 3090", "RTX 4090", "RTX 5090", "B200"])
@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6", "fp6@fp8", "codebook:m=1,v=4,group=128"])
def test_all_that_layers_launch_is_built_beforehand(scheme: str, name: str) -> None:
    """Whatever their shapes, and on any GPU of a compute capability."""
    (fmt, activation), gpu = parse_scheme(scheme), GPUS[name]
    assert replace(build.gpu_with(gpu.capability), multiprocessors=gpu.multiprocessors) == gpu
    if activation == "fp8" and gpu.capability < (8, 9):
        with pytest.raises(InvalidInput, match=r"fp6@fp8: fp8 products need compute capability"):
            build.kernels_of(scheme, gpu.capability)
        return
    every = set(build.kernels_of(scheme, gpu.capability))
    for count in (gpu.multiprocessors, 28):
        device = replace(gpu, multiprocessors=count)
        for n in (16, 576, 4096, 6144, 28672, 128256):
            for dtype in (torch.float16, torch.bfloat16):
                layer = LayerSpec(fmt, activation, (n, 4096), CUDA, dtype)
                found = selftest.kernels_of(layer, dtype, device)
                assert found
                assert set(found) <= every
        if fmt.lookup is None:
            assert set(selftest.kernels_of(layer, dtype, device, experts=True)) <= every
    assert {kernel.architecture for kernel in every} == {gpu.architecture}


@pytest.mark.parametrize("name", ["RTX 3090", "H200"])
@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6", "fp8", "trellis:code=look"])
def test_some_numbers_of_rows_have_the_tiles_of_all(scheme: str, name: str) -> None:
    d, gpu = next(decoders(scheme)), replace(GPUS[name], multiprocessors=20)
    every = range(16, 32 * tiles.NARROW_WARPS * gpu.multiprocessors + 1, 16)
    for m in tiles.FEW:
        found = {tiles.narrow(d, gpu, m, n) for n in build.every_rows(gpu)}
        assert found == {tiles.narrow(d, gpu, m, n) for n in [*every, 1 << 24]}


SLOW = ["trellis", "trellis:bits=4,code=pair8@int8", "trellis:bits=7"]
MORE = ["int8:group=32,zero", "int3:group=64"]


@pytest.mark.parametrize(("scheme", "name"), pairs([*SCALAR, *MORE, *SLOW], [*GPUS], 2))
def test_every_problem_has_a_tile_that_fits(scheme: str, name: str) -> None:
    gpu = GPUS[name]
    for d in decoders(scheme):
        for n in (8, 512, 4096, 6144, 28672):
            family = tiles.family(d, gpu, n, "bfloat16")
            assert family
            for m in (1, 5, 8, 9, 16, 17, 33, 64, 100, 128, 500, 512, 5000):
                kernel = tiles.kernel_for(d, gpu, m, n, "bfloat16")
                assert kernel in family
                tile = kernel.tile
                if tile.kind == "decode":
                    assert d.slot == 16
                    assert m >= tiles.DENSE_FROM
                    continue
                size = tiles.shared_bytes(tile, d)
                assert size <= gpu.shared
                assert tile.ctas * (size + tiles.RESERVED) <= gpu.shared_of_sm
                assert tile.stages >= 2
                assert tile.kind == "narrow" if m <= 16 else tile.kind == "gemm"
                assert tile.tokens >= min(m, 16)
                ctas = tiles.grid(tile, gpu, m, n, 4096)
                assert 0 < ctas <= max(tiles.tiles_of(tile, m, n), tile.ctas * gpu.multiprocessors)


def test_tiles_follow_the_problem() -> None:
    """As on an H200, where the best of many tiles were measured."""
    liquid = next(decoders("liquid@int8"))
    gpu = GPUS["H200"]

    def tile(m: int, n: int) -> Tile:
        found = tiles.choose(liquid, gpu, m, n)
        assert found is not None
        return found

    def shape(m: int, n: int) -> tuple[int, int, int]:
        return tile(m, n).rows, tile(m, n).warps, tile(m, n).ctas

    assert shape(1, 1024) == (16, 8, 1)
    assert shape(1, 4096) == (16, 8, 2)
    assert shape(1, 6144) == (32, 8, 2)  # of 16 rows, three would be needed: 24 warps
    assert shape(1, 28672) == (32, 4, 3)  # CTAs take turns
    assert tiles.grid(tile(1, 4096), gpu, 1, 4096, 4096) == 256
    # 48 tiles leave most places empty: CTAs share their K tiles, LEAST_UNITS or more each.
    assert tiles.grid(tile(64, 6144), gpu, 64, 6144, 4096) == 264
    assert tiles.grid(tile(64, 6144), gpu, 64, 6144, 512) == 48
    assert tiles.grid(tile(64, 28672), gpu, 64, 28672, 4096) == 224


def test_slow_decoders_have_equal_shares_of_rows() -> None:
    """Where three CTAs of 16 rows do it, on an H200; 6144x4096 took 7.7 us, with 32 rows 9.0."""
    found = {}
    for scheme in ("trellis", "trellis@int8", "int7"):
        d = next(decoders(scheme))
        some = [tiles.choose(d, GPUS["H200"], 1, n) for n in (4096, 6144, 28672)]
        found[scheme] = [(t.rows, t.warps, t.ctas) for t in some if t]
    assert found["trellis"] == [(16, 8, 2), (16, 8, 3), (32, 4, 4)]
    assert found["trellis@int8"] == [(16, 8, 2), (32, 8, 2), (32, 4, 4)]
    assert found["int7"][1] != (16, 8, 3)  # it binds the memory


def test_a_narrow_tile_has_a_warp_for_each_block_of_outputs() -> None:
    assert Tile(16, 4, 8, kind="narrow").rows == 64
    assert Tile(1, 7, 8, kind="narrow").rows == 112
    assert Tile(16, 4, 4).rows == 256  # whose warps split rows
    with pytest.raises(InvalidInput, match=r"64 rows x 16 tokens has 8 blocks for 4 warps"):
        Tile(16, 4, 4, kind="narrow")


@pytest.mark.parametrize("name", GPUS)
def test_beside_a_table_the_busiest_multiprocessor_has_few_rows(name: str) -> None:
    """None has more than 16 above the mean, up to 8 times 16 for each, where memory is enough."""
    gpu = GPUS[name]
    for d in (*decoders("trellis:code=look@int8"), *decoders("trellis:bits=4,code=look")):
        for m, n in product((1, 5, 16), range(16, 40 * 16 * gpu.multiprocessors, 1040)):
            tile = tiles.narrow(d, gpu, m, n)
            assert tile is not None
            least = -(-n // (16 * gpu.multiprocessors)) * 16
            if tile.ctas * tile.rows >= least:
                assert tiles.resident(tile, gpu, m, n)
            if least <= (128 if m <= 8 else 64) and gpu.shared > 200 * KB:
                assert tile.ctas * tile.rows == least, (tile, n)
                assert tile.ctas * tile.warps == 16 or d.bits > 2


MEASURED = Path(__file__).parents[2] / "benchmarks/results/h200_mma.csv"


def test_the_rule_finds_the_best_tile_of_an_h200() -> None:
    """Where the CTAs of few tokens are all resident: within 5 % of the best that was measured."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            if row["peer"].startswith("mma narrow"):
                scheme = row["format"] + "@int8" * row["activation"].startswith("int8")
                cell = cells.setdefault((scheme, row["M"], row["N"], row["K"]), {})
                cell[row["peer"].removeprefix("mma ")] = float(row["us"])
    compared = 0
    for (scheme, m, n, _), times in cells.items():
        if int(n) <= 8448:
            brain = [d for d in decoders(scheme) if d.operand != "float16"]
            found = tiles.choose(brain[0], GPUS["H200"], int(m), int(n))
            assert found is not None
            shape = found.name.rpartition("warps")[0]
            like = [us for name, us in times.items() if name.startswith(shape)]
            time = times.get(found.name, max(like))
            assert time <= 1.05 * min(times.values()), (scheme, m, n, found.name)
            compared += 1
    assert compared == 27


def test_few_tokens_go_where_they_are_faster() -> None:
    """Tiles of this family on an H200, most with all CTAs resident, and the Hopper kernels."""
    hopper, here = {}, {}
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            scheme = row["format"] + "@int8" * row["activation"].startswith("int8")
            cell = scheme, int(row["M"]), int(row["N"]), int(row["K"])
            if row["peer"] == "hopper":
                hopper[cell] = float(row["us"])
            here[row["peer"], cell] = float(row["us"] or 0)
    gains = []
    for cell, us in hopper.items():
        scheme, m, n, k = cell
        d = next(d for d in decoders(scheme) if d.operand != "float16")
        tile = tiles.narrow(d, GPUS["H200"], m, n)
        time = here.get((f"mma {tile.name}", cell)) if tile else None
        if n > 8448 and time and choices.choose(d, m, n, k).few:
            gains.append(us / time)
    assert len(gains) >= 40  # of four schemes, on fourteen weights
    assert min(gains) > 0.97
    assert sum(gains) > 1.15 * len(gains)


@pytest.mark.parametrize(("scheme", "name"), pairs([*SCALAR, *MORE], [*GPUS], 2))
def test_experts_have_tiles_that_fit(scheme: str, name: str) -> None:
    gpu = GPUS[name]
    for d in decoders(scheme):
        family = tiles.family_experts(d, gpu, "bfloat16")
        assert family
        for experts in (1, 8, 128):
            for m in (1, 8, 64, 1000, 8000):
                kernel = tiles.kernel_for(d, gpu, m, 768, "bfloat16", experts)
                assert kernel in family
                tile = kernel.tile
                size = tiles.shared_bytes(tile, d)
                assert size <= gpu.shared
                assert tile.ctas * (size + tiles.RESERVED) <= gpu.shared_of_sm
                assert (tile.kind, tile.rows) == ("experts", 128)
                ctas = tiles.grid(tile, gpu, m, 768, 2048, experts)
                assert 0 < ctas <= tile.ctas * gpu.multiprocessors


def test_few_tokens_of_many_experts_keep_the_gpu_busy() -> None:
    """Eight tokens with 8 of 128 experts each: most experts have none, the others one or two."""
    d, gpu = next(decoders("int4:group=128")), GPUS["A100"]
    tile = tiles.choose_experts(d, gpu, 64, 128)
    assert tile is not None
    assert (tile.tokens, tile.ctas) == (8, 3)
    assert tiles.grid(tile, gpu, 64, 768, 2048, 128) == 3 * gpu.multiprocessors
    assert tiles.grid(tile, gpu, 1, 128, 512, 128) == 1  # four K tiles


def test_an_unknown_gpu_runs_what_its_generation_runs() -> None:
    gpu = GPUS["A100"]
    assert replace(gpu, capability=(8, 8)).architecture == "sm_87"
    assert replace(gpu, capability=(13, 0)).architecture is None
    assert (
        tiles.kernel_for(next(decoders("fp6")), replace(gpu, capability=(13, 0)), 1, 8, "") is None
    )


# Launches.


def test_a_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every parameter, by its name; no clusters; overlap only when asked for."""
    seen: list[dict[str, Any]] = []
    wanted = (ctypes.c_int, ctypes.POINTER(driver.Config), ctypes.c_void_p,
              ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)  # fmt: skip

    def start(config: Any, kernel: int, parameters: Any, extra: int) -> int:
        c = config.contents
        found = {"grid": c.grid[0], "block": c.block[0], "shared": c.shared, "count": c.count}
        found["attribute"] = c.attributes[0].id
        for i, (name, kind) in enumerate(ProductLauncher.arguments._fields_):
            found[name] = kind.from_address(parameters[i]).value
        seen.append(found)
        return 0

    fake = SimpleNamespace(cuLaunchKernelEx=ctypes.CFUNCTYPE(*wanted)(start))
    for name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"):
        setattr(fake, name, lambda *args: 0)
    monkeypatch.setattr(driver, "driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    path = tmp_path / "a.kernel"
    path.write_bytes(json.dumps({"entry": "k", "shared": 4096, "threads": 128}).encode() + b"\nx")
    launcher = ProductLauncher(path, 0)
    names = ProductArguments._fields
    values: dict[str, Any] = {name: 32 * i for i, name in enumerate(names)}
    values |= {"x": SimpleNamespace(data_ptr=lambda: 16), "stride": 1}  # not a parameter here
    launcher.launch(values, 5, False)
    gone = {"token_scale": None, "token_sum": None, "bias": None, "experts": 7}
    launcher.launch(values | gone, 5, True)
    first, second = seen
    assert [first[name] for name in names] == [16, *range(32, 32 * len(names), 32)]
    assert (first["grid"], first["block"], first["shared"], first["count"]) == (5, 128, 4096, 0)
    assert [second[name] for name in ("token_scale", "token_sum", "bias")] == [0, 0, 0]
    assert second["experts"] == 7
    assert (second["count"], second["attribute"]) == (1, driver.SERIALIZATION)


# Compiling.


FEW = [
    ("A100", "liquid@int8", 1, 4096),
    ("RTX 5090", "liquid@int8", 128, 4096),
    ("RTX 5090", "int4:group=128", 600, 4096),
]
EVERY = [
    (name, scheme, m, n)
    for name in GPUS
    for n in (4096, 28672)
    for scheme in [*SCALAR, "int3:group=64", "int4:group=64,zero", "fp4"]
    for m in (1, 16, 32, 64, 128, 600)
    if not (scheme.endswith("fp8") and GPUS[name].capability < (8, 9))
]


@needs_dsl
@pytest.mark.parametrize(("name", "scheme", "m", "n"), EVERY if EVERY_KERNEL else FEW)
def test_kernels_compile_without_spills(name: str, scheme: str, m: int, n: int) -> None:
    gpu = GPUS[name]
    kernels = [tiles.kernel_for(d, gpu, m, n, "bfloat16") for d in decoders(scheme)]
    kernels = kernels if EVERY_KERNEL else kernels[:1]
    for kernel in dict.fromkeys(kernels):
        assert kernel is not None
        made = kernel.generate()
        jit.checked(kernel, made)
        registers, stack = cubin.resources(made.cubin)
        assert stack == 0
        assert registers <= 65536 // (kernel.tile.ctas * kernel.tile.threads)
        assert f".target {gpu.architecture}" in made.ptx
