"""LoRA adapters in the engine: tokens of transformers with peft, several adapters in one batch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.loader import load
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput, Unsupported
from tests.engine.conftest import prompts, reference
from tests.engine.test_reload import changed
from tests.engine.test_speculation import Told, assert_taken, same, speculating

peft = pytest.importorskip("peft")
Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
ALL = "all-linear"
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own


def adapter(model: Any, directory: Path, seed: int, **options: Any) -> Path:
    """An adapter of random numbers, saved by peft; the model is as before."""
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL} | options))
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    wrapped.save_pretrained(directory)
    wrapped.unload()
    return directory


def by_peft(model: Any, directory: Path, many: list[list[int]]) -> list[list[int]]:
    """Tokens of transformers with an adapter; the model is as before."""
    wrapped = peft.PeftModel.from_pretrained(model, directory)
    out = [reference(wrapped, prompt, GREEDY.max_tokens or 0) for prompt in many]
    wrapped.unload()
    return out


CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "merged layers": ("llama", None, {}),
    "rank-stable, other ranks": (
        "llama",
        None,
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"mlp.up_proj": 3}},
    ),
    "biases, int4": ("qwen2-round", "int4:group=32", {}),
    "codebooks": ("llama-round", "codebook:m=1,v=4", {}),
    "merged in the checkpoint": ("phi3", "fp6", {}),
    "some layers": ("gemma2", None, {"target_modules": ["q_proj", "down_proj"]}),
    "beside experts": ("mixtral", "int8", {"target_modules": ["k_proj", "o_proj"]}),
}


@pytest.mark.parametrize(("name", "spec", "options"), CASES.values(), ids=CASES)
def test_tokens_equal_peft(
    checkpoint: Checkpoint, tmp_path: Path, name: str, spec: str | None, options: dict[str, Any]
) -> None:
    """Two adapters and none in one batch, in chunks of prompts; then one after the other."""
    directory, many = checkpoint(name), prompts(3)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    if spec is not None:
        anybit.quantize_(model, spec)
    plain = [reference(model, prompt, 12) for prompt in many]
    first = adapter(model, tmp_path / "first", 1, **options)
    second = adapter(model, tmp_path / "second", 2, **(options | {"r": 3}))
    wanted = [plain, by_peft(model, first, many), by_peft(model, second, many)]
    assert wanted[0] != wanted[1] != wanted[2]
    adapters = {"one": first, "two": second}
    llm = LLM(directory, spec, max_tokens=16, block_size=4, adapters=adapters)
    each = [replace(GREEDY, adapter=a) for a in ("one", None, "two")]
    got = [output.tokens for output in llm.generate(many, each)]
    assert got == [wanted[1][0], wanted[0][1], wanted[2][2]]
    for which, params in zip((1, 0, 2), each, strict=True):  # prefixes are cached for each
        assert [o.tokens for o in llm.generate(many, params)] == wanted[which]


def test_new_weights_keep_adapters_as_they_were_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Their files may have changed, or be gone."""
    directory, many = checkpoint("llama-round"), prompts(3)
    model = AutoModelForCausalLM.from_pretrained(directory)
    place = adapter(model, tmp_path / "a", 1)
    other = changed(directory, tmp_path / "other")
    params = replace(GREEDY, adapter="a")
    llms = [LLM(d, "int4:group=32", adapters={"a": place}) for d in (directory, other)]
    wanted = [output.tokens for output in llms[1].generate(many, params)]
    assert [output.tokens for output in llms[0].generate(many, params)] != wanted
    (place / "adapter_model.safetensors").write_bytes(b"of another training")
    for _ in range(2):
        llms[0].load_weights(load_file(other / "model.safetensors").items())
        assert [output.tokens for output in llms[0].generate(many, params)] == wanted


