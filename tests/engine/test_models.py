"""The engine's tokens are those of transformers' greedy `generate`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.core.scheme import parse_scheme
from anybit.engine.llm import LLM
from anybit.engine.model_runner import ModelRunner
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Multiplier
from tests.engine.conftest import ARCHITECTURES, PICO, RECURRENT, prompts, random_model, reference
from tests.needs import first_of
from tests.specs import NAMES, columns_of_a_group

Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SHORT = SamplingParams(max_tokens=8, temperature=0)
FIT = (name for name in NAMES if 128 % columns_of_a_group(name) == 0)
SCHEMES = first_of(  # each class of formats, zero points, activations
    (*FIT, "int4:group=64,zero", "fp:e3m3,group=32", "liquid@int8"),
    lambda scheme: ((type(f := parse_scheme(scheme)[0]), f.zero_point), parse_scheme(scheme)[1]),
)


def eager(directory: Path) -> PreTrainedModel:
    """The model of transformers; its other attentions leave out soft caps in some versions."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_transformers(checkpoint: Checkpoint, name: str) -> None:
    directory = checkpoint(name)
    model = eager(directory)
    many = prompts(4)
    # A step of 16 tokens cuts the prompts into chunks.
    params = SamplingParams(max_tokens=13, temperature=0)
    outputs = LLM(directory, max_tokens=16, block_size=4).generate(many, params)
    for prompt, output in zip(many, outputs, strict=True):
        assert output.tokens == reference(model, prompt, 13)


