"""What `benchmarks/ablation.py` compares computes the same: other decoders, other pipelines."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import anybit
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.pack import pack
from tests.kernels.test_cute_decode import emulate
from tests.kernels.test_hopper_emulated import Emulated, packed_weight

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.parametrize(
    ("spec", "operand", "name", "times"),
    [
        ("liquid", "int8", "lanes", 1),
        ("fp6", "float16", "unshifted", 2**12),
        ("fp6", "float16", "four", 1),
    ],
)
def test_decoders(
    spec: str, operand: str, name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decoders

    torch.manual_seed(0)
    packed = anybit.quantize_tensor(torch.randn(256, 256), spec)
    ours = decoder(packed.format, operand)
    assert isinstance(ours, Decoder)
    other = getattr(decoders, name)(ours)
    want, got = (emulate(pack(packed, d), d) for d in (ours, other))
    assert torch.equal(got, want * times)
    scales = [d.row_scale(packed) for d in (ours, other)]
    assert torch.equal(scales[0], scales[1] * times)
    assert other != ours


@pytest.mark.skipif(find_spec("cutlass") is None, reason="CuTe DSL is not installed")
def test_explicit_pipeline_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert without tokens, and one with more than a tile; fewer CTAs than tiles."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import explicit

    from anybit.kernels.hopper import gemm, scalar_linear
    from anybit.kernels.hopper.tile import Tile

    n, k, starts = 24, 256, torch.tensor([0, 2, 2, 11], dtype=torch.int32)
    torch.manual_seed(0)
    experts = [packed_weight("liquid@int8", n, k) for _ in range(3)]
    prepared = list(scalar_linear.prepare_experts(experts, "int8", torch.bfloat16).layout)
    tile = Tile(8, stages=3)
    ours = Emulated("liquid@int8", torch.bfloat16, tile, grouped=True)
    x = ours.tokens(11, k)
    want = ours.run(x, prepared, n, 2, starts=starts)
    monkeypatch.setattr(gemm, "Gemm", explicit.Explicit)
    other = Emulated("liquid@int8", torch.bfloat16, tile, grouped=True)
    assert other.ptx != ours.ptx
    assert torch.equal(other.run(x, prepared, n, 2, starts=starts), want)
