"""Adapters of peft on quantized layers: trained, saved, merged, or refused."""

import copy
import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

import anybit
from anybit.core.packed import Packed
from anybit.errors import InvalidInput, Unsupported
from anybit.integrations import hook
from anybit.nn.linear import QuantLinear
from anybit.nn.model import quantized_layers
from tests.tiny import SIZES, TOKENS, llama, logits, same_state

# transformers 5.23 has other names for it, which transformers 5.17 and peft 0.21 do not know.
pytestmark = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
CODEBOOK = "codebook:m=1,v=4,b=4,group=32"
FORMATS = [
    ("int6:group=32,rotate=kn", False),
    ("int4:group=32", False), ("int4:group=32", True), ("fp6", False), ("liquid@int8", True),
    (CODEBOOK, False), ("sparse", True), ("mxfp4", False), ("nvfp4", False), ("q4_1", False),
]  # fmt: skip


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"target_modules": "all-linear", "r": 4} | options)


def tuned(spec: str = "int4:group=32", model: Any = None, **options: Any) -> Any:
    """A quantized model with adapters; by `init_lora_weights=False` they are not zero."""
    model = anybit.quantize_(model or llama(dtype=torch.float32), spec)
    return get_peft_model(model, lora(**options)).eval()


def train(model: Any, steps: int) -> list[float]:
    """Losses on one batch, of which the model learns by heart."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


# Registration.


def test_peft_learns_of_anybit_when_it_is_imported() -> None:
    code = """if True:
    import sys, anybit
    assert not {"peft", "torch"} & sys.modules.keys()
    import peft
    assert peft.LoraModel.knows_anybit
    assert peft.prepare_model_for_kbit_training.__module__ == "anybit.integrations.peft"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_peft_may_be_imported_first() -> None:
    create = peft.LoraModel._create_new_module
    hook.install()
    assert peft.LoraModel.knows_anybit
    assert peft.LoraModel._create_new_module is create  # not wrapped again


# Training.


def test_quantized_weights_count_among_all_parameters() -> None:
    dense = get_peft_model(llama(dtype=torch.float32), lora())
    assert tuned().get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()


