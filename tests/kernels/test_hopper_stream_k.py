"""Equal shares of Hopper's main loop, emulated with few CTAs; when they and copies are chosen."""

import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from anybit.kernels.cute import operands
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.reference import operand_weight
from tests.kernels.test_hopper_emulated import Emulated, assert_close, packed_weight, product
from tests.needs import EVERY_KERNEL, pairs
from tests.ptx.machine import Machine

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
HALF, BRAIN = torch.float16, torch.bfloat16
SMALL = Tile(8, ctas=2, stages=3, stream_k=True)
Case = tuple[str, torch.dtype, Tile, tuple[int, int, int], tuple[int, ...]]
CASES: list[Case] = [  # scheme, dtype of y, tile, (M, N, K), CTAs
    # A whole tile each, and one that both share; unevenly; two CTAs for each tile, and one left.
    ("liquid@int8", BRAIN, SMALL, (5, 264, 256), (2, 5, 7)),
    ("fp6", HALF, SMALL, (11, 128, 128), (3,)),  # two tiles of tokens, and a CTA with nothing
    # Two stages a K tile.
    ("fp6", HALF, Tile(16, rows=256, stages=3, columns=64, stream_k=True), (11, 136, 384), (2,)),
    # Eight chunks of sums, of which four are added at a time.
    ("int8@int8", BRAIN, Tile(64, ctas=2, stages=2, stream_k=True), (9, 128, 256), (2,)),
]
if EVERY_KERNEL:
    for scheme in ("liquid@int8", "int4:group=128", "fp6", "sparse"):
        for t in (64, 128):
            CASES.append(
                (scheme, BRAIN, Tile(t, stages=2, stream_k=True), (t - 1, 200, 384), (3, 5))
            )
        tall = Tile(128, rows=256, stages=2, stream_k=True)
        CASES.append((scheme, BRAIN, tall, (9, 264, 384), (3,)))


def check(
    scheme: str,
    dtype: torch.dtype,
    tile: Tile,
    shape: tuple[int, int, int],
    grids: tuple[int, ...],
) -> None:
    """Seeds run CTAs from the first to the last, and the other way round."""
    m, n, k = shape
    torch.manual_seed(m * n)
    emulated = Emulated(scheme, dtype, tile)
    packed = packed_weight(scheme, n, k)
    prepared = operands.layout(packed, emulated.operand)
    x, bias = emulated.tokens(m, k), torch.randn(n).to(dtype)
    want = product(operand_weight(packed, dtype), x) + bias.double()
    results = [emulated.run(x, prepared, n, g, bias, seed=s) for g in grids for s in range(2)]
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert_close(first, want, dtype)
        assert torch.equal(first, second)
        if emulated.operand == "int8":  # sums are exact, however CTAs share a tile
            assert torch.equal(first, results[0])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs share tiles of two K tiles already."""
    monkeypatch.setattr("anybit.kernels.hopper.stream_k.LEAST_UNITS", 1)


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2].name}")
def test_shared_tiles(case: Case) -> None:
    check(*case)


@needs_dsl
@pytest.mark.parametrize(("stream_k", "grids"), [(False, (3,)), (True, (3, 5))])
def test_one_warpgroup_stays_behind(stream_k: bool, grids: tuple[int, ...]) -> None:
    """Whole tiles of three K tiles and of one, and shares: the same bits as side by side."""
    beside = Tile(8, ctas=2, stages=4, stream_k=stream_k)
    kernels = [Emulated("liquid@int8", BRAIN, replace(beside, late=late)) for late in (False, True)]
    for k, grid in pairs((384, 128), grids):
        packed = packed_weight("liquid@int8", 136, k)
        x, prepared = kernels[0].tokens(11, k), operands.layout(packed, "int8")
        want, *found = (
            kernel.run(x, prepared, 136, grid, seed=seed)
            for kernel, seed in ((kernels[0], 0), (kernels[1], 0), (kernels[1], 1))
        )
        assert_close(want, product(operand_weight(packed, BRAIN), x), BRAIN)
        assert all(torch.equal(y, want) for y in found)


@needs_dsl
def test_counters_must_be_left_as_zeros() -> None:
    emulated = Emulated("int8@int8", BRAIN, SMALL)
    prepared = operands.layout(packed_weight("int8@int8", 128, 256), "int8")
    old = "st.global.b32 [%rd"
    assert old in emulated.ptx
    emulated.machine = Machine(emulated.ptx.replace(old, f"// {old}"))
    with pytest.raises(AssertionError):
        emulated.run(emulated.tokens(8, 256), prepared, 128, 2)


@needs_dsl
def test_the_last_may_arrive_after_it_looked() -> None:
    """Then its own sums are written as well, but not read: the same bits."""
    emulated = Emulated("fp6", BRAIN, SMALL)
    prepared = operands.layout(packed_weight("fp6", 264, 512), emulated.operand)
    x = emulated.tokens(5, 512)
    want = emulated.run(x, prepared, 264, 5)
    looked = re.compile(r"ld\.relaxed\.gpu\.global\.b32 (%r\d+), \[%rd\d+\];")
    assert len(looked.findall(emulated.ptx)) == 1
    emulated.machine = Machine(looked.sub(r"mov.b32 \1, 0;", emulated.ptx))
    assert torch.equal(emulated.run(x, prepared, 264, 5, seed=1), want)


def test_tiles_are_shared_evenly_where_few_ctas_are_left_over() -> None:
    assert tiles.sharers(40, 136, 132) == 120
    assert tiles.sharers(80, 136, 132) == 132
    assert tiles.sharers(1, 136, 132) == 8
    assert tiles.sharers(1, 20, 132) == 5
    assert tiles.sharers(0, 136, 132) == 0


@pytest.mark.parametrize("steps", [1, 3, 32, 136])
def test_every_unit_has_one_owner(steps: int) -> None:
    """The kernel's arithmetic, in Python: whoever is waited for has a part of the tile."""
    for common in (1, 2, 5, 40, 80, 131):
        ctas = tiles.sharers(common, steps, 132)
        units = common * steps
        owners = [c for c in range(ctas) for _ in range(c * units // ctas, (c + 1) * units // ctas)]
        assert len(owners) == units
        for tile in range(common):
            low = ((tile * steps + 1) * ctas - 1) // units
            high = ((tile + 1) * steps * ctas - 1) // units
            found = owners[tile * steps : (tile + 1) * steps]
            assert sorted(set(found)) == list(range(low, high + 1))


def test_the_workspace_holds_all_sums() -> None:
    tile = Tile(128, stream_k=True)
    ctas = tiles.grid(tile, 256, 5120)
    assert ctas == 132
    assert tiles.workspace(tile, 256, 5120, ctas) == 2 * ctas * 128 * 128
    assert tiles.workspace(tile, 256, 128 * 132, ctas) == 0  # whole tiles
    assert tiles.workspace(Tile(128), 256, 5120, 80) == 0
