"""Weights in 16 bits as they come: kernels as compiled, and which of them the layers launch."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit.kernels.between import of
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.launch import PlainArguments
from anybit.kernels.hopper import plain
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import Kernel, Tile
from tests.kernels.mma import array
from tests.needs import EVERY_KERNEL, pairs
from tests.ptx.machine import Machine
from tests.ptx.parse import PtxError
from tests.ptx.state import InUse

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
HALF, BRAIN = torch.float16, torch.bfloat16


@cache
def compiled(kernel: Kernel) -> Compiled:
    return kernel.generate()


class Emulated:
    """What is launched runs instruction by instruction, on memory that others may still use."""

    def __init__(self, kernel: Kernel, change: tuple[str, str] = ("", "")):
        made = compiled(kernel)
        assert change[0] in made.ptx
        self.kernel, self.shared = kernel, made.shared
        self.machine = Machine(made.ptx.replace(*change) if change[0] else made.ptx)

    def launch(self, values: dict[str, Any], grid: int, overlap: bool) -> None:
        assert overlap == self.kernel.overlap
        given = []
        for name in PlainArguments._fields:
            value = values[name]
            found = array(value) if value is None or isinstance(value, Tensor) else value
            given.append(
                InUse(found) if name in ("x", "bias", "y") and value is not None else found
            )
        self.machine.launch(given, grid, self.kernel.tile.threads, self.shared, seed=grid)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Layers launch on the emulator, as on an H200; names of the launched tiles."""
    launched: list[str] = []
    plain.chosen.cache_clear()

    def loaded(kernel: Kernel, device: int | None) -> Emulated:
        launched.append(kernel.tile.name)
        return Emulated(kernel)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(plain, "loaded", loaded)
        monkeypatch.setattr(plain, "chip_of", lambda device: H200)
        monkeypatch.setattr(plain, "runs_on", lambda device: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    yield launched
    plain.chosen.cache_clear()


def random(*shape: int, dtype: torch.dtype = BRAIN) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# M, N, K: rows that no tile divides, and columns that no K tile or no warp's turn divides
SHAPES = [(1, 42, 1000), (3, 16, 8), (8, 129, 264), (9, 33, 1288), (16, 7, 136)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("shape", "dtype"), pairs(SHAPES, [HALF, BRAIN]))
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
    assert plain.suits(x, w)
    got = plain.linear(x, w, bias if m != 9 else None)
    want = x.double() @ w.double().T + (bias.double() if m != 9 else 0)
    # Sums in fp32, rounded once.
    bound = torch.finfo(dtype).eps / 2 * want.abs() + 1e-6 * k**0.5
    assert ((got.double() - want).abs() <= bound).all()
    assert got.shape == (m, n)
    assert got.is_contiguous()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("tile", [
    tile for m in (1, 16) for tile in plain.family(m, H200)[: None if EVERY_KERNEL else 2]
], ids=lambda tile: tile.name)  # fmt: skip
def test_one_hot_tokens_read_weights_back(tile: Tile) -> None:
    m, n, k = tile.tokens, tile.rows + 3, 128 * tile.warps + 264
    w, columns = random(n, k), torch.arange(m) * (k // m) + torch.arange(m) % 8
    columns[-1] = k - 1
    x = torch.zeros(m, k, dtype=BRAIN, device=DEVICE)
    x[torch.arange(m), columns] = 1
    assert torch.equal(plain.linear(x, w, None, tile), w[:, columns].T)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 42, 1000), (8, 34, 264), (13, 262, 136)])
@pytest.mark.parametrize("tile", [None, Tile(8, 2, 4, 3, kind="plain")])
def test_gate_and_up(m: int, n: int, k: int, tile: Tile | None) -> None:
    """Rows of either half that no tile divides; gates from -12 to 12, and a few far beyond."""
    if tile and m > tile.tokens:
        tile = None
    x, w, bias = random(m, k), random(n, k) * (4 / k**0.5), random(n)
    w[: n // 2 : 5] *= 1000
    got = plain.gated(x, w, bias if m != 8 else None, tile)
    y = x.double() @ w.double().T + (bias.double() if m != 8 else 0)
    gate, up = y.chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-4 * up.abs() + 1e-6).all()


def test_gate_and_up_beside_their_definition() -> None:
    x, w, bias = random(17, 64), random(48, 64), random(48)
    gate, up = torch.nn.functional.linear(x, w, bias).chunk(2, -1)
    assert torch.equal(of(x).gated(x, w, bias), of(x).silu_mul(gate, up))


@pytest.mark.usefixtures("emulated")
def test_rows_that_lie_apart() -> None:
    x, w = random(4, 512)[:2, 128:384], random(24, 256)
    assert torch.equal(plain.linear(x, w, None), plain.linear(x.contiguous(), w, None))


def test_what_is_left_to_torch(emulated: list[str]) -> None:
    w = random(8, 16)
    for x, weight in (
        (random(17, 16), w),
        (random(0, 16), w),
        (random(16), w),
        (random(1, 16).float(), w),
        (random(1, 16).float(), w.float()),
        (random(1, 16, dtype=HALF), w),
        (random(1, 12), random(8, 12)),
        (random(1, 8), random(8, 16)[:, 8:]),
        (random(1, 8), random(72)[1:65].view(8, 8)),
    ):
        assert not plain.suits(x, weight)
    x = random(17, 16)
    assert torch.equal(of(x).linear(x, w, None), torch.nn.functional.linear(x, w))
    assert not emulated


def test_mutants_do_not_pass() -> None:
    tile = Tile(8, 1, 4, 3, kind="plain")
    x, w, y = random(8, 2048).cpu(), random(16, 2048).cpu(), torch.empty(8, 16, dtype=BRAIN)
    values = {"x": x, "w": w, "bias": None, "y": y, "m": 8, "n": 16, "k": 2048, "rows": 16}
    kernel = plain.kernel_of("bfloat16", tile, H200)
    Emulated(kernel).launch(values, 1, True)
    want = y.clone()

    def run(change: tuple[str, str]) -> None:
        Emulated(kernel, change).launch(values, 1, True)
        assert torch.equal(y, want)

    for old in ("wait_group 1;", "bar.warp.sync", "bar.sync", "griddepcontrol.wait"):
        new = "wait_group 2;" if "group" in old else f"// {old}"
        with pytest.raises((PtxError, AssertionError)):
            run((old, new))


def test_choices() -> None:
    """Every tile that any shape gets is among those compiled ahead, on any number of SMs."""
    for chip in (H200, Chip(114, 1700.0), Chip(16, 300.0)):
        found = {kernel.tile for kernel in plain.kernels(chip)}
        for m in (1, 5, 8, 9, 16):
            for n, k in ((8, 64), (2048, 8192), (128256, 2048), (28672, 8192), (1 << 20, 128)):
                assert plain.choose(m, n, k, chip) in found
    few, more = (len(plain.family(m, H200)) for m in (1, 16))
    assert len(set(plain.kernels(H200))) == 4 * (few + more)
    assert all(kernel.overlap for kernel in plain.kernels(H200))


def test_stages_fit() -> None:
    for m in (1, 16):
        for tile in plain.family(m, H200):
            assert tile.stages >= 2
            room = tiles.shared_bytes(tile, plain.PLAIN["float16"]) + tiles.RESERVED
            assert room * tile.ctas <= 228 * 1024
