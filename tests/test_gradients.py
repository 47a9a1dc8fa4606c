"""GPTQ across rows: gradients at the outputs of layers, and rounding that minds them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

import anybit
from anybit import GPTQ, Calibration
from anybit.core.rotation import Rotation, signs, turned
from anybit.errors import InvalidInput, Unsupported
from anybit.nn.model import dense_layers, taken_apart
from anybit.planning.allocate import plan_formats
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.calibration import driver, gradients
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.gradients import ROWS, moments, output_gradients
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.gptq import row_factors
from anybit.quantizers.rows import propagate_both
from tests.tiny import SIZES, llama, same_state

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
    got, weights = output_gradients(model, ["head"], ids)["head"]
    assert got.shape == (2, ROWS, ROWS)
    p = model(ids).logits.softmax(-1).flatten(0, 1)
    want = torch.zeros(2 * ROWS, 2 * ROWS)
    want[:300, :300] = torch.diag(p.mean(0)) - p.T @ p / len(p)
    for i, block in enumerate(got):
        at = slice(i * ROWS, (i + 1) * ROWS)
        assert (block - want[at, at]).norm() < 0.12 * want[at, at].norm()
    assert weights.shape == (30000,)
    assert abs(float(weights.mean()) - 1) < 1e-3
    surprise = 1 - (p * p).sum(1)  # the mean of |g|^2 over the tokens that may be drawn
    assert torch.corrcoef(torch.stack((weights, surprise)))[0, 1] > 0.1
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


def test_tokens_count_by_their_weights() -> None:
    """As if a token of weight 2 came twice, in the second moments alone."""
    x, dense = random(30, 8), random(30, 8, seed=1)
    weights = torch.tensor([2.0, 1.0, 0.0] * 10)
    got, want = Statistics(), Statistics()
    needs = ("hessian", "drift", "amax")
    for part in (slice(0, 12), slice(12, None)):
        got.add(x[part], needs, 1, dense[part], weights[part])
    twice = torch.arange(30).repeat_interleave(weights.long())
    want.add(x[twice], needs, 1, dense[twice])
    assert torch.allclose(got.hessian, want.hessian, atol=1e-5)
    assert torch.allclose(got.drift, want.drift, atol=1e-5)
    assert torch.equal(got.amax, x.abs().amax(0))


def test_layers_of_one_input_share_the_weights_of_its_tokens() -> None:
    names = [f"model.layers.0.{n}" for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")]
    model = llama(dtype=torch.float32)
    found = output_gradients(model, names, IDS)
    alone = output_gradients(model, names[:1], IDS)[names[0]]
    q, v, up = (found[name] for name in names)
    assert torch.equal(q.weights, v.weights)
    assert not torch.equal(q.weights, up.weights)
    assert torch.allclose(q.moments, alone.moments)
    assert not torch.allclose(q.weights, alone.weights)


def test_whole_models(tmp_path: Path) -> None:
    """In a rotated format too, and again from a work folder."""
    spec, data = "int3:group=16,rotate=kn", Calibration(IDS, work=tmp_path / "work")

    def weights(quantizer: Quantizer) -> Tensor:
        state = anybit.quantize_(llama(), spec, quantizer).state_dict()
        return torch.cat([t.flatten().double() for t in state.values()])

    first, again = (weights(GPTQ(data, gradients=True)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, weights(GPTQ(IDS)))
    assert torch.equal(first, weights(anybit.Additive(IDS, steps=0, gradients=True)))


@pytest.mark.parametrize("n", [16, 576, 896])
def test_rows_are_damped_by_the_mean_of_real_ones(n: int) -> None:
    g = random(300, n) + random(300, 1, seed=1)
    factors = row_factors(moments(g), n, 0.1)
    want = torch.block_diag(*factors)[:n, :n].double()
    for part in torch.arange(n).split(ROWS):
        own = part[0], part[-1] + 1
        u = want[own[0] : own[1], own[0] : own[1]]
        g_own = g[:, part].double()
        h = g_own.T @ g_own
        added = (u.T @ u).inverse() - h
        damping = 0.1 * h.diagonal().mean() * torch.eye(len(part))
        assert (added - damping).norm() < 0.02 * damping.norm()


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 8, "num_experts_per_tok": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes)).eval()


def test_experts_without_tokens() -> None:
    """Which the dense model gave none: they round as without gradients."""
    ids, plan = IDS[:1, :4], {"*": None, "*experts*": "int8"}
    with taken_apart(model := mixture()):
        names = [name for name in dense_layers(model) if "experts" in name]
        found = output_gradients(model, names, ids)
    assert 0 < sum(bool(one.moments.any()) for one in found.values()) < len(names) == 2 * 8 * 3
    assert not any(one.weights.numel() for one in found.values())
    with pytest.warns(UserWarning, match="fewer calibration tokens"):
        anybit.quantize_(mixture(), plan, GPTQ(ids, gradients=True))


def test_turns_are_those_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read one input are quantized in one turn, also when each has gradients."""
    asked: list[list[str]] = []
    collect = BlockRunner.collect

    def watched(self: BlockRunner, index: int, names: Any, *more: Any) -> Any:
        asked.append(list(names))
        return collect(self, index, names, *more)

    monkeypatch.setattr(BlockRunner, "collect", watched)
    anybit.quantize_(llama(), {"*": None, "*_proj": "int4"}, GPTQ(IDS, follow=True, gradients=True))
    assert [len(names) for names in asked] == [7, 1, 2, 1] * 2


