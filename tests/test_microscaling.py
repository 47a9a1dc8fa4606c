"""MXFP and NVFP4 against ml_dtypes, byte by byte, and what quantizing to them chooses."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.packed import Packed, stack
from anybit.formats.microscaling import NVFP4, Microscaling
from anybit.kernels import registry
from anybit.kernels.backend import LayerSpec
from anybit.nn.sharding import Piece
from anybit.quantizers.base import Quantizer
from anybit.quantizers.clip import Clip
from anybit.quantizers.hqq import HQQ

ELEMENTS = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6": ml_dtypes.float6_e2m3fn,
    "mxfp6:e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8:e5m2": ml_dtypes.float8_e5m2,
}


def weight(n: int = 16, k: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def floats(codes: Tensor, dtype: type) -> Tensor:
    return torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))


@pytest.mark.parametrize("spec", ELEMENTS)
def test_every_code_under_every_scale_is_that_of_ml_dtypes(spec: str) -> None:
    fmt = anybit.get_format(spec)
    assert isinstance(fmt, Microscaling)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]  # 255 is NaN
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    element = floats(codes, ELEMENTS[spec])
    codes = codes[element.isfinite()].expand(255, -1)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32))
    groups = padded.shape[1] // 32
    grid = {"scale": scale.expand(255, groups).contiguous().view(torch.float8_e8m0fnu)}
    got = fmt.decode(padded, grid)[:, : codes.shape[1]]
    power = floats(scale, ml_dtypes.float8_e8m0fnu)
    assert torch.equal(got, element[element.isfinite()] * power)


@pytest.mark.parametrize("divide", [False, True])
def test_nvfp4_is_e2m1_times_e4m3_times_fp32(divide: bool) -> None:
    fmt = NVFP4(divide=divide)
    scale = torch.arange(1, 127, dtype=torch.uint8)[:, None]  # the positive numbers
    codes = torch.arange(16, dtype=torch.uint8).expand(126, 16)
    for number in (1.0, 0.0123, 3.7e-5, 411.9):
        row = torch.full((126, 1), number)
        grid = {"scale": scale.view(torch.float8_e4m3fn), "row_scale": row}
        e4m3 = floats(scale, ml_dtypes.float8_e4m3fn)
        want = floats(codes, ml_dtypes.float4_e2m1fn) * (e4m3 / row if divide else e4m3 * row)
        assert torch.equal(fmt.decode(codes, grid), want)


@pytest.mark.parametrize("spec", ELEMENTS)
def test_a_scale_is_the_better_of_two_powers(spec: str) -> None:
    """By brute force: no power of two leaves a smaller error, and OCP's leaves no smaller one."""
    w = weight(4, 128)
    packed = anybit.quantize_tensor(w, spec)
    fmt = packed.format

    def errors(scale: Tensor) -> Tensor:
        grid = {"scale": scale}
        error = fmt.decode(fmt.encode(w, grid), grid) - w
        return error.square().view(4, -1, 32).sum(-1)

    best = errors(packed.grid["scale"])
    chosen = packed.grid["scale"].view(torch.uint8)
    for step in range(-3, 4):
        other = errors((chosen + step).view(torch.float8_e8m0fnu))
        assert (best <= other).all()


def test_four_over_six() -> None:
    """16 equal weights become exact at 6 or 4; 3 / 4 of the largest is exact only at 4."""
    fmt = NVFP4()
    w = torch.full((1, 32), 1.0)
    w[0, 16:31] = 0.75  # 4.5 of 6, but 3 of 4
    packed = anybit.quantize_tensor(w, fmt)
    assert packed.codes()[0, 31] == 6  # e2m1's 4
    assert packed.codes()[0, 0] == 7  # 6
    assert (packed.dequantize() - w).abs().max() < 1e-6
    w = weight(64, 512)
    plain = fmt.fit(w)
    largest = w.view(64, -1, 16).abs().amax(-1)
    six = (largest / 6 / plain["row_scale"]).to(torch.float8_e4m3fn)
    grid = plain | {"scale": six}
    error = (fmt.decode(fmt.encode(w, grid), grid) - w).norm()
    assert (anybit.quantize_tensor(w, fmt).dequantize() - w).norm() < 0.97 * error


def test_one_number_for_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.quantizers.rtn.CHUNK", 3 * 256)
    monkeypatch.setattr("anybit.formats.microscaling.PIECE", 5 * 256)
    w = weight(16, 256)
    got = anybit.quantize_tensor(w, "nvfp4")
    assert got.grid["row_scale"].unique().numel() == 1
    monkeypatch.undo()
    assert torch.equal(got.dequantize(), anybit.quantize_tensor(w, "nvfp4").dequantize())


