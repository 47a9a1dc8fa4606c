"""The other ways to decode of `benchmarks/ablation.py` give the operands that ours give."""

import sys
from pathlib import Path

import pytest
import torch

import anybit
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.pack import pack
from tests.kernels.test_cute_decode import emulate

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.parametrize(
    ("spec", "operand", "name", "times"),
    [
        ("liquid", "int8", "lanes", 1),
        ("fp6", "float16", "unshifted", 2**12),
        ("fp6", "float16", "four", 1),
    ],
)
def test_same_operands(
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
    assert other.instructions > 0
    assert other != ours
    sys.modules.pop("decoders", None)
