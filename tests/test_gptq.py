"""GPTQ and the clip search: less output error than rounding to nearest, for every format."""

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.rotation import Rotation
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.clip import Clip
from anybit.quantizers.gptq import GPTQ, column_order, inverse_factor
from tests.specs import SCALAR, SPECS

N, K = 48, 256


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor, Statistics]:
    """A weight, inputs with correlated channels of very different sizes, and their statistics."""
    random = torch.Generator().manual_seed(0)
    mix = torch.randn(K, K, generator=random) / K**0.5 + 0.3 * torch.eye(K)
    sizes = torch.logspace(-0.5, 0.5, K)[torch.randperm(K, generator=random)]
    x = torch.randn(1500, K, generator=random) @ mix * sizes
    w = torch.randn(N, K, generator=random) * torch.rand(K, generator=random)
    return w, x, saw(x)


def saw(x: Tensor) -> Statistics:
    seen = Statistics()
    seen.add(x, ("hessian",), every=len(x))
    return seen


def error(packed: anybit.Packed, w: Tensor, x: Tensor) -> float:
    """||(W - W') X|| / ||W X||."""
    return float(((packed.dequantize() - w) @ x.T).norm() / (w @ x.T).norm())


def test_following_aims_at_what_the_dense_model_has(
    layer: tuple[Tensor, Tensor, Statistics],
) -> None:
    """Of int8 and hardly damped, the outputs are those of least squares."""
    w, x, _ = layer
    dense = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).roll(1, 1)
    dense = dense + 0.2 * x.roll(1, 1)
    seen = Statistics()
    for start in (0, 500):  # added up in parts
        rows = slice(start, start + 500 if not start else None)
        seen.add(x[rows], ("hessian", "drift"), 1, dense[rows])
    assert torch.allclose(seen.drift, (dense - x).T @ x / len(x), atol=1e-4)
    best = torch.linalg.lstsq(x, dense @ w.T).solution.T
    apart = {}
    for follow in (False, True):
        packed = GPTQ(damping=1e-4, follow=follow).quantize(w, anybit.get_format("int8"), seen)
        apart[follow] = float((packed.dequantize() @ x.T - w @ dense.T).norm())
    least = float((best @ x.T - w @ dense.T).norm())
    assert least <= apart[True] < 1.02 * least
    assert apart[False] > 2 * least
    vector = torch.ones(K) * torch.where(torch.arange(K) % 3 == 0, -1.0, 1.0)
    turned = Statistics()
    turn = anybit.core.rotation.turned
    turned.add(turn(x * vector), ("drift",), 1, turn(dense * vector))
    assert torch.allclose(seen.rotated(Rotation(vector)).drift, turned.drift, atol=1e-3)


@pytest.mark.parametrize("spec", SCALAR)
def test_less_output_error_than_rounding(
    spec: str, layer: tuple[Tensor, Tensor, Statistics]
) -> None:
    w, x, seen = layer
    fmt = anybit.get_format(spec)
    rounded = error(anybit.RTN().quantize(w, fmt), w, x)
    assert error(GPTQ().quantize(w, fmt, seen), w, x) < 0.9 * rounded


@pytest.mark.parametrize("spec", ["sparse", "codebook:m=1,v=4,b=6", "codebook:m=2,v=8,b=5"])
def test_codes_of_several_columns(spec: str, layer: tuple[Tensor, Tensor, Statistics]) -> None:
    w, x, seen = layer
    fmt = anybit.get_format(spec)
    rounded = error(anybit.RTN().quantize(w, fmt), w, x)
    assert error(GPTQ().quantize(w, fmt, seen), w, x) < 0.99 * rounded


