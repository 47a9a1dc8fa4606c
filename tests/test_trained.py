"""Grids of quantization-aware training, found in weights that are whole multiples of a scale."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import anybit
from anybit import RTN
from anybit.files.safetensors import WEIGHTS
from anybit.nn.model import quantized_layers
from anybit.quantizers.trained import TrainedGrid, trained
from tests.test_cli import run
from tests.tiny import dense

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def multiples(
    shape: tuple[int, int], group: int, bits: int, dtype: torch.dtype, shift: int = 0
) -> tuple[Tensor, Tensor]:
    """Weights in a dtype and their numbers, whose outer levels few groups reach.

    shift: of all numbers, as zero points do.
    """
    random = torch.Generator().manual_seed(bits)
    n, k = shape
    scale = (torch.rand(n, k // group, 1, generator=random) * 0.02 + 0.002).bfloat16().float()
    half = 2 ** (bits - 1)
    q = torch.randn(n, k // group, group, generator=random).mul(half / 4).round()
    q = q.clamp(-half, half - 1) + shift
    return (q * scale).flatten(1).to(dtype), q.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(2, 7))
def test_codes_of_trained_weights(bits: int, dtype: torch.dtype) -> None:
    w, q = multiples((64, 512), 32, bits, dtype)
    fmt = anybit.get_format(f"int{bits}:group=32")
    packed = TrainedGrid().quantize(w, fmt)
    right = packed.codes() - 2.0 ** (bits - 1) == q
    assert float(right.float().mean()) > 0.999
    error = (packed.dequantize() - w.float()).norm() / w.float().norm()
    assert error < 2**-8  # of the weights' dtype
    rounded = RTN().quantize(w, fmt)
    if bits > 2:
        assert float((rounded.codes() - 2.0 ** (bits - 1) == q).float().mean()) < 0.95
    assert trained([(w[:8], fmt)]).on_grid == 1


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("group", [32, 512])
def test_codes_of_eight_bits(group: int, dtype: torch.dtype) -> None:
    """Of bf16 weights the largest numbers are off by half of one, and the scale decides."""
    w, q = multiples((64, 512), group, 8, dtype)
    fmt = anybit.get_format(f"int8:group={group}" if group < 512 else "int8")
    packed = TrainedGrid().quantize(w, fmt)
    assert float((packed.codes() - 128.0 == q).float().mean()) > 0.999
    assert float((packed.dequantize().to(dtype) == w).float().mean()) > 0.999
    found = trained([(w, fmt)])
    assert (found.on_grid, found.other) == (1, None)


def test_zero_points() -> None:
    w, q = multiples((64, 512), 32, 4, torch.bfloat16, shift=3)
    packed = TrainedGrid().quantize(w, anybit.get_format("int4:group=32,zero"))
    zero = packed.grid["zero"].repeat_interleave(32, 1)
    assert torch.equal(packed.codes().float() - zero, q)


def test_levels_that_reach_further_up() -> None:
    """As llama.cpp's Q4_0 has them, where the largest weight is positive: a negative scale."""
    random = torch.Generator().manual_seed(0)
    scale = torch.rand(64, 16, 1, generator=random) / 50 + 0.01
    q = torch.randint(-7, 9, (64, 16, 32), generator=random).float()
    q[..., 0] = 8
    w = (q * scale).flatten(1).bfloat16()
    packed = TrainedGrid().quantize(w, anybit.get_format("int4:group=32"))
    assert torch.equal(packed.codes().float() - 8, -q.flatten(1))
    assert (packed.grid["scale"] < 0).all()


@pytest.mark.parametrize("spec", ["int4:group=32", "int3:group=64,zero", "int8", "fp6", "int1"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_other_weights_are_rounded_to_nearest(spec: str, dtype: torch.dtype) -> None:
    w = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    fmt = anybit.get_format(spec)
    found = TrainedGrid().quantize(w, fmt).tensors()
    assert all(torch.equal(found[k], t) for k, t in RTN().quantize(w, fmt).tensors().items())
    assert trained([(w, fmt)])[1:] == (0, 0, 0, None)


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands say is printed without a terminal, as by `anybit` itself."""
    monkeypatch.setattr("anybit.progress._lines", True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Linear layers in whole multiples of scales of 32 columns; embeddings and head are not."""
    place = dense(tmp_path / "model")
    state = load_file(place / WEIGHTS)
    for name, tensor in state.items():
        if "proj" in name:
            state[name] = multiples((len(tensor), tensor.shape[1]), 32, 4, torch.bfloat16)[0]
    save_file(state, place / WEIGHTS, metadata={"format": "pt"})
    return place


def test_the_command(model: Path, tmp_path: Path) -> None:
    options = ("--format", "int4:group=32", "--method", "grid", "-o", tmp_path / "out")
    _, said = run("quantize", model, *options)
    assert said.count("trained grid: in 14 of 14 layers that were looked at") == 1
    state = load_file(model / WEIGHTS)
    for name, layer in quantized_layers(anybit.load(tmp_path / "out")):
        w = state[f"{name}.weight"].float()
        torch.testing.assert_close(layer.dequantize().float(), w, rtol=2**-7, atol=0)


def test_other_groups_are_told(model: Path, tmp_path: Path) -> None:
    options = ("--format", "int4:group=64", "--method", "grid", "-o", tmp_path / "out")
    _, said = run("quantize", model, *options, code=1)
    assert "trained on a grid, but with a scale for 32 columns of a row; write group=32" in said


def test_models_without_a_grid_are_quantized_as_without_the_option(tmp_path: Path) -> None:
    source, files = dense(tmp_path / "model"), []
    for out, more in (("a", ("--method", "grid")), ("b", ())):
        options = ("--format", "int8:group=32", *more, "-o", tmp_path / out)
        _, said = run("quantize", source, *options)
        assert ("no trained grid: in 0 of 14 layers" in said) == bool(more)
        files.append(load_file(tmp_path / out / WEIGHTS))
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