def test_weights_with_different_numbers_are_one_weight() -> None:
    parts = [anybit.quantize_tensor(weight(8, 64, seed) * 10**seed, "nvfp4") for seed in range(3)]
    both = stack(parts)
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
    x = torch.randn(3, 64)
    assert torch.allclose(anybit.linear(x, both), x @ both.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["mxfp4", "mxfp8:e5m2", "nvfp4", "nvfp4:divide"])
def test_a_range_as_wide_as_fp32(spec: str) -> None:
    for size in (1e-36, 1e-20, 1e20, 1e36):
        w = weight(4, 64) * size
        w[1] = 0
        got = anybit.quantize_tensor(w, spec).dequantize()
        assert got.isfinite().all()
        assert not got[1].any()
        assert ((got - w).double().norm() / w.double().norm()) < 0.15


@pytest.mark.parametrize("quantizer", [Clip(), HQQ()])
@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4"])
def test_fitted_scales_are_never_zero_nor_nan(spec: str, quantizer: Quantizer) -> None:
    w = weight(8, 128)
    w[3, 32:64] = 0
    packed = anybit.quantize_tensor(w, spec, quantizer)
    scale = packed.grid["scale"].float()
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert (packed.dequantize() - w).norm() < 0.15 * w.norm()


def test_gpus_kernels_take_them() -> None:
    for spec in ("mxfp4", "mxfp6", "mxfp6:e3m2", "mxfp8", "mxfp8:e5m2", "nvfp4", "nvfp4:divide"):
        layer = LayerSpec(anybit.get_format(spec), None, (256, 512), torch.device("cpu"))
        assert registry.get_backend("triton").refuse(layer) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mxfp4:e3m0", "mxfp4 has no 'e3m0'; its elements are e2m1"),
        ("mxfp6:e4m3", "mxfp6 has no 'e4m3'; its elements are e2m3, e3m2"),
        ("mxfp8:divide", "mxfp8 has no 'divide'; its elements are e4m3, e5m2"),
        ("nvfp4:e2m1", "unknown option 'e2m1' in format 'nvfp4'; known options: group, divide"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        anybit.get_format(spec)


def test_shortest_specs() -> None:
    for spec in ("mxfp4", "mxfp6", "mxfp6:e3m2", "mxfp8", "mxfp8:e5m2,group=128", "nvfp4:group=32"):
        assert anybit.get_format(spec).spec == spec
    assert anybit.get_format("mxfp6:e2m3").spec == "mxfp6"


def test_bits() -> None:
    assert anybit.get_format("mxfp4").bits_per_weight((4096, 4096)) == 4.25
    assert anybit.get_format("mxfp6").bits_per_weight((4096, 4096)) == 6.25
    assert anybit.get_format("nvfp4").bits_per_weight((4096, 4096)) == 4.5 + 32 / 4096


def test_a_shard_is_a_slice() -> None:
    packed = anybit.quantize_tensor(weight(8, 256), "nvfp4")
    w = packed.dequantize()
    assert torch.equal(packed.rows(slice(2, 5)).dequantize(), w[2:5])
    assert torch.equal(packed.columns(slice(64, 128)).dequantize(), w[:, 64:128])
    again = Packed.from_tensors(packed.format, packed.shape, packed.tensors())
    assert torch.equal(again.dequantize(), w)


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4"])
def test_rows_that_are_not_stored_are_zero(spec: str) -> None:
    packed = anybit.quantize_tensor(weight(8, 64), spec)
    piece = Piece("head", spec, 12, 64)
    for key, tensor in packed.tensors().items():
        piece.take(key, tensor, padded=True)
    whole = piece.finish()
    assert isinstance(whole, Packed)
    assert torch.equal(whole.dequantize()[:8], packed.dequantize())
    assert not whole.dequantize()[8:].any()


def test_numbers_that_divide_are_powers_of_two() -> None:
    for size in (1e-36, 0.3, 1, 768, 1e36):
        w = weight(8, 64) * size
        row = anybit.quantize_tensor(w, "nvfp4:divide").grid["row_scale"]
        assert (torch.frexp(row)[0] == 0.5).all()
        got = anybit.quantize_tensor(w, "nvfp4:divide").dequantize()
        assert ((got - w).double().norm() / w.double().norm()) < 0.12
