"""anybit inside transformers: registration, loading a dense model quantized, round trips."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.integrations import hook
from anybit.integrations.transformers import AnybitConfig, AnybitQuantizer
from anybit.nn.model import quantized_layers
from tests.tiny import SIZES, TOKENS, dense, llama, logits, same_output, same_state

SPEC = {"*": "int3", "model.layers.1.*": "liquid@int8", "*.down_proj": "fp6"}


def from_pretrained(path, spec=None, **options):
    config = {} if spec is None else {"quantization_config": AnybitConfig(spec)}
    return AutoModelForCausalLM.from_pretrained(path, **config, **options)


# Registration.


def test_import_is_light_and_transformers_learns_of_it_later():
    code = """if True:
    import sys, anybit
    heavy = {"transformers", "triton"} & sys.modules.keys()
    assert not heavy, f"import anybit imports {heavy}"
    anybit.integrations.hook.install()
    assert sum(type(finder).__module__.startswith("anybit") for finder in sys.meta_path) == 1
    from transformers.quantizers import auto
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["anybit"] is anybit.AnybitConfig
    assert "anybit" in auto.AUTO_QUANTIZER_MAPPING
    anybit.integrations.hook.install()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["anybit"] is anybit.AnybitConfig
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_transformers_may_be_imported_first(monkeypatch):
    for registry in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(registry, "anybit")
    finders = list(sys.meta_path)
    hook.install()
    hook.install()
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["anybit"] is AnybitConfig
    assert AUTO_QUANTIZER_MAPPING["anybit"] is AnybitQuantizer
    assert sys.meta_path == finders


def test_unknown_attributes_are_still_errors():
    with pytest.raises(AttributeError, match="no attribute 'AnyBitConfig'"):
        anybit.AnyBitConfig  # noqa: B018


# The config.


@pytest.mark.parametrize(
    "spec", ["fp6", anybit.get_format("int4"), SPEC, {"lm_head": "int8", "*": None}]
)
def test_config_survives_json_with_sorted_keys(spec):
    config = AnybitConfig(spec)
    text = config.to_json_string()
    again = AnybitConfig.from_dict(json.loads(text))
    assert list(again.formats.items()) == list(config.formats.items())
    assert again.to_json_string() == text
    assert json.loads(text)["quant_method"] == "anybit"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": "int9"}, "unknown format 'int9'"),
        ({"formats": {"*": "int4:group=x"}}, "must be a whole number"),
        ({"formats": {"*": 4}}, "a pattern is text, and what it stands for"),
        ({"formats": 4}, "quantization_config: formats: 4 is not a plan"),
        ({"formats": "int4", "version": 2}, "layout version 2"),
        ({"formats": "int4", "version": "1"}, "layout version is '1', and must be an integer"),
        ({"formats": "int4", "version": 0}, "layout version is 0, and must be"),
        ({"formats": "int4", "version": True}, "layout version is True, and must be"),
        ({"formats": "int4", "quant_method": "gptq"}, "'quant_method': 'gptq'"),
        ({"formats": "int4", "bits": 4}, "'bits': 4"),
        ({}, "'formats': None"),
    ],
)
def test_bad_configs(options, message):
    with pytest.raises(ValueError, match=message):
        AnybitConfig(**options)


# Quantizing while loading, streaming and quantize_ are one thing.


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
        MistralConfig(**SIZES),
    ],
    ids=["llama", "tied llama", "llama with bias", "tied qwen2 with bias", "qwen3", "mistral"],
)
def test_three_ways_to_the_same_model(tmp_path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "dense", max_shard_size="100KB")
    wanted = anybit.quantize_(model, SPEC)

    while_loading = from_pretrained(tmp_path / "dense", SPEC)
    same_state(wanted, while_loading)
    same_output(logits(while_loading), logits(wanted))

    while_loading.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    again = from_pretrained(tmp_path / "saved")
    same_state(wanted, again)
    same_output(logits(again), logits(wanted))
    assert again.config.quantization_config.formats == while_loading.anybit_formats

    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "streamed", SPEC)
    same_state(wanted, anybit.load(tmp_path / "streamed"))
    assert report.schemes == {name: layer.scheme for name, layer in quantized_layers(wanted)}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "model"
    anybit.quantize_(llama(), SPEC).save_pretrained(path)  # transformers' own way of saving
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_cast_only_what_is_not_quantized(quantized, dtype):
    stored = load_file(quantized / "model.safetensors")
    for name, tensor in from_pretrained(quantized, dtype=dtype).state_dict().items():
        if tensor.dtype != stored[name].dtype:
            assert name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")), name
            assert tensor.dtype == dtype
        else:
            assert torch.equal(tensor, stored[name])


