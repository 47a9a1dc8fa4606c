"""The planner: predictions against measured KL, an exact knapsack, plans that quantize_ takes."""

import itertools
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import anybit
from anybit.errors import InvalidInput
from anybit.evaluate.corpus import calibration_text, held_out_text
from anybit.formats.presets import CANDIDATES as OFFERED
from anybit.nn.model import quantized_layers
from anybit.planning.allocate import (
    SAMPLE,
    knapsack,
    plan_formats,
    predicted_kl,
    sampled_rows,
    squared_gradients,
    weight_error,
)
from anybit.planning.allocation import Allocation
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.calibration.statistics import Statistics
from tests import tiny

PICO = Path(__file__).resolve().parents[1] / "models" / "pico"
VOCAB = 64
CANDIDATES = ("int2:group=32,zero", "int4:group=32", "int8")


@cache
def trained() -> dict[str, Tensor]:
    """A small model that has learnt the rules of `text`."""
    torch.manual_seed(0)
    model = blank()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(150):
        ids = text(16, seed=step + 100)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def blank() -> nn.Module:
    sizes = tiny.SIZES | {"vocab_size": VOCAB, "intermediate_size": 96, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64))


def make() -> nn.Module:
    model = blank()
    model.load_state_dict(trained())
    return model.eval()


def text(samples: int, seed: int, length: int = 32) -> Tensor:
    """A token follows from the one before, by one of two rules that the token before it chooses."""
    random, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    rules = torch.stack([torch.randperm(VOCAB, generator=fixed) for _ in range(2)])
    ids = torch.randint(VOCAB, (samples, length), generator=random)
    noise = torch.rand(samples, length, generator=random) < 0.15
    for at in range(2, length):
        rule = rules[ids[:, at - 2] % 2, ids[:, at - 1]]
        ids[:, at] = torch.where(noise[:, at], ids[:, at], rule)
    return ids


def logarithms(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits, -1)


def kl(model: nn.Module, ids: Tensor, p: Tensor) -> float:
    """Mean KL(dense || model) in nats per token. p: `logarithms` of the dense model."""
    return float((p.exp() * (p - logarithms(model, ids))).sum(-1).mean())


@pytest.fixture(scope="module")
def plan() -> Allocation:
    return plan_formats(
        make(), text(24, seed=1), 4.0, candidates=CANDIDATES, quantizer=anybit.RTN()
    )


def test_prediction_is_near_the_measured_kl(plan: Allocation) -> None:
    """Each group of layers quantized alone: the right order of magnitude, and the right order."""
    fresh, pairs = text(24, seed=2), []
    p = logarithms(make(), fresh)
    for group in plan.groups:
        for option in group.options[:2]:
            model = anybit.quantize_(
                make(), {"*": None} | dict.fromkeys(group.names, option.scheme)
            )
            pairs.append((option.loss, kl(model, fresh, p)))
    predicted, measured = torch.tensor(pairs).log().T
    assert float((predicted - measured).abs().max()) < 1.6  # within a factor of 5
    assert float((predicted - measured).abs().mean()) < 0.5
    assert float(torch.corrcoef(torch.stack((predicted, measured)))[0, 1]) > 0.95