def test_recorded_steps_go_on_beside_adapters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama-round")
    model = AutoModelForCausalLM.from_pretrained(directory)
    place = adapter(model, tmp_path / "a", 1)
    alone = LLM(directory, "int4:group=32", dtype="bfloat16").generate([3, 4, 5], GREEDY)
    llm = LLM(directory, "int4:group=32", dtype="bfloat16", adapters={"a": place})
    for _ in range(2):
        assert llm.generate([3, 4, 5], GREEDY)[0].tokens == alone[0].tokens
        with_adapter = llm.generate([3, 4, 5], replace(GREEDY, adapter="a"))[0].tokens
        assert with_adapter != alone[0].tokens


def test_drafts_beside_adapters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each drafted token is judged with the adapter of its text."""
    directory, many = checkpoint("llama"), prompts(3)
    place = adapter(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "a", 1)
    llm = LLM(directory, block_size=4, adapters={"a": place})
    each = [replace(GREEDY, adapter=name) for name in ("a", None, "a")]
    want = llm.generate(many, each)
    assert same(speculating(llm, Told(want)).generate(many, each), want)
    assert_taken(llm.engine)


def edited(place: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Change an adapter's files; a tensor that is None is left out."""
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        file = place / "adapter_model.safetensors"
        all_tensors = load_file(file) | tensors
        save_file({k: v for k, v in all_tensors.items() if v is not None}, file)
    return place


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "DoRA": ({}, {"use_dora": True}, "has use_dora, and the engine adds plain LoRA only"),
    "biases": ({}, {"bias": "all"}, "has bias='all'"),
    "another method": ({}, {"peft_type": "IA3"}, "has peft_type 'IA3'"),
    "no scale": ({}, {"lora_alpha": None}, "has lora_alpha None and rank 4"),
    "half a layer": ({A: None}, {}, "q_proj lacks lora_A or lora_B"),
    "another model's": ({A: torch.zeros(4, 7)}, {}, r"q_proj has lora_A \(4, 7\) and lora_B"),
    "NaN": ({A: torch.full((4, 64), torch.nan)}, {}, "q_proj: 256 values are NaN"),
    "an embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 96)},
        {},
        "embed_tokens.lora_embedding_A .* is none of a linear layer's",
    ),
    "another rank": ({}, {"r": 8}, "_proj has rank 4, and adapter_config.json says 8"),
    "another rank of a layer": ({}, {"rank_pattern": {"q_proj": 2}}, "has rank 4, and .* says 2"),
    "a head": (
        {f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"},
        {},
        "adapter 'a' changes lm_head, where the engine takes no adapters",
    ),
}


@pytest.mark.parametrize(("tensors", "config", "message"), BAD.values(), ids=BAD)
def test_bad_adapters(
    checkpoint: Checkpoint, tmp_path: Path, tensors: Any, config: Any, message: str
) -> None:
    directory = checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(directory)
    place = edited(adapter(model, tmp_path / "a", 1), tensors, **config)
    with pytest.raises(InvalidInput, match=message):
        LLM(directory, adapters={"a": place})


def test_an_adapter_without_tensors_is_no_model_as_it_was(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("llama")
    place = adapter(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "a", 1)
    save_file({}, place / "adapter_model.safetensors")
    with pytest.raises(InvalidInput, match="holds no tensors; save the adapter again"):
        LLM(directory, adapters={"a": place})


def test_wrong_calls(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama")
    place = adapter(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "a", 1)
    with pytest.raises(InvalidInput, match="do not go with deterministic=True"):
        LLM(directory, deterministic=True, adapters={"a": place})
    loaded = load(directory, torch.device("cpu"), None, None, None)
    with pytest.raises(InvalidInput, match="do not go with a model that is loaded already"):
        LLM(loaded, adapters={"a": place})
    with pytest.raises(FileNotFoundError):
        LLM(directory, adapters={"a": tmp_path / "nothing"})
    llm = LLM(directory, adapters={"a": place})
    with pytest.raises(InvalidInput, match="there is no adapter 'b'; there are: 'a'"):
        llm.generate([3], replace(GREEDY, adapter="b"))


def test_models_that_the_engine_does_not_know(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt2"
    )
    with pytest.raises(Unsupported, match="adapters need a model that it knows"):
        LLM(tmp_path / "gpt2", adapters={"a": tmp_path})