def test_matches_the_textbook_recursion(layer: tuple[Tensor, Tensor, Statistics]) -> None:
    """Optimal brain quantization by the explicit inverse, in the natural order and in fp64."""
    w, _, seen = layer
    fmt, k = anybit.get_format("int4:group=64"), 64
    w, h = w[:, :k].clone(), seen.hessian[:k, :k]
    quantizer = GPTQ(clip=False, act_order=False, damping=0.01)
    packed = quantizer.quantize(w, fmt, Statistics(hessian=h))
    grid = fmt.fit(w)
    rest = w.double()
    inverse = (h.double() + 0.01 * h.diagonal().mean().double() * torch.eye(k)).inverse()
    codes = []
    for j in range(k):
        code = fmt.encode(rest[:, j : j + 1].float(), grid)
        codes.append(code)
        e = (rest[:, j] - fmt.decode(code, grid)[:, 0].double()) / inverse[0, 0]
        rest[:, j:] -= e[:, None] * inverse[0]
        inverse = inverse[1:, 1:] - inverse[1:, :1] * inverse[:1, 1:] / inverse[0, 0]
    agree = (packed.codes() == torch.cat(codes, 1)).double().mean()
    assert agree > 0.999  # a tie may fall the other way in fp32


def test_without_correlation_it_rounds_to_nearest(layer: tuple[Tensor, Tensor, Statistics]) -> None:
    w, _, _ = layer
    fmt = anybit.get_format("int4:group=64,zero")
    for seen in (
        Statistics(hessian=torch.eye(K)),
        Statistics(hessian=torch.zeros(K, K)),
        Statistics(),
    ):
        packed = GPTQ(clip=False).quantize(w, fmt, seen)
        assert torch.equal(packed.codes(), anybit.RTN().quantize(w, fmt).codes())


def test_dead_columns_round_to_nearest(layer: tuple[Tensor, Tensor, Statistics]) -> None:
    w, x, _ = layer
    fmt = anybit.get_format("int4")
    x = x.clone()
    x[:, 7] = x[:, 200] = 0
    packed = GPTQ(clip=False).quantize(w, fmt, saw(x))
    nearest = anybit.RTN().quantize(w, fmt).codes()
    assert torch.equal(packed.codes()[:, [7, 200]], nearest[:, [7, 200]])
    assert not torch.equal(packed.codes(), nearest)


def test_inverse_factor() -> None:
    x = torch.randn(200, 32, dtype=torch.float64).float()
    h = x.T @ x / 200
    u = inverse_factor(h, 0.0)
    assert torch.equal(u, u.triu())
    assert torch.allclose(u.T @ u @ h, torch.eye(32), atol=1e-3)


def test_singular_hessian_is_damped_and_said() -> None:
    x = torch.randn(3, 64)
    with pytest.warns(UserWarning, match="singular with damping=0.*calibration data"):
        u = inverse_factor(x.T @ x, 0.0)
    assert torch.isfinite(u).all()


def test_hessian_that_no_damping_helps() -> None:
    h = torch.eye(4)
    h[0, 1] = h[1, 0] = float("nan")
    with pytest.raises(ValueError, match="not positive definite"):
        inverse_factor(h, 0.01)


def test_column_order_keeps_vectors_together() -> None:
    h = torch.tensor([1.0, 2, 9, 0, 5, 5]).diag()
    assert column_order(h, 1).tolist() == [2, 4, 5, 1, 0, 3]
    assert column_order(h, 2).tolist() == [4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize("spec", SPECS)
def test_clip_never_adds_error(spec: str, layer: tuple[Tensor, Tensor, Statistics]) -> None:
    w = layer[0]
    fmt = anybit.get_format(spec)
    if fmt.bits == 16 or fmt.books > 2:
        pytest.skip("k-means of large codebooks takes long and says nothing more")
    power = 4 if fmt.rowwise else 2  # rows that share tables get stretched scales
    error = (Clip().quantize(w, fmt).dequantize() - w).pow(power).sum()
    rounded = (anybit.RTN().quantize(w, fmt).dequantize() - w).pow(power).sum()
    assert error <= 1.0001 * rounded


def test_clip_gains_much_in_few_bits(layer: tuple[Tensor, Tensor, Statistics]) -> None:
    w = layer[0]
    for spec, gain in (("int2", 0.4), ("int3", 0.6), ("int4", 0.9)):
        fmt = anybit.get_format(spec)
        error = (Clip().quantize(w, fmt).dequantize() - w).square().sum()
        rounded = (anybit.RTN().quantize(w, fmt).dequantize() - w).square().sum()
        assert error < gain * rounded, spec