@pytest.mark.parametrize("spec", ["trellis", "trellis:rotate=kn"])
def test_formats_that_are_slow_to_encode_are_predicted_by_some_rows(spec: str) -> None:
    """Rows of a weight and their gradients differ much, and the sample stands for them all."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(512, 64, generator=random) * torch.linspace(0.5, 2, 512)[:, None]
    x = torch.randn(400, 64, generator=random) @ torch.randn(64, 64, generator=random)
    seen = Statistics()
    seen.add(x, ("hessian",), 1)
    gradients = {"a": torch.rand(512, generator=random).square()}
    for quantizer in (anybit.RTN(), anybit.GPTQ()):
        fmt = anybit.get_format(spec)
        got = predicted_kl(quantizer, gradients, "a", w, fmt, seen)
        error = quantize_weight(quantizer, w, fmt, seen).dequantize() - w
        whole = 0.5 * float(((error @ seen.hessian) * error).sum(1) @ gradients["a"])
        assert got == pytest.approx(whole, rel=0.2)
    assert weight_error(anybit.RTN(), "a", w, fmt, seen) == pytest.approx(0.068, rel=0.1)


class Counted(anybit.Clip):
    """Clip search that notes how many rows it was given."""

    def fit(self, w: Tensor, fmt: anybit.Format) -> dict[str, Tensor]:
        self.__dict__["rows"] = self.__dict__.get("rows", 0) + len(w)
        return super().fit(w, fmt)


def whole_error(quantizer: anybit.RTN, w: Tensor, spec: str) -> float:
    error = quantize_weight(quantizer, w, anybit.get_format(spec)).dequantize() - w
    return float(error.square().sum() / w.square().sum())


@pytest.mark.parametrize("spec", [*OFFERED, "int4:rotate=k", "mxfp4", "liquid"])
def test_errors_of_a_weight_are_estimated_by_some_rows(spec: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    fmt, got, want, counted = anybit.get_format(spec), [], [], Counted()
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        for block in (0, 3):
            w = model.get_submodule(f"model.layers.{block}.{name}").weight.detach()
            got.append(weight_error(counted, "a", w, fmt, Statistics()))
            want.append(whole_error(anybit.Clip(), w, spec))
    assert counted.__dict__["rows"] == SAMPLE * len(got)
    assert got == pytest.approx(want, rel=0.03)
    assert sum(got) == pytest.approx(sum(want), rel=0.01)


@pytest.mark.parametrize("spec", ["int6:group=128", "int8"])
def test_a_sample_stands_for_rows_that_it_misses(spec: str) -> None:
    """Few rows have a large number, which gives them most of the error."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(1024, 256, generator=random)
    w[torch.randperm(1024, generator=random)[:40], 7] *= 12
    fmt, want = anybit.get_format(spec), whole_error(anybit.Clip(), w, spec)
    assert weight_error(anybit.Clip(), "a", w, fmt, Statistics()) == pytest.approx(want, rel=0.02)
    alone = whole_error(anybit.Clip(), w[sampled_rows(w, fmt)], spec)
    assert alone != pytest.approx(want, rel=0.2)


def test_errors_that_no_sample_shows_are_measured_whole() -> None:
    """Tables and rotations that rows share, and a sample of rows without an error."""
    random = torch.Generator().manual_seed(0)
    shared, sparse = torch.randn(256, 64, generator=random), torch.zeros(256, 64)
    sparse[101] = shared[101]
    for w, spec in (
        (shared, "codebook:m=1,v=4"),
        (shared, "int4:rotate=kn"),
        (sparse, "int4"),
    ):
        got = weight_error(anybit.Clip(), "a", w, anybit.get_format(spec), Statistics())
        assert got == pytest.approx(whole_error(anybit.Clip(), w, spec), rel=1e-5)
        assert got > 0


def test_no_plan_is_worse_than_one_format_of_its_size() -> None:
    """The whole budget, which rounded costs exceed."""
    given = {"candidates": ["int2:group=32,zero", "int4:group=32"], "quantizer": anybit.RTN()}
    for uniform in plan_formats(make(), None, 8.0, **given).uniform():
        got = plan_formats(make(), None, uniform.bits, **given)
        assert got.loss <= uniform.loss
        assert got.bits <= uniform.bits * (1 + 1e-12)


def test_trellis_codes_and_rotations_are_offered_for_few_bits() -> None:
    looked_up = "trellis:code=look,rotate=kn"
    model, ids = make(), text(24, seed=1)
    chosen = plan_formats(model, ids, 2.9, quantizer=anybit.RTN())
    assert looked_up in {option.scheme for option in chosen.chosen}
    assert chosen.bits <= 2.9
    anybit.quantize_(model, chosen.plan)
    fresh = text(24, seed=2)
    assert chosen.loss / 3 < kl(model, fresh, logarithms(make(), fresh)) < chosen.loss * 3
    by_name = {it.budget: it for it in chosen.uniform()}
    assert by_name[looked_up].bits < by_name["int2:group=32,zero"].bits
    assert by_name[looked_up].loss < 0.7 * by_name["int2:group=32,zero"].loss
    more = plan_formats(make(), None, 3.0, quantizer=anybit.RTN())
    assert looked_up not in {it.budget for it in more.uniform()}


