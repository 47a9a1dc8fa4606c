"""Fitted grids: smaller errors than by rounding, which sum to zero where there are zero points."""

import pytest
import torch
from torch import Tensor

import anybit
from anybit import HQQ, RTN, Clip
from anybit.kernels import reference
from anybit.quantizers.clip import fit_clipped
from tests.conftest import DEVICE
from tests.specs import SCALAR


@pytest.fixture(scope="module")
def w() -> Tensor:
    """Weights with heavy tails, and groups whose mean is not zero."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(64, 256, generator=random) * 0.02
    w += torch.randn(64, 1, generator=random) * 0.01
    w[torch.rand(w.shape, generator=random) < 0.01] *= 4
    return w


def cost(packed: anybit.Packed, w: Tensor) -> float:
    """What grids are fitted by: squared errors, or the fourth power without zero points."""
    power = 2 if packed.format.zero_point else 4
    return float((packed.dequantize() - w).pow(power).sum())


@pytest.mark.parametrize("spec", SCALAR)
def test_never_worse_than_rounding(spec: str, w: Tensor) -> None:
    fmt = anybit.get_format(spec)
    # 1.01: a scale is kept for the whole row where a finer level (of `liquid`) has its own cost.
    assert cost(HQQ().quantize(w, fmt), w) <= 1.01 * cost(RTN().quantize(w, fmt), w)


@pytest.mark.parametrize(
    ("spec", "gain"),
    [
        ("int2:group=64,zero", 0.92),
        ("int3:group=64,zero", 0.96),
        ("int4:group=64,zero", 0.98),
        ("int3", 0.9),
        ("int4:group=128", 1.0),
    ],
)
def test_gain(spec: str, gain: float, w: Tensor) -> None:
    fmt = anybit.get_format(spec)
    assert cost(HQQ().quantize(w, fmt), w) < gain * cost(RTN().quantize(w, fmt), w)


def test_zero_points_are_real_numbers_that_layers_take(w: Tensor) -> None:
    packed = HQQ().quantize(w, anybit.get_format("int4:group=64,zero"))
    zero = packed.grid["zero"]
    assert zero.dtype == torch.float16
    assert not torch.equal(zero, zero.round())
    x = torch.randn(5, 256)
    torch.testing.assert_close(
        anybit.linear(x, packed), x @ packed.dequantize().T, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("spec", ["int2:group=64,zero", "int4:group=64,zero", "int5:zero"])
def test_errors_of_a_group_sum_to_nearly_zero(spec: str, w: Tensor) -> None:
    """Of the squared length of a group's errors, what lies along its mean: a 64th by chance."""
    fmt = anybit.get_format(spec)

    def along(quantizer: RTN) -> float:
        error = (quantizer.quantize(w, fmt).dequantize() - w).view(64, -1, fmt.group or 256)
        return float(error.mean(-1).square().sum() / error.square().mean(-1).sum())

    assert along(HQQ()) < 1e-3 < along(RTN())


def test_shift_of_a_group_is_found() -> None:
    """Weights on a grid with a fractional zero point are stored exactly but for fp16 numbers."""
    codes = torch.arange(16).repeat(4)[torch.randperm(64)][None].float()
    w = (codes - 7.3) * 0.25
    fmt = anybit.get_format("int4:group=64,zero")
    assert float((RTN().quantize(w, fmt).dequantize() - w).abs().max()) > 0.04
    assert float((HQQ().quantize(w, fmt).dequantize() - w).abs().max()) < 0.01


@pytest.mark.parametrize("spec", ["int4:group=128", "int3:group=64"])
def test_large_weights_are_cut_less_than_by_squares(spec: str) -> None:
    """Which cost more where just these meet activations of outlier channels."""
    random = torch.Generator().manual_seed(0)
    w, x = torch.randn(64, 256, generator=random), torch.randn(512, 256, generator=random)
    w[:, ::64] *= 3
    x[:, ::64] *= 10
    fmt = anybit.get_format(spec)

    def lost(grid: dict[str, Tensor]) -> float:
        error = fmt.decode(fmt.encode(w, grid), grid) - w
        return float((x @ error.T).square().sum())

    squares = lost(fit_clipped(w, fmt, torch.ones(256)))
    assert lost(Clip().fit(w, fmt)) == lost(HQQ().fit(w, fmt)) < 0.7 * squares


@pytest.mark.parametrize("spec", ["int2:group=32,zero", "int4:group=64,zero"])
def test_the_triton_kernel_reads_real_zero_points(spec: str, w: Tensor) -> None:
    backend = pytest.importorskip("anybit.kernels.triton.backend")
    packed = HQQ().quantize(w.to(DEVICE), anybit.get_format(spec))
    zero = packed.grid["zero"]
    assert zero.dtype == torch.float16
    assert not torch.equal(zero, zero.round())
    x = torch.eye(256, device=DEVICE).half()  # reads every weight back
    y = backend.linear(x, backend.prepare(packed, None), None)
    want = reference.linear(x, reference.prepare(packed, None), None)
    assert torch.allclose(y, want, rtol=2**-10, atol=0)  # both round the same number to fp16
