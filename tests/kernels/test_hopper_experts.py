"""Which Hopper kernels take experts' tokens, and that they are compiled beforehand."""

from typing import Any

import pytest
import torch

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.kernels.choice import cycles
from anybit.kernels.cute import products
from anybit.kernels.cute.operands import decoder_for, operand_of
from anybit.kernels.hopper import expert_tiles, scalar_linear
from anybit.kernels.hopper.backend import BACKEND as backend
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.expert_tiles import choose_experts
from anybit.kernels.mma import tiles as mma
from tests.kernels.mma import built

HALF = torch.float16


@pytest.mark.parametrize(("m", "experts"), [(1, 8), (30, 8), (300, 8), (64, 128), (4096, 256)])
def test_costs_of_experts_expect_what_random_routing_does(m: int, experts: int) -> None:
    counts = torch.randint(experts, (500, m), generator=torch.Generator().manual_seed(m))
    counts = torch.zeros(500, experts).scatter_add_(1, counts, torch.ones(500, m))
    busy = (counts > 0).sum(1).float().mean()
    assert abs(expert_tiles.touched(m, experts) / float(busy) - 1) < 0.02
    for tokens in (8, 64):
        found = (counts / tokens).ceil().sum(1).mean()
        assert abs(expert_tiles.token_tiles(tokens, m, experts) / float(found) - 1) < 0.02


def test_one_token_reads_the_experts_that_it_meets() -> None:
    """Of 128 small ones 8: the time follows what is touched, and few tokens take small tiles."""
    d = decoder_for(get_format("liquid"), torch.int8)
    tile = choose_experts(d, 8, 1536, 2048, 128)
    assert tile.tokens == 8
    assert isinstance(tile, mma.Tile)
    work = [expert_tiles.few_work(tile, d, m, 1536, 2048, 128) for m in (8, 8 * 128)]
    few, all_of_them = (cycles(each, H200.read) for each in work)
    assert few < all_of_them / 5


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [("int4:group=64", 8192), ("int4:group=64", 32768), ("fp8:group=128@fp8", 8192)],
)
def test_tiles_of_experts_hold_more_than_their_mean(scheme: str, rows: int) -> None:
    """Routed by chance, few experts may need a second tile, which reads their weights again."""
    fmt, activation = parse_scheme(scheme)
    d = decoder_for(fmt, operand_of(activation, torch.bfloat16))
    tile = choose_experts(d, rows, 4096, 7168, 256)
    assert rows // 256 < tile.tokens < 2 * rows // 256


FEW = [  # scheme, rows, (N, K), experts, and whether `kernels/mma` was faster on an H200
    ("int4:group=64", 8, (1536, 2048), 128, True),
    ("int4:group=64", 8, (4096, 7168), 256, True),
    ("liquid@int8", 8, (1536, 2048), 128, True),
    ("int4:group=64", 2048, (1536, 2048), 128, False),  # 16 tokens an expert
    ("mxfp4@fp8", 8, (4096, 7168), 256, False),  # mma.sync has no products of fp8
    ("int4:group=128@int8", 8, (4096, 7168), 256, False),  # nor of groups with their own scales
]


@pytest.mark.parametrize(("scheme", "rows", "shape", "experts", "few"), FEW)
def test_few_tokens_of_experts_have_kernels_of_their_own(
    scheme: str, rows: int, shape: tuple[int, int], experts: int, few: bool
) -> None:
    fmt, activation = parse_scheme(scheme)
    d = decoder_for(fmt, operand_of(activation, torch.bfloat16))
    tile = choose_experts(d, rows, *shape, experts)
    assert isinstance(tile, mma.Tile) == few
    made = {kernel.tile for kernel in built(scheme) if isinstance(kernel, mma.Kernel)}
    assert not few or tile in made  # compiled beforehand


@pytest.mark.usefixtures("an_h200")
def test_experts_with_few_tokens_are_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import anybit

    seen: list[Any] = []

    def multiply(x: torch.Tensor, *args: Any) -> torch.Tensor:
        [launch], starts, _ = args[6:]
        seen.append((launch.kernel.tile.kind, launch.grid * launch.kernel.tile.rows, starts))
        return x.new_zeros(len(x), 256)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(scalar_linear.mma, "loaded", lambda kernel, device: kernel)
    monkeypatch.setattr(products, "multiply", multiply)
    monkeypatch.setattr(scalar_linear, "launches_of", lambda *args: pytest.fail("another kernel"))
    packed = [anybit.quantize_tensor(torch.randn(256, 256), "fp6") for _ in range(4)]
    prepared, starts = backend.prepare_experts(packed, None, HALF), torch.tensor([0, 1, 1, 2, 2])
    assert backend.linear_experts(torch.randn(2, 256).half(), starts, prepared).shape == (2, 256)
    assert seen == [("few", 2 * 256, starts)]  # a CTA for each tile of two experts