def test_gradients_are_those_of_the_fisher_information() -> None:
    """For the logits themselves, E g^2 of sampled labels is p (1 - p)."""
    model = make()
    ids = text(64, seed=3)
    got = squared_gradients(model, ["lm_head"], ids)["lm_head"]
    with torch.no_grad():
        p = torch.softmax(model(ids).logits, -1)
    want = (p * (1 - p)).mean((0, 1))
    assert float(got.sum()) == pytest.approx(float(want.sum()), rel=0.1)
    assert float(torch.corrcoef(torch.stack((got, want)))[0, 1]) > 0.6  # 30 labels for a token
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


def test_groups_are_layers_with_one_input(plan: Allocation) -> None:
    kinds = [tuple(n.rpartition(".")[2][0] for n in group.names) for group in plan.groups]
    assert kinds == [("q", "k", "v"), ("o",), ("g", "u"), ("d",)] * 3
    assert [group.weights for group in plan.groups[:2]] == [64 * 128, 64 * 64]


def test_plan_is_what_quantize_takes_and_costs_what_it_says(
    plan: Allocation, tmp_path: Path
) -> None:
    assert plan.bits <= 4.0
    assert len({option.scheme for option in plan.chosen}) > 1
    plan.save(tmp_path / "plan.json")
    model = anybit.quantize_(make(), json.loads((tmp_path / "plan.json").read_text()))
    layers = dict(quantized_layers(model))
    assert layers.pop("lm_head").scheme == "int8"  # its bits are beside the budget
    for group, option in zip(plan.groups, plan.chosen, strict=True):
        assert {layers[name].scheme for name in group.names} == {option.scheme}
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    stored = sum(layer.packed.nbytes() for layer in layers.values())
    assert stored * 8 / weights == pytest.approx(plan.bits, rel=1e-6)