def test_tensors_that_transformers_renames_are_cast_too(tmp_path):
    """Mixtral's routers have another name in files."""
    config = MixtralConfig(num_local_experts=4, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "int4:group=32")
    model = anybit.load(tmp_path / "out", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert logits(model).isfinite().all()


def test_a_base_model_loads_from_a_whole_one(quantized):
    base, whole = AutoModel.from_pretrained(quantized), from_pretrained(quantized)
    assert len(list(quantized_layers(base))) == 14
    with torch.no_grad():
        hidden = whole(TOKENS, output_hidden_states=True).hidden_states[-1]
        same_output(base(TOKENS).last_hidden_state, hidden)


def test_generate(quantized):
    tokens = from_pretrained(quantized).generate(TOKENS, max_new_tokens=5, do_sample=False)
    wanted = anybit.quantize_(llama(), SPEC).generate(TOKENS, max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, wanted)
    assert tokens.shape == (1, 37)


# Errors while a dense model is quantized on loading.


def test_nan_names_the_tensor(tmp_path):
    path = dense(tmp_path / "dense")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: 1 values.*\(3, 5\)"):
        from_pretrained(path, "int4")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: 1 values"):
        from_pretrained(path, {"*": "int4", "*.1.mlp.up_proj": None})  # in a dense layer, too


def test_a_weight_that_is_missing_is_named(tmp_path):
    path = dense(tmp_path / "dense")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"k_proj\.weight: not in the checkpoint"):
        from_pretrained(path, "int4")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"*.gate": "int4"}, "no pattern matches layer"),
        ({"*": "int4", "*.gate": "int8"}, r"no layer matches '\*\.gate'"),
        ("int4:group=128", r"q_proj: K=64 is not a multiple of group=128"),
    ],
)
def test_plans_that_do_not_fit_the_model(tmp_path, spec, message):
    path = dense(tmp_path / "dense", tied=True)
    with pytest.raises(ValueError, match=message):
        from_pretrained(path, spec)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(path, tmp_path / "out", spec)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_head_that_shares_its_weight_is_untied_before(tmp_path):
    """By `quantize_` or `anybit quantize`; transformers ties it again while it loads."""
    path = dense(tmp_path / "dense", tied=True)
    with pytest.raises(ValueError, match=r"lm_head shares its weight with model\.embed_tokens"):
        from_pretrained(path, {"*": "int4", "lm_head": "int8"})


@pytest.mark.parametrize("keep", ["packed", "decoded"])
def test_keep_is_taken_from_the_argument_alone(keep, tmp_path):
    """While quantizing and of a quantized checkpoint; it is not stored."""
    source = dense(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=AnybitConfig("int3:group=32", keep=keep)
    )
    model.save_pretrained(tmp_path / "out")
    assert "keep" not in (tmp_path / "out" / "config.json").read_text()
    with pytest.warns(UserWarning, match="loading attributes"):
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", quantization_config=AnybitConfig(keep=keep)
        )
    for found in (model, again):
        layers = [layer for _, layer in quantized_layers(found)]
        assert {layer.keep for layer in layers} == {keep}
        assert (keep == "decoded") == all(layer.backend == "dense" for layer in layers)
    with pytest.raises(ValueError, match="keep='none'; choose one of auto, packed, decoded"):
        AnybitConfig("int4", keep="none")
