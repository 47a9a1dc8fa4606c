"""GPTQ across rows: gradients at the outputs of layers, and rounding that minds them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit import GPTQ, Calibration
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.core.rotation import Rotation, signs, turned
from anybit.errors import Unsupported
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.calibration.gradients import ROWS, moments, output_gradients
from anybit.quantizers.calibration.statistics import Statistics
from tests.tiny import llama

IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Bigrams(nn.Module):
    """Predicts a token from the one before, by one layer."""

    def __init__(self, tokens: int, inputs: int):
        super().__init__()
        self.table = nn.Embedding(tokens, inputs)
        self.head = nn.Linear(inputs, tokens, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


def test_moments_are_those_of_the_predictions() -> None:
    """At the logits a gradient is p - onehot(y), whose second moment is diag(p) - p p^T."""
    torch.manual_seed(0)
    model = Bigrams(300, 16)
    ids = torch.randint(0, 300, (30, 1000))
    got = output_gradients(model, ["head"], ids)["head"]
    assert got.shape == (2, ROWS, ROWS)
    p = model(ids).logits.softmax(-1).flatten(0, 1)
    want = torch.zeros(2 * ROWS, 2 * ROWS)
    want[:300, :300] = torch.diag(p.mean(0)) - p.T @ p / len(p)
    for i, block in enumerate(got):
        at = slice(i * ROWS, (i + 1) * ROWS)
        assert (block - want[at, at]).norm() < 0.12 * want[at, at].norm()
    assert not got[1, 44:].any()
    assert not got[1, :, 44:].any()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("n", [48, 320, 512])
def test_moments_are_rotated_as_outputs_are(n: int) -> None:
    g, vector = random(40, n), signs(n).float()
    rotation = Rotation(signs(16), vector[:, None])
    got = Statistics(gradients=moments(g), hessian=torch.eye(16)).rotated(rotation).gradients
    assert torch.allclose(got, moments(turned(g * vector)), atol=1e-4)


def correlated(size: int, seed: int) -> Tensor:
    """A second moment (size, size) of a few strong directions among weak ones."""
    x = random(4 * size, size, seed=seed) @ (torch.eye(size) + random(size, size, seed=seed + 1))
    return x.T @ x / len(x)


@pytest.mark.parametrize("spec", ["int3:group=16", "nvfp4", "trellis", "trellis:code=pair8"])
@pytest.mark.parametrize("n", [48, 272])
def test_rows_make_up_for_rows(spec: str, n: int) -> None:
    """The cost tr(G E H E^T) falls; with G = 1, nothing changes."""
    k = 32
    w, h = random(n, k), correlated(k, 3)
    g = correlated(n, 5)
    size = min(n, ROWS)
    blocks = torch.zeros(-(-n // size), size, size)
    for i, block in enumerate(blocks):
        part = g[i * size : (i + 1) * size, i * size : (i + 1) * size]
        block[: len(part), : len(part)] = part
    kept = torch.block_diag(*blocks)[:n, :n]
    fmt = anybit.get_format(spec)

    def cost(packed: anybit.Packed) -> float:
        e = packed.dequantize() - w
        return float(((kept @ e) * (e @ h)).sum())

    alone = GPTQ(damping=0.01).quantize(w, fmt, Statistics(n, hessian=h))
    two = GPTQ(damping=0.01, gradients=True)
    both = two.quantize(w, fmt, Statistics(n, hessian=h, gradients=blocks))
    assert cost(both) < 0.95 * cost(alone)
    eye = torch.eye(size).repeat(len(blocks), 1, 1)
    same = two.quantize(w, fmt, Statistics(n, hessian=h, gradients=eye))
    assert (same.codes() == alone.codes()).float().mean() > 0.999  # sums are in another order


def test_whole_models(tmp_path: Path) -> None:
    """In a rotated format too, and again from a work folder; a layer alone has no gradients."""
    spec, data = "int3:group=16,rotate=kn", Calibration(IDS, work=tmp_path / "work")

    def weights(quantizer: Quantizer) -> Tensor:
        state = anybit.quantize_(llama(), spec, quantizer).state_dict()
        return torch.cat([t.flatten().double() for t in state.values()])

    first, again = (weights(GPTQ(data, gradients=True)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, weights(GPTQ(IDS)))
    assert torch.equal(first, weights(anybit.Additive(IDS, steps=0, gradients=True)))
    seen = Statistics(32, hessian=correlated(32, 3))
    fmt, w = anybit.get_format("int4"), random(16, 32)
    one, other = (quantize_weight(GPTQ(gradients=g), w, fmt, seen) for g in (False, True))
    assert torch.equal(one.dequantize(), other.dequantize())


def test_refused(tmp_path: Path) -> None:
    batches = Calibration([{"input_ids": IDS}])
    with pytest.raises(Unsupported, match="token ids"):
        anybit.quantize_(llama(), "int4", GPTQ(batches, gradients=True))
    with pytest.raises(Unsupported, match="rotate"):
        anybit.Smooth(IDS, then=GPTQ(gradients=True))
    llama().save_pretrained(tmp_path / "dense")
    dense, out = tmp_path / "dense", tmp_path / "out"
    with pytest.raises(Unsupported, match="from disk"):
        calibrate_checkpoint(dense, out, "int4", GPTQ(IDS, gradients=True))
