"""Equal shares of Hopper's main loop, emulated with few CTAs; when they and copies are chosen."""

import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from anybit.core.scheme import parse_scheme
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.hopper import copies, tiles
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.reference import operand_weight
from tests.kernels.test_hopper_emulated import Emulated, assert_close, packed_weight, product
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
HALF, BRAIN = torch.float16, torch.bfloat16
SMALL = Tile(8, ctas=2, stages=3, shared=True)
Case = tuple[str, torch.dtype, Tile, tuple[int, int, int], tuple[int, ...]]
CASES: list[Case] = [  # scheme, dtype of y, tile, (M, N, K), CTAs
    # A whole tile each, and one that both share; unevenly; two CTAs for each tile, and one left.
    ("liquid@int8", BRAIN, SMALL, (5, 264, 256), (2, 5, 7)),
    ("fp6", HALF, SMALL, (11, 128, 128), (3,)),  # two tiles of tokens, and a CTA with nothing
    # Two stages a K tile.
    ("fp6", HALF, Tile(16, rows=256, stages=3, columns=64, shared=True), (11, 136, 384), (2,)),
    # Eight chunks of sums, of which four are added at a time.
    ("int8@int8", BRAIN, Tile(64, ctas=2, stages=2, shared=True), (9, 128, 256), (2,)),
]
if EVERY_KERNEL:
    for scheme in ("liquid@int8", "int4:group=128", "fp6", "sparse"):
        for t in (64, 128):
            CASES.append((scheme, BRAIN, Tile(t, stages=2, shared=True), (t - 1, 200, 384), (3, 5)))
        tall = Tile(128, rows=256, stages=2, shared=True)
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
    monkeypatch.setattr("anybit.kernels.hopper.shares.LEAST_UNITS", 1)


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2].name}")
def test_shared_tiles(case: Case) -> None:
    check(*case)


@needs_dsl
@pytest.mark.parametrize(("shared", "grids"), [(False, (3,)), (True, (3, 5))])
def test_one_warpgroup_stays_behind(shared: bool, grids: tuple[int, ...]) -> None:
    """Whole tiles of three K tiles and of one, and shares: the same bits as side by side."""
    beside = Tile(8, ctas=2, stages=4, shared=shared)
    kernels = [Emulated("liquid@int8", BRAIN, replace(beside, late=late)) for late in (False, True)]
    for k in (384, 128):
        packed = packed_weight("liquid@int8", 136, k)
        x, prepared = kernels[0].tokens(11, k), operands.layout(packed, "int8")
        for grid in grids:
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


def decoder_of(scheme: str) -> Decoder:
    fmt, activation = parse_scheme(scheme)
    return operands.decoder_for(fmt, getattr(torch, operands.operand_of(activation, BRAIN)))


@pytest.mark.parametrize("scheme", ["liquid@int8", "int4:group=128", "fp6"])
def test_the_rule_shares_where_waves_are_wasted(scheme: str) -> None:
    d = decoder_of(scheme)
    # 80 and 172 tiles of 128 rows and tokens: one wave of 61 %, two of 65 %.
    for m, n, k in ((256, 5120, 17408), (128, 5120, 17408)):
        assert tiles.choose(d, m, n, k).shared
    # Whole waves, or too few K tiles for every CTA to have some.
    for m, n, k in ((256, 16896, 4096), (64, 1000, 4096), (256, 256, 512), (1024, 4096, 4096)):
        assert not tiles.choose(d, m, n, k).shared
    # 40 clusters of three did not fit at once.
    assert tiles.choose(d, 64, 5120, 17408).split < 3
    assert tiles.choose(d, 16, 8192, 28672).split < 4