@pytest.mark.parametrize(("spec", "dora"), FORMATS)
def test_trained_saved_loaded_and_merged(tmp_path: Path, spec: str, dora: bool) -> None:
    base = anybit.quantize_(llama(dtype=torch.bfloat16), spec)
    before, stored = logits(base), copy.deepcopy(base.state_dict())
    model = get_peft_model(base, lora(use_dora=dora))
    assert len(model.targeted_module_names) == 14
    torch.testing.assert_close(logits(model), before, atol=0.02, rtol=0)
    losses = train(model, 12)
    assert losses[-1] < 0.9 * losses[0]
    after = logits(model)
    model.save_pretrained(tmp_path / "adapter")

    again = anybit.quantize_(llama(dtype=torch.bfloat16), spec)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), after)

    loaded.merge_adapter()
    merged = logits(loaded)
    assert not torch.equal(merged, after)
    loaded.unmerge_adapter()
    assert torch.equal(logits(loaded), after)
    whole = loaded.merge_and_unload()
    assert torch.equal(logits(whole), merged)
    anybit.save(whole, tmp_path / "merged")
    same_state(anybit.load(tmp_path / "merged"), whole)

    bare = model.unload()  # as it was
    assert all(torch.equal(stored[name], tensor) for name, tensor in bare.state_dict().items())
    anybit.save(bare, tmp_path / "bare")
    same_state(anybit.load(tmp_path / "bare"), bare)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(
    "spec", ["int4:group=32", "fp6:rotate=kn", "liquid", CODEBOOK, "sparse:rotate=k"]
)
def test_gradients_are_those_on_the_decoded_weights(spec: str, dora: bool) -> None:
    ours = tuned(spec, use_dora=dora, init_lora_weights=False)
    dense = anybit.dequantize_(anybit.quantize_(llama(dtype=torch.float32), spec))
    theirs = get_peft_model(dense, lora(use_dora=dora, init_lora_weights=False)).eval()
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    theirs.load_state_dict(trained, strict=False)
    for model in (ours, theirs):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(trained[name].grad, parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        base = anybit.quantize_(llama(dtype=torch.bfloat16), "int4:group=32")
        base = peft.prepare_model_for_kbit_training(
            base, checkpointing, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        assert base.is_gradient_checkpointing == checkpointing
        assert {p.dtype for p in base.parameters()} == {torch.bfloat16}
        torch.manual_seed(0)
        model = get_peft_model(base, lora(init_lora_weights=False)).train()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == 28
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b)


def test_trainer_of_transformers(tmp_path: Path) -> None:
    anybit.save(anybit.quantize_(llama(dtype=torch.float32), "fp6"), tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
    settings = TrainingArguments(
        tmp_path / "run", max_steps=3, learning_rate=1e-2, report_to=[], use_cpu=True,
        gradient_checkpointing=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = model(input_ids=TOKENS, labels=TOKENS).loss.item()
    data = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 8
    Trainer(model, settings, train_dataset=data).train()
    assert model(input_ids=TOKENS, labels=TOKENS).loss.item() < before


def test_experts_are_tuned_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**SIZES | experts | {"head_dim": 16})
    model = tuned(model=AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert sum(".experts.3." in name for name in model.targeted_module_names) == 2 * 3
    losses = train(model, 10)
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    again = anybit.quantize_(dense, "int4:group=32")
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(Unsupported, match=r"PeftModel\.from_pretrained"):
        again.load_adapter(tmp_path / "adapter")
    whole = model.merge_and_unload()
    anybit.save(whole, tmp_path / "merged")
    assert torch.equal(logits(anybit.load(tmp_path / "merged")), logits(whole))


def test_quantized_conv1d() -> None:
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=256)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # peft's documentation asks for fan_in_fan_out with GPT-2.
    model = tuned("int8", model, use_dora=True, init_lora_weights=False, fan_in_fan_out=True)
    tuned_logits = logits(model)
    merged = logits(model.merge_and_unload())
    assert (merged - tuned_logits).norm() < 0.05 * tuned_logits.norm()


def test_a_second_adapter_finds_the_same_layers() -> None:
    model = tuned(init_lora_weights=False)
    first = set(model.targeted_module_names)
    model.add_adapter("second", lora(init_lora_weights=False))
    assert set(model.targeted_module_names) == first
    layers = dict(quantized_layers(model))
    assert len(layers) == 14
    assert all(name.endswith(".base_layer") for name in layers)


# Merging.


@pytest.mark.parametrize("bias", [False, True])
def test_merging_rounds_the_sum(bias: bool, caplog: pytest.LogCaptureFixture) -> None:
    spec = "int4:group=32"
    dense = llama(dtype=torch.float32, attention_bias=bias)
    model = tuned(spec, dense, init_lora_weights=False, lora_bias=bias, target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj"
    layer: Any = model.get_submodule(f"base_model.model.{name}")
    if bias:
        nn.init.normal_(layer.lora_B["default"].bias)
        bias_sum = layer.base_layer.bias + layer.lora_B["default"].bias * layer.scaling["default"]
    before = anybit.dequantize(layer.base_layer.packed)
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    total = before + change.detach() * layer.scaling["default"]
    want = anybit.quantize_tensor(total, spec)
    with caplog.at_level(logging.WARNING):
        whole = model.merge_and_unload()
    packed = whole.get_submodule(name).packed
    for key, tensor in want.tensors().items():
        assert torch.equal(packed.tensors()[key], tensor)
    if bias:
        assert torch.equal(whole.get_submodule(name).bias, bias_sum)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "anybit.integrations.peft"]
    assert line.startswith("merged adapters into 2 quantized layers, rounded to nearest: the error")


def test_the_cost_is_that_of_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = tuned("int3", init_lora_weights=False)
    old = {n.replace(".base_layer", ""): m.dequantize() for n, m in quantized_layers(model)}
    change = {n: model.get_submodule(n).get_delta_weight("default") for n in old}
    whole = model.merge_and_unload()
    pairs = [
        (whole.get_submodule(n.removeprefix("base_model.model.")).dequantize(), old[n] + change[n])
        for n in old
    ]

    def norm(tensors: list[torch.Tensor]) -> float:
        return sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5

    error, size = norm([a - b for a, b in pairs]), norm([b for _, b in pairs])
    line = caplog.records[-1].getMessage()
    assert f"{error / size:.2g} of the weights" in line
    assert f"{error / norm(list(change.values())):.2g} of what" in line


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_two_adapters_merge_and_unmerge(dora: bool) -> None:
    model = tuned("int8", use_dora=dora, init_lora_weights=False)
    model.add_adapter("second", lora(use_dora=dora, init_lora_weights=False))
    stored = copy.deepcopy(dict(quantized_layers(model)))
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    model.merge_adapter()
    if not dora:  # DoRA's magnitudes are no sum
        assert (logits(model) - both).norm() < 0.1 * both.norm()
    model.unmerge_adapter()
    for name, layer in quantized_layers(model):
        same_state(layer, stored[name])
    assert torch.equal(logits(model), both)


def test_columns_in_an_order_of_their_own() -> None:
    torch.manual_seed(0)
    order = torch.randperm(64).int()
    weight = torch.randn(32, 64)
    plain = anybit.quantize_tensor(weight[:, order], "int4:group=16")
    fmt = dataclasses.replace(plain.format, order=True)  # type: ignore[call-arg]
    packed = Packed(fmt, plain.shape, plain.planes, plain.grid | {"order": order})
    model = nn.Sequential(nn.LayerNorm(64), QuantLinear(packed))
    tuned_model = get_peft_model(model, lora(target_modules=["1"], init_lora_weights=False)).eval()
    layer: Any = tuned_model.base_model.model[1]
    total = packed.dequantize() + layer.get_delta_weight("default").detach()
    merged: Any = tuned_model.merge_and_unload()[1]
    assert torch.equal(merged.order, order)
    want = anybit.quantize_tensor(total[:, order], "int4:group=16")
    assert torch.equal(merged.dequantize()[:, order], anybit.dequantize(want))


# What cannot be done is refused.


def test_adapters_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    model = tuned()
    # As transformers' add_adapter does, which refuses the newest peft in transformers 5.24.
    injected = peft.inject_adapter_in_model(lora(), anybit.quantize_(llama(), "fp6"))
    for one in (model, injected):
        with pytest.raises(InvalidInput, match="has adapters of peft"):
            anybit.save(one, tmp_path / "out")
        with pytest.raises(InvalidInput, match="has adapters of peft"):
            anybit.quantize_(one, "fp6")
    assert not (tmp_path / "out").exists()


def test_weights_are_not_written_to() -> None:
    with pytest.raises(Unsupported, match="cannot be written to"):
        tuned(init_lora_weights="pissa")
    layer = next(layer for _, layer in quantized_layers(tuned()))
    with pytest.raises(Unsupported, match="cannot be written to"):
        layer.weight.data = torch.zeros(layer.weight.shape)


def test_a_quantized_layer_is_not_trained_itself() -> None:
    with pytest.raises(Unsupported, match="modules_to_save"):
        tuned(target_modules=["q_proj"], modules_to_save=["down_proj"])


def test_nan_and_missing_bias_do_not_get_in() -> None:
    model = tuned(target_modules=["q_proj"])
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    nn.init.constant_(layer.lora_B["default"].weight, torch.nan)
    before = copy.deepcopy(layer.base_layer)
    with pytest.raises(InvalidInput, match="NaN or inf"):
        model.merge_adapter()
    same_state(layer.base_layer, before)
    with pytest.warns(UserWarning, match="no bias"):
        model = tuned(target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(Unsupported, match="lora_bias"):
        model.merge_adapter()