def test_finished_blocks_need_no_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def watched(model: nn.Module, names: list[str], *more: Any) -> Any:
        asked.append(names)
        return output_gradients(model, names, *more)

    monkeypatch.setattr(driver, "output_gradients", watched)
    data = Calibration(IDS, work=tmp_path / "work")
    plan = {"*": None, "*_proj": "int4"}
    first = anybit.quantize_(llama(), plan, GPTQ(data, gradients=True))
    (tmp_path / "work" / "block_0001.safetensors").unlink()
    second = anybit.quantize_(llama(), plan, GPTQ(data, gradients=True))
    same_state(first, second)
    anybit.quantize_(llama(), plan, GPTQ(data, gradients=True))
    assert [len(names) for names in asked] == [14, 7]
    assert all(name.startswith("model.layers.1.") for name in asked[1])


def test_large_vocabularies_take_fewer_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    model = llama(dtype=torch.float32)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    names = ["model.layers.0.mlp.up_proj"]
    output_gradients(model, names, IDS)
    monkeypatch.setattr(gradients, "LOGITS", 2 * 32 * 256)
    output_gradients(model, names, IDS)
    assert sizes == [1, 3, 1, 2, 1]


def test_bad_predictions_are_said() -> None:
    """Of weights that are finite, but too large for 16 bits."""
    model = llama(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight[3] = 6e4
        model.model.norm.weight.fill_(100)
    plan = {"*": None, "*_proj": "int4"}
    with pytest.raises(InvalidInput, match="predictions hold NaN"):
        anybit.quantize_(model, plan, GPTQ(IDS, gradients=True))


def test_large_logits_of_16_bits() -> None:
    """Their sum overflows, and they do not."""
    model = llama(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.fill_(1)
        model.model.norm.weight.fill_(100)
        assert not model(IDS).logits.sum().isfinite()
    assert gradients.predictions(model, IDS).isfinite().all()


def test_layers_that_no_gradient_reaches() -> None:
    model = Bigrams(30, 16)
    model.unused = nn.Linear(16, 16)
    with pytest.raises(InvalidInput, match="no gradient reached unused"):
        output_gradients(model, ["head", "unused"], IDS % 30)


def test_a_layer_alone_has_no_gradients() -> None:
    seen = Statistics(32, hessian=correlated(32, 3))
    with pytest.raises(InvalidInput, match="needs gradients"):
        quantize_weight(GPTQ(gradients=True), random(16, 32), anybit.get_format("int4"), seen)


def test_plans_are_made_without() -> None:
    with pytest.raises(InvalidInput, match="without gradients=True"):
        plan_formats(llama(), IDS, 4.5, quantizer=GPTQ(gradients=True))


def test_tiles_that_do_not_divide_blocks_of_rows() -> None:
    fmt = Mock(tile=(48, 16))
    w, one = random(480, 16), torch.eye(ROWS).repeat(2, 1, 1)
    with pytest.raises(Unsupported, match="tiles of 48 rows"):
        propagate_both(w, torch.eye(16), torch.arange(16), one, fmt, {})


def test_refused() -> None:
    batches = Calibration([{"input_ids": IDS}])
    with pytest.raises(Unsupported, match="token ids"):
        anybit.quantize_(llama(), "int4", GPTQ(batches, gradients=True))
    with pytest.raises(Unsupported, match="no logits"):
        anybit.quantize_(llama().model, "int4", GPTQ(IDS, gradients=True))
    labels = LlamaForSequenceClassification(llama().config).bfloat16()
    labels.config.pad_token_id = 0
    with pytest.raises(Unsupported, match=r"logits \(\d, 2\)"):
        anybit.quantize_(labels, {"*": None, "*_proj": "int4"}, GPTQ(IDS, gradients=True))
    with pytest.raises(Unsupported, match="rotate"):
        anybit.Smooth(IDS, then=GPTQ(gradients=True))
