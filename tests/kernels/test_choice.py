"""The choice of kernels: near the fastest of those that were timed, for all kinds of products."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.formats.presets import HOPPER
from anybit.kernels.choice import Costs, Work, costs_of, cycles, norm
from anybit.kernels.cute.cells import Cells, cells_of
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.operands import decoder_for, operand_of
from anybit.kernels.hopper import choices, codebook_tiles, expert_tiles, tiles
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.mma import tiles as mma

ROWS = Path(__file__).parents[2] / "benchmarks/results/h200_tiles.csv"
CHIPS = H200, Chip(114, 2000), Chip(78, 2100), Chip(16, 600)


def decoder_named(scheme: str) -> Decoder:
    fmt, activation = parse_scheme(scheme)
    return decoder_for(fmt, getattr(torch, operand_of(activation, torch.float16)))


def told(tile: Tile | mma.Tile) -> str:
    """A tile as `benchmarks/tiles.py` writes it: without what is as in most."""
    few = isinstance(tile, mma.Tile)
    names = "tokens slices warps ctas" if few else "tokens rows ctas split stream_k"
    fields = {name: int(getattr(tile, name)) for name in names.split()}
    usual = {"rows": 128, "split": 1, "stream_k": 0}
    return " ".join(f"{k}={v}" for k, v in fields.items() if usual.get(k) != v)


def timed(*kernels: str) -> Iterator[tuple[str, tuple[int, int, int, int], dict[str, float]]]:
    """(scheme, (tokens, N, K, experts), microseconds by tile) of these kernels, on an H200."""
    found: dict[tuple[str, tuple[int, int, int, int]], dict[str, float]] = defaultdict(dict)
    with ROWS.open() as file:
        for row in csv.DictReader(file):
            if row["kernel"] in kernels:
                m, n, k, experts = (int(row[c]) for c in ("M", "N", "K", "experts"))
                found[row["format"], (m, n, k, experts)][row["tile"]] = float(row["us"])
    for (scheme, problem), times in found.items():
        yield scheme, problem, times


def test_the_choice_is_near_the_fastest() -> None:
    """Over all that was timed; two launches, and copies, are no single rows."""
    above = defaultdict(list)
    for scheme, (m, n, k, experts), times in timed("wgmma", "mma"):
        d = decoder_named(scheme)
        if experts:
            tile = expert_tiles.choose_experts(d, m, n, k, experts)
        else:
            choice = choices.choose(d, m, n, k)
            if choice.copy or len(choice.parts) == 2:
                continue
            tile = choice.few or choice.parts[0].tile
        us = times.get(told(tile))
        if us is not None:  # of slow bytes, kernels for up to 16 tokens were not timed
            above[scheme + " of experts" * (experts > 0)].append(us / min(times.values()))
    every = [x for each in above.values() for x in each]
    assert len(every) > 1400
    means = {name: math.exp(sum(map(math.log, each)) / len(each)) for name, each in above.items()}
    assert max(means.values()) < 1.04, means
    assert math.exp(sum(map(math.log, every)) / len(every)) < 1.025
    assert sum(x > 1.15 for x in every) < 0.04 * len(every)
    assert max(every) < 1.45


def test_the_plan_of_a_codebook_is_near_the_fastest() -> None:
    """Of all plans for up to 16 tokens that were timed."""
    above = []
    for scheme, (m, n, k, _), times in timed("codebook"):
        cells = cells_of(get_format(scheme))
        assert isinstance(cells, Cells)
        plan = codebook_tiles.choose(cells, m, n, k, "float16")
        assert plan is not None
        name = f"name={plan.kernel.name} cluster={plan.cluster} splits={plan.splits}"
        above.append(times[name] / min(times.values()))
    assert len(above) > 100
    assert math.exp(sum(map(math.log, above)) / len(above)) < 1.03
    assert max(above) < 1.5


@pytest.mark.parametrize("scheme", [*HOPPER, "trellis", "trellis:bits=4@int8"])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_product_has_a_choice_that_fits(scheme: str, chip: Chip) -> None:
    fmt, activation = parse_scheme(scheme)
    d = decoder(fmt, operand_of(activation, torch.bfloat16))
    if isinstance(d, str):
        assert not isinstance(cells_of(fmt), str)  # a codebook
        return
    gpu = tiles.gpu_for(chip)
    for m, n, k in ((1, 4096, 4096), (17, 100, 128), (60, 28672, 4096), (300, 1000, 14336)):
        choice = choices.choose(d, m, n, k, chip)
        assert sum(part.rows for part in choice.parts) in (0, n)
        if choice.few:
            room = choice.few.ctas * (mma.shared_bytes(choice.few, d) + mma.RESERVED)
            assert room <= gpu.shared_of_sm
        for tile, _, rows in choice.parts if not choice.copy else ():
            assert tile in tiles.family(d)
            assert tiles.fits_once(tile, d, m, rows, k, chip)
            assert tile.split <= -(-k // 128)


def test_costs_rise_with_work() -> None:
    d = decoder_named("int4:group=128")
    tile = next(t for t in tiles.family(d) if (t.tokens, t.split, t.stream_k) == (128, 1, False))
    usual = tiles.work(tile, d, 512, 4096, 4096)
    for more in (
        tiles.work(tile, d, 512, 28672, 4096),
        tiles.work(tile, d, 512, 4096, 14336),
        usual._replace(clusters=True),
        usual._replace(meets=2, outputs=128 * 128),
    ):
        assert cycles(more, H200.read) > cycles(usual, H200.read)
    assert cycles(usual, H200.read / 2) > cycles(usual, H200.read)  # a slower memory
    assert costs_of("wgmma 16").start == costs_of("wgmma 8").start  # of the first word
    assert costs_of("wgmma 16").multiply != costs_of("wgmma 8").multiply


def test_costs_may_be_tensors() -> None:
    """As the fit has them; and no power overflows."""
    work = Work("wgmma 16", *torch.full((8, 3), 1e7, dtype=torch.float64))
    alone = Work("wgmma 16", *[1e7] * 8)
    costs = costs_of("wgmma 16")._replace(body=50.0, parts=50.0)
    found = cycles(work, 2000.0, Costs(*[torch.tensor(c, dtype=torch.float64) for c in costs]))
    assert torch.allclose(found, torch.full((3,), cycles(alone, 2000.0, costs)).double())
    assert norm(1, 3.0, 4.0) == pytest.approx(7)
    assert norm(2, 3.0, 4.0) == pytest.approx(5)
    assert norm(60, 3.0, 4.0) == pytest.approx(4, rel=0.01)