QUANTIZED = (
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    *RECURRENT,
)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tokens_equal_transformers(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    """From the dense checkpoint and from anybit's own; prompts are longer than the windows."""
    model = eager(checkpoint(name))
    anybit.quantize_(model, "fp6")
    anybit.save(model, tmp_path / "out")
    want = [reference(model, prompt, 8) for prompt in prompts(2)]
    for llm in (LLM(checkpoint(name), "fp6"), LLM(tmp_path / "out")):
        assert isinstance(llm.engine.runner, ModelRunner)
        assert [output.tokens for output in llm.generate(prompts(2), SHORT)] == want


def test_pico_tokens_equal_transformers() -> None:
    llm = LLM(PICO, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    params = SamplingParams(max_tokens=32, temperature=0)
    for output in llm.generate(["def main(", "import os\n"], params):
        assert output.tokens == reference(model, output.prompt, 32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_format_on_the_fly(checkpoint: Checkpoint, scheme: str) -> None:
    directory = checkpoint("llama-round")
    llm = LLM(directory, quantization=scheme)
    # Where the engine does it: of trellis codes that are equally good, a GPU finds others.
    model = AutoModelForCausalLM.from_pretrained(directory).to(llm.device)
    anybit.quantize_(model, scheme)
    model.cpu()
    for prompt, output in zip(prompts(2), llm.generate(prompts(2), SHORT), strict=True):
        assert output.tokens == reference(model, prompt, 8)


def test_qkv_and_gate_up_are_one_layer_each(checkpoint: Checkpoint) -> None:
    layer = LLM(checkpoint("qwen2-round"), quantization="int4:group=64").engine.runner.model.layers[
        0
    ]
    quantized = {
        n: (m.out_features, m.in_features) for n, m in layer.named_modules() if is_quantized(m)
    }
    assert quantized == {
        "self_attn.qkv_proj": (256, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_up_proj": (512, 128),
        "mlp.down_proj": (128, 256),
    }


def test_quantized_checkpoint_with_mixed_formats(tmp_path: Path) -> None:
    """Different formats within QKV, shared tables, biases, dense layers and a quantized head."""
    model = random_model("qwen2", {"hidden_size": 128, "intermediate_size": 256})
    plan = {
        "*": "int4:group=64",
        "*.k_proj": "fp6",
        "*.mlp.*": "codebook:m=1,v=4",
        "*.1.*": None,
        "lm_head": "int8",
    }
    anybit.quantize_(model, plan)
    anybit.save(model, tmp_path / "out")
    llm = LLM(tmp_path / "out")
    assert sum(is_quantized(m) for m in llm.engine.runner.model.modules()) == 8
    for prompt, output in zip(prompts(3), llm.generate(prompts(3), GREEDY), strict=True):
        assert output.tokens == reference(model, prompt, 24)


def is_quantized(module: object) -> bool:
    return isinstance(module, Multiplier)


@pytest.mark.parametrize("tables", ["dynamic", "static"])
def test_int8_kv_cache_stays_close(checkpoint: Checkpoint, tmp_path: Path, tables: str) -> None:
    """Log probabilities with an INT8 cache differ by less than 8-bit rounding can explain."""
    directory = checkpoint("llama")
    if tables == "static":
        directory = with_scales(directory, tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    exact = LLM(directory, kv_cache="model").generate(prompts(4), params)
    llm = LLM(directory, kv_cache="int8")
    assert llm.kv_cache == "int8"
    assert llm.engine.runner.states[0].format.static == (tables == "static")
    for a, b in zip(exact, llm.generate(prompts(4), params), strict=True):
        (x,), (y,) = a.completions[0].logprobs, b.completions[0].logprobs
        others = dict(y.top)
        differences = [abs(p - others[t]) for t, p in x.top if t in others]
        assert 0 < max(differences) < 0.1  # K and V are off by up to 1/254 of the largest
        assert len(differences) > 15


def with_scales(directory: Path, out: Path) -> Path:
    """A copy of a checkpoint with static K and V scales, which bound these models' K and V."""
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        for kind in "kv":
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.full((2, 16), 8 / 127)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((directory / "config.json").read_text())
    return out


def test_scales_in_the_checkpoint_choose_the_int8_cache(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert LLM(with_scales(checkpoint("llama"), tmp_path)).kv_cache == "int8"
    assert LLM(checkpoint("llama")).kv_cache == "float32"


def edit(directory: Path, out: Path, **config: object) -> Path:
    """A copy of a checkpoint with other entries in config.json."""
    for path in directory.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    raw = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | config))
    return out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Unheard"]}, "names the class 'Unheard', which is no model"),
        (
            {"intermediate_size": 97},
            r"down_proj.weight: .* of shape \(64, 97\), .* F32 of \(64, 96\)",
        ),
        ({"num_hidden_layers": 3}, "no file holds 9 tensors of the model"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; a model has at least 1"),
        ({"num_hidden_layers": 1}, "9 tensors have no place in the model"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "config.json says gptq, but no tensor",
        ),
        ({"quantization_config": {"quant_method": "anybit", "version": 9}}, "version 9"),
        ({"quantization_config": {"quant_method": "anybit"}}, "has formats and version"),
        (
            {"quantization_config": {"quant_method": "anybit", "formats": "int4", "order": 1}},
            "not .*'order': 1",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named(
    checkpoint: Checkpoint, tmp_path: Path, config: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(edit(checkpoint("llama"), tmp_path, **config))


def test_odd_heads_run_as_transformers_has_them(tmp_path: Path) -> None:
    model = random_model("phi3", {"hidden_size": 60, "partial_rotary_factor": 0.5})
    model.save_pretrained(tmp_path)
    for prompt, output in zip(prompts(2), LLM(tmp_path).generate(prompts(2), SHORT), strict=True):
        assert output.tokens == reference(model, prompt, 8)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    model = anybit.quantize_(random_model("llama", {}), "fp6")
    anybit.save(model, tmp_path / "out")
    with pytest.raises(ValueError, match="is quantized already"):
        LLM(tmp_path / "out", quantization="fp6")


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)


def test_small_layers_stay_dense_as_in_memory(tmp_path: Path) -> None:
    """K and V of 8 outputs; the same rule as `quantize_`'s, or the tokens would differ."""
    model = random_model("llama", {"head_dim": 8, "num_key_value_heads": 1})
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, "int3:group=8")
    anybit.quantize_(model, "int3:group=8")
    assert isinstance(model.get_submodule("model.layers.0.self_attn.k_proj"), torch.nn.Linear)
    for prompt, output in zip(prompts(2), llm.generate(prompts(2), SHORT), strict=True):
        assert output.tokens == reference(model, prompt, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but the files hold"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be a whole number"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
        ({"architectures": ["Trainer"]}, "names the class 'Trainer', which is no model"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "fallback"])
def test_hostile_configurations(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, config: dict, message: str
) -> None:
    given = {} if kind == "llama" else {"architectures": ["BertLMHeadModel"]}
    with pytest.raises(anybit.errors.AnybitError, match=message):
        LLM(edit(checkpoint("llama"), tmp_path, **given | config))


@pytest.mark.parametrize("kind", ["qwen2-round", "bloom"])
def test_keep_reaches_every_layer(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """In the engine and in transformers' own models, dense and quantized before."""
    if kind == "bloom":
        model = random_model("bloom", {"n_head": 4, "n_layer": 1})
        model.save_pretrained(tmp_path / "dense")
        source = tmp_path / "dense"
    else:
        source = checkpoint(kind)
        model = AutoModelForCausalLM.from_pretrained(source)
    anybit.save(anybit.quantize_(model, "fp6"), tmp_path / "out")
    for llm in (LLM(source, "fp6", keep="decoded"), LLM(tmp_path / "out", keep="decoded")):
        found = llm.engine.runner.model.modules()
        backends = {layer.backend for layer in found if isinstance(layer, Multiplier | QuantLinear)}
        assert backends == {"dense"}
    with pytest.raises(ValueError, match="keep='some'; choose one of"):
        LLM(source, keep="some")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "most"), [("opt", 256), ("llama", 256), ("llama3-rope", 2048)])
def test_positions_are_not_exceeded(checkpoint: Checkpoint, name: str, most: int) -> None:
    """llama3-rope stretches its 256 by a factor of 8."""
    assert LLM(checkpoint(name), length=most).engine.length == most
    for wrong in (-1, most + 1):
        with pytest.raises(InvalidInput, match=f"length={wrong}, and the model has 256 positions"):
            LLM(checkpoint(name), length=wrong)