def test_beats_uniform_choices_of_a_real_model_at_equal_bytes() -> None:
    """models/pico, planned on one text of Python and measured on another."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)

    def ids(text: list[tuple[str, str]], samples: int) -> Tensor:
        whole = torch.tensor(tokenizer(text[0][1] + text[1][1], verbose=False).input_ids)
        return whole[: samples * 256].view(samples, 256)

    def pico() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32).eval()

    offered = ("int3:group=64", "int4:group=128", "int4:group=32", "int5:group=128")
    chosen = plan_formats(
        pico(), ids(calibration_text(), 6), 4.5, candidates=offered, quantizer=anybit.RTN()
    )
    assert 4.49 < chosen.bits <= 4.5
    fresh = ids(held_out_text(), 4)
    p = logarithms(pico(), fresh)
    planned = kl(anybit.quantize_(pico(), chosen.plan), fresh, p)
    for uniform in chosen.uniform():
        if uniform.bits <= 4.5:
            assert chosen.loss < uniform.loss
            # int4:group=32 takes 4.5 bits as well.
            got = kl(anybit.quantize_(pico(), uniform.budget), fresh, p)
            assert planned < 0.85 * got, uniform.budget


def test_calibrated_quantizer_predicts_less_loss() -> None:
    def uniform(quantizer: anybit.RTN | anybit.GPTQ) -> float:
        ids = text(24, seed=1)
        return plan_formats(make(), ids, 8.1, candidates=["int3"], quantizer=quantizer).loss

    assert uniform(anybit.GPTQ()) < 0.8 * uniform(anybit.RTN())


def test_without_text_by_the_errors_of_the_weights(plan: Allocation) -> None:
    model = make()
    got = plan_formats(model, None, 4.5, candidates=["int3", "int4", "fp6"], quantizer=anybit.RTN())
    assert [group.names for group in got.groups] == [group.names for group in plan.groups]
    group = got.groups[0]
    want = 0.0
    for name in group.names:
        w = model.get_submodule(name).weight.detach()  # type: ignore[union-attr, operator]
        error = anybit.dequantize(anybit.quantize_tensor(w, "int4")).float() - w
        want += float(error.square().sum() / w.square().sum())
    assert group.options[1].loss == pytest.approx(want, rel=1e-3)
    assert got.bits <= 4.5
    assert "weight error x 1000" in got.table()
    with pytest.raises(InvalidInput, match="GPTQ needs text"):
        plan_formats(model, None, 4.5, quantizer=anybit.GPTQ())


def test_table_and_plot(plan: Allocation, tmp_path: Path) -> None:
    table = plan.table()
    assert "model.layers.1.self_attn.q_proj, k_proj, v_proj" in table
    assert f"{plan.bits:.3f}" in table
    assert "us" not in table.split()
    assert "lm_head" in table
    assert all(option.scheme in table for option in plan.groups[0].options)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_heads_that_are_kept() -> None:
    """Where none is asked for, and where the weight would still be needed as it is."""
    given = {"candidates": ["int4"], "quantizer": anybit.RTN()}
    assert plan_formats(make(), None, 4.5, head=None, **given).heads == ()
    model = make()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.model.embed_tokens.max_norm = 1.0  # what no codes can be looked up for
    assert plan_formats(model, None, 4.5, **given).heads == ()
    with pytest.raises(ValueError, match="int4:group=48"):
        plan_formats(make(), None, 4.5, head="int4:group=48", **given)


@pytest.mark.parametrize("head", ["int8", "int6@int8"])
def test_a_tied_head_shares_codes_with_the_embeddings(head: str, tmp_path: Path) -> None:
    model = make()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    given = {"candidates": ["int4"], "quantizer": anybit.RTN()}
    found = plan_formats(model, None, 4.5, head=head, **given)
    words = head.partition("@")[0]
    assert found.heads == (("model.embed_tokens", words), ("lm_head", head))
    found.save(tmp_path / "plan.json")
    anybit.quantize_(model, json.loads((tmp_path / "plan.json").read_text()))
    layers = dict(quantized_layers(model))
    assert layers["lm_head"].scheme == head
    looked_up = model.model.embed_tokens
    assert looked_up.packed.planes[0] is layers["lm_head"].packed.planes[0]


@pytest.mark.parametrize("seed", range(5))
def test_knapsack_by_brute_force(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 60, (6, 4), generator=random).double()
    losses = torch.rand(6, 4, generator=random, dtype=torch.float64)
    budget = float(costs.amin(1).sum()) + 50.5  # ties within a bin are not told apart
    got = knapsack(costs.tolist(), losses.tolist(), budget)
    best = min(
        sum(float(losses[i, c]) for i, c in enumerate(choice))
        for choice in itertools.product(range(4), repeat=6)
        if sum(float(costs[i, c]) for i, c in enumerate(choice)) <= budget
    )
    assert sum(float(costs[i, c]) for i, c in enumerate(got)) <= budget
    assert sum(float(losses[i, c]) for i, c in enumerate(got)) == pytest.approx(best)


def test_knapsack_with_nothing_to_spare() -> None:
    assert knapsack([[1.0, 2.0], [3.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], 2.0) == [0, 1]


def test_bad_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, small = text(2, seed=1), ["int2:group=32,zero", "int4"]
    with monkeypatch.context() as patch:
        patch.setattr("anybit.planning.allocate.sensitivities", None)  # nothing is measured before
        with pytest.raises(ValueError, match=r"smallest choice of these formats, 2\.75. bits"):
            plan_formats(make(), ids, 1.5, candidates=small)
        with pytest.raises(ValueError, match="bits=nan is not a budget"):
            plan_formats(make(), ids, math.nan, candidates=small)
        quantized = anybit.quantize_(make(), "int8")
        with pytest.raises(ValueError, match="quantized already; give the dense model"):
            plan_formats(quantized, ids, 4, candidates=small)
    with pytest.raises(ValueError, match="Embedding has no linear layers to plan for; give a"):
        plan_formats(nn.Embedding(VOCAB, 8), None, bits=4.0)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: none of int4:group=48"):
        plan_formats(make(), ids, 4, candidates=["int4:group=48"])
