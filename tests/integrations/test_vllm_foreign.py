"""vLLM runs other tools' checkpoints as anybit converts them (`make test-vllm`)."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader import weight_utils
from vllm.transformers_utils import repo_utils

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import Unsupported
from anybit.integrations.vllm import AnybitConfig, register
from anybit.integrations.vllm_foreign import Source, directory_of, planned
from anybit.nn.model import dequantize_
from tests import hub
from tests.foreign.make import FIXTURES
from tests.foreign.test_exl3 import tensors_of
from tests.integrations.conftest import SIZES, made
from tests.integrations.generate import by_transformers, by_vllm

PROMPTS = [[1, 5, 9, 30, 7, 7, 12], [3, 4], [8, 30, 2, 17, 21]]


def one_head(fixture, place):
    """A copy of a fixture with one head, of a size that vLLM has on a CPU."""
    shutil.copytree(FIXTURES / fixture, place)
    path = place / "config.json"
    config = json.loads(path.read_text())
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": config["hidden_size"]}
    heads["eos_token_id"] = None  # which transformers would not choose, and vLLM would
    path.write_text(json.dumps(config | heads))
    return place


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_checkpoint(name, tmp_path):
    source = one_head(name, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out")
    wanted = by_transformers(tmp_path / "out", PROMPTS)
    options = {"skip_tokenizer_init": True, "quantization": "anybit"}
    refused = dict.fromkeys(("bnb", "quanto"), r"names like .*\.weight\..*; make a checkpoint")
    refused |= dict.fromkeys(("gemma", "mlx"), "embed_tokens: another tool has quantized the emb")
    if said := refused.get(name.partition("_")[0]):
        with pytest.raises(Unsupported, match=said):
            by_vllm(source, PROMPTS, **options)
        return
    assert by_vllm(source, PROMPTS, **options) == wanted


@pytest.fixture
def exl3(tmp_path):
    """A Llama with random codes as EXL3 stores them."""
    source = tmp_path / "source"
    config = LlamaConfig(
        **SIZES | {"num_key_value_heads": 4}, intermediate_size=256, eos_token_id=None
    )
    tensors = load_file(made(config, source) / "model.safetensors")
    for at, name in enumerate([name for name in tensors if "proj" in name]):
        layer, shape = name.removesuffix(".weight"), tensors.pop(name).shape
        codes = tensors_of(2 + at % 2, ("mcg", "mul1")[at % 2], *shape)
        tensors |= {f"{layer}.{key}": torch.from_numpy(value) for key, value in codes.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "exl3", "bits": 2.5, "head_bits": 16}
    (source / "config.json").write_text(json.dumps(settings))
    return source


def test_trellis_codes_of_exllamav3(tmp_path, exl3):
    convert_checkpoint(exl3, tmp_path / "out")
    assert by_vllm(exl3, quantization="anybit") == by_transformers(tmp_path / "out")


def test_files_are_read_in_the_hosts_memory(exl3):
    """vLLM's GPU is torch's default device meanwhile; another one stands for it."""
    for directory in (exl3, *(path for path in FIXTURES.iterdir() if "bnb" not in path.name)):
        layers = planned(directory).layers
        source = Source(directory, dict.fromkeys(layers), {name: name for name in layers})
        planned.cache_clear()
        with torch.device("meta"):
            assert source.rows(min(layers)) == layers[min(layers)].shape[0]
            found = source.tensors(min(layers))
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}


def test_experts(tmp_path, mixtral):
    plan = {"*": "int4:group=32", "*.w2": "int8:group=32", "*.w3": None}
    quantize_checkpoint(mixtral, tmp_path / "ours", plan)
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    dequantize_(anybit.load(tmp_path / "ours")).save_pretrained(tmp_path / "decoded")
    shutil.copy(mixtral / "tokenizer.json", tmp_path / "theirs")
    wanted = by_transformers(tmp_path / "decoded")
    assert by_vllm(tmp_path / "theirs", quantization="anybit") == wanted


def test_formats_of_a_quantized_checkpoint_are_its_own(tmp_path):
    source = one_head("gptq_4bit_v1", tmp_path / "source")
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": "fp6"}}}
    with pytest.raises(ValueError, match="is quantized already"):
        by_vllm(source, PROMPTS, skip_tokenizer_init=True, **options)


def test_what_cannot_be_read_is_refused(tmp_path):
    source = one_head("gptq_4bit_v1", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj\.scales is missing; there are"):
        by_vllm(source, PROMPTS, skip_tokenizer_init=True, quantization="anybit")


def test_files_of_a_name_say_how_it_is_quantized(tmp_path, monkeypatch):
    """Of a model that says nothing in its config.json, from the hub and from ModelScope."""
    source = one_head("gptq_4bit_v1", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (source / "quantize_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(repo_utils, "_hf_api", None)
    with hub.serving({"org/model": source}) as found:
        hub.use(found, tmp_path / "home", monkeypatch)
        told = AnybitConfig()
        told.maybe_update_config("org/model", LlamaConfig(**config))
    assert told.formats == {"*": "int4:group=16"}
    asked = []
    monkeypatch.setattr(
        weight_utils,
        "maybe_download_from_modelscope",
        lambda name, revision, **options: asked.append((name, revision, options)) or str(source),
    )
    assert directory_of("org/other", "v1", wanted=["*.json"]) == source
    assert asked == [("org/other", "v1", {"allow_patterns": ["*.json"]})]


def test_weights_of_a_name_are_where_vllm_puts_them(tmp_path, monkeypatch):
    """In `download_dir`, and nowhere else."""
    register()
    source = one_head("gptq_4bit_v1", tmp_path / "source")
    model = SimpleNamespace(
        model="org/model", revision=None, quantization="anybit", quantization_config=None,
        hf_config=LlamaConfig.from_pretrained(source), dtype=torch.float32,
    )  # fmt: skip
    monkeypatch.setattr(repo_utils, "_hf_api", None)
    with hub.serving({"org/model": source}) as found:
        hub.use(found, tmp_path / "home", monkeypatch)
        told = VllmConfig.get_quantization_config(model, LoadConfig(download_dir=f"{tmp_path}/own"))
        there = weight_utils.download_weights_from_hf("org/model", f"{tmp_path}/own", ["*.safet*"])
    assert told.source.directory == Path(there)
    assert not [*(tmp_path / "home").rglob("*.safetensors")]
