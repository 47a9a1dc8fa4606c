"""A running vLLM: adapters beside quantized layers, and new weights (`make test-vllm`)."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.lora.request import LoRARequest

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import Unsupported
from anybit.integrations.transformers import AnybitConfig
from anybit.nn.model import dequantize_
from tests.integrations.generate import (
    PICO,
    PROMPTS,
    by_transformers,
    engine,
    greedy,
    tokens_of,
)

PLAN = {"*": "int4:group=64", "*.k_proj": "fp6", "*.v_proj": None, "*.up_proj": "int8"}
RANK = 8


def adapter(model, directory, seed):
    """An adapter of random numbers as peft writes it; returns what it adds to weights."""
    torch.manual_seed(seed)
    tensors, added = {}, {}
    for name, layer in model.named_modules():
        if name.endswith(("_proj",)):
            n, k = layer.weight.shape
            a, b = torch.randn(RANK, k) / k**0.5, torch.randn(n, RANK) / 4
            prefix = f"base_model.model.{name}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            added[name] = 2 * b @ a
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    kinds = sorted({name.rpartition(".")[2] for name in added})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": kinds}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return added


@pytest.mark.parametrize("stored", [True, False])
def test_adapters(tmp_path, stored):
    """Two adapters and none in one batch, on merged layers of unlike parts."""
    quantize_checkpoint(PICO, tmp_path / "out", PLAN)
    model = dequantize_(anybit.load(tmp_path / "out", dtype=torch.float32)).eval()
    plain = greedy(model)
    wanted = []
    for number in (1, 2):
        added = adapter(model, tmp_path / f"adapter{number}", number)
        with torch.no_grad():
            for name, delta in added.items():
                model.get_submodule(name).weight += delta
            wanted.append(greedy(model))
            for name, delta in added.items():
                model.get_submodule(name).weight -= delta
    assert wanted[0] != wanted[1]
    # On a CPU, vLLM gives texts without an adapter the last one: room for a third stays empty.
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 3}
    if not stored:
        options |= {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": PLAN}}}
    with engine(tmp_path / "out" if stored else PICO, **options) as llm:
        first, second = (LoRARequest(f"a{i}", i, str(tmp_path / f"adapter{i}")) for i in (1, 2))
        got = tokens_of(llm, PROMPTS, lora_request=[first, second, None])
        assert got == [wanted[0][0], wanted[1][1], plain[2]]
        assert tokens_of(llm, PROMPTS, lora_request=second) == wanted[1]
        assert tokens_of(llm, PROMPTS) == plain


def test_adapters_beside_experts(tmp_path, mixtral):
    """They change the layers that are named; without names vLLM would want them on experts."""
    quantize_checkpoint(mixtral, tmp_path / "out", "int4:group=32")
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    refusal = pytest.raises(Unsupported, match="no adapters for experts in codes; name the layers")
    with refusal, engine(tmp_path / "out", **options):
        pass
    model = dequantize_(anybit.load(tmp_path / "out", dtype=torch.float32)).eval()
    plain = greedy(model)
    with torch.no_grad():
        for name, delta in adapter(model, tmp_path / "adapter", 1).items():
            model.get_submodule(name).weight += delta
    options["lora_target_modules"] = ["qkv_proj", "o_proj"]
    with engine(tmp_path / "out", **options) as llm:
        request = LoRARequest("a", 1, str(tmp_path / "adapter"))
        got = tokens_of(llm, PROMPTS, lora_request=request)
        assert got == greedy(model) != plain
        assert tokens_of(llm, PROMPTS) == plain


def changed(source, directory):
    """A copy of a model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory


def untied(directory):
    """Pico with an output head of its own."""
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    words = model.get_input_embeddings().weight.detach()
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict() | {"lm_head.weight": words.clone()})
    fresh.save_pretrained(directory)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(directory)
    return directory


def test_new_weights_are_quantized_as_they_arrive(tmp_path):
    own = untied(tmp_path / "own")
    other = changed(own, tmp_path / "other")
    before = by_transformers(own, quantization_config=AnybitConfig(PLAN))
    after = by_transformers(other, quantization_config=AnybitConfig(PLAN))
    assert before != after
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": PLAN}}}
    with engine(own, **options) as llm:
        assert tokens_of(llm) == before
        for path, wanted in ((other, after), (own, before)):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            llm.reset_prefix_cache()
            assert tokens_of(llm) == wanted


def test_a_shared_head_is_not_reloaded():
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": PLAN}}}
    with engine(PICO, **options) as llm, pytest.raises(Unsupported, match="shares the embeddings'"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(PICO)})


@pytest.mark.parametrize("plan", ["int4:group=32", {"*": "fp6", "*.w2": None}])
def test_new_weights_of_experts(tmp_path, mixtral, plan):
    other = changed(mixtral, tmp_path / "other")
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": plan}}}
    with engine(other, **options) as llm:
        wanted = tokens_of(llm)
    with engine(mixtral, **options) as llm:
        assert tokens_of(llm) != wanted
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        assert tokens_of(llm) == wanted


def test_codes_are_not_loaded_into_a_running_engine(tmp_path):
    quantize_checkpoint(PICO, tmp_path / "out", "fp6")
    refusal = pytest.raises(RuntimeError, match="new weights of a dense checkpoint only")
    with engine(tmp_path / "out") as llm, refusal:
        llm.collective_rpc("reload_weights")