# (M, N, K) and microseconds of some tiles, fp16 on an H200, by rows, tokens, shares and split.
Measured = dict[tuple[int, int, bool, int], float]
INT4: list[tuple[tuple[int, int, int], Measured]] = [
    ((64, 10240, 8192), {(128, 64, False, 1): 29.5, (128, 64, True, 1): 23.6}),
    ((64, 57344, 8192), {(128, 64, False, 1): 116.9, (256, 64, True, 1): 106.7}),
    ((64, 28672, 4096), {(128, 64, False, 1): 29.4, (256, 64, True, 1): 32.7}),
    ((192, 2880, 4096), {(128, 128, False, 2): 15.2, (128, 96, False, 2): 11.8}),
    ((256, 5120, 5120), {(128, 128, False, 1): 29.9, (128, 96, False, 1): 24.7}),
    ((256, 7168, 20480), {(128, 128, False, 1): 130.7, (128, 128, True, 1): 119.4}),
    ((512, 9216, 7168), {(256, 128, True, 1): 118.8, (128, 128, True, 1): 104.8}),
    ((512, 5120, 5120), {(128, 192, False, 1): 43.8, (128, 176, False, 1): 41.0}),
    ((512, 2880, 4096), {(128, 128, False, 1): 23.1, (128, 112, False, 1): 21.7}),
    ((4096, 576, 7168), {(128, 192, False, 1): 67.8, (128, 160, False, 1): 57.3}),
    ((1024, 3072, 8192), {(256, 128, False, 1): 95.5, (256, 96, True, 1): 77.4}),
    ((4096, 8192, 8192), {(256, 128, False, 1): 770.7, (256, 128, True, 1): 785.0}),
]


@pytest.mark.parametrize(("shape", "times"), INT4)
def test_the_rule_takes_what_measured_fastest(shape: tuple[int, int, int], times: Measured) -> None:
    d = operands.decoder_for(parse_scheme("int4:group=128")[0], HALF)
    tile = tiles.choose(d, *shape)
    found = times[tile.rows, tile.tokens, tile.shared, tile.split]
    assert found < 1.03 * min(times.values())
    assert 0.8 < tiles.expected(tile, d, *shape) / 1750 / found < 1.25


S = 128, 128, False, 2
HALVES, ALONE, SHARES = (128, 256, False, 2), (128, 256, False, 1), (128, 256, True, 1)
TRELLIS: list[tuple[str, tuple[int, int, int], Measured]] = [
    ("trellis", (256, 6144, 4096), {HALVES: 25.9, (128, 128, False, 1): 30.2, SHARES: 31.2}),
    ("trellis", (1024, 6144, 4096), {SHARES: 75.8, ALONE: 86.1, (128, 128, False, 1): 94.1}),
    ("trellis", (256, 4096, 14336), {SHARES: 50.3, S: 51.1, HALVES: 74.1}),
    ("trellis", (256, 4096, 4096), {S: 18.4, HALVES: 24.9, SHARES: 25.2}),
    ("trellis@int8", (256, 6144, 4096), {HALVES: 23.1, SHARES: 26.2, (128, 128, False, 1): 27.7}),
    ("trellis@int8", (256, 4096, 14336), {SHARES: 39.2, S: 44.3, HALVES: 59.0}),
    ("trellis@int8", (1024, 4096, 14336), {ALONE: 103.7, SHARES: 106.0}),
]


@pytest.mark.parametrize(("scheme", "shape", "times"), TRELLIS)
def test_decoding_hides_under_256_tokens(
    scheme: str, shape: tuple[int, int, int], times: Measured
) -> None:
    d = decoder_of(scheme)
    tile = tiles.choose(d, *shape)
    found = times[tile.rows, tile.tokens, tile.shared, tile.split]
    assert found == min(times.values())
    assert 0.8 < tiles.cycles(tile, d, *shape) / 1750 / found < 1.25
    assert not copies.copies(d, *shape)


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
    tile = Tile(128, shared=True)
    ctas = tiles.grid(tile, 256, 5120)
    assert ctas == 132
    assert tiles.workspace(tile, 256, 5120, ctas) == 2 * ctas * 128 * 128
    assert tiles.workspace(tile, 256, 128 * 132, ctas) == 0  # whole tiles
    assert tiles.workspace(Tile(128), 256, 5120, 80) == 0
