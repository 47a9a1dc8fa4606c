"""Stock vLLM, without anybit's plugin, reads what `anybit export` writes (`make test-vllm`)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

import anybit
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.files.directory import read_json
from tests.foreign.test_anywhere import ROWS
from tests.integrations.generate import judge
from tests.tiny import short_pico

WNA16 = "CompressedTensorsWNA16"
SCHEMES = {  # of vLLM, by what is exported; the others are WNA16
    "int4:group=32@int8": "CompressedTensorsWNA8Int",
    "int8@int8": "CompressedTensorsW8A8Int8",
    "fp8": "CompressedTensorsW8A16Fp8",
    "fp8@fp8": "CompressedTensorsW8A8Fp8",
    "nvfp4:divide": "CompressedTensorsW4A4Fp4",
    "mxfp4": "CompressedTensorsW4A4Mxfp4",
    "mxfp8": "CompressedTensorsW8A8Mxfp8",
}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
STOCK = """
import json, sys, vllm
llm = vllm.LLM(sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=2, dtype=sys.argv[2],
               skip_tokenizer_init=True)
sampling = vllm.SamplingParams(temperature=0, max_tokens=12, min_tokens=12, detokenize=False)
(out,) = llm.generate([{"prompt_token_ids": [*range(50, 62)]}], sampling, use_tqdm=False)
print("TOKENS", json.dumps([[*out.outputs[0].token_ids], "anybit" in sys.modules]))
"""


class QKVParallelLinear:
    """Stands for vLLM's class, whose name it has."""


class ParallelLMHead:
    """Stands for vLLM's class, whose name it has."""


class VocabParallelEmbedding:
    """Stands for vLLM's class, whose name it has."""


class Scheme:
    """Stands for vLLM's, of which some want a kernel as soon as they are made."""

    def __init__(self, *_, **__):
        pass

    @classmethod
    def get_min_capability(cls):
        return 0


def exported(plan, folder):
    quantize_checkpoint(short_pico(), folder / "ours", plan)
    return export_checkpoint(folder / "ours", folder / "theirs").out


def found(directory, monkeypatch):
    """vLLM's scheme and bits of a layer of some class, by a checkpoint's config.json."""
    for name in vars(compressed_tensors).copy():
        if name.startswith("CompressedTensorsW"):
            monkeypatch.setattr(compressed_tensors, name, type(name, (Scheme,), {}))
    written = read_json(directory / "config.json")["quantization_config"]
    config = compressed_tensors.CompressedTensorsConfig.from_config(written)
    config.packed_modules_mapping = FUSED

    def scheme(name, module):
        known = config.get_scheme_dict(module, name)
        parts = {"weights": "weight_quant", "input_activations": "input_quant", "format": "format"}
        given = {theirs: known[own] for own, theirs in parts.items()}
        chosen = config._get_scheme_from_parts(**given)
        return type(chosen).__name__, known["weights"].num_bits

    return scheme


@pytest.mark.parametrize("row", [row for row in ROWS if row[4]], ids=lambda row: row[0])
def test_it_has_a_scheme_for_each_row(row, monkeypatch, tmp_path):
    scheme = found(exported(row[0], tmp_path), monkeypatch)
    name, bits = scheme("model.layers.0.self_attn.qkv_proj", QKVParallelLinear())
    assert name == SCHEMES.get(row[0], WNA16)
    assert bits == anybit.get_format(row[0].partition("@")[0]).bits


def test_heads_and_embeddings_are_found_by_their_classes(monkeypatch, tmp_path):
    plan = {"*": "int4:group=32", "*embed_tokens": "int8:group=32", "lm_head": "int8:group=32"}
    scheme = found(exported(plan, tmp_path), monkeypatch)
    assert scheme("model.layers.0.self_attn.qkv_proj", QKVParallelLinear()) == (WNA16, 4)
    assert scheme("lm_head", ParallelLMHead()) == (WNA16, 8)
    assert scheme("language_model.lm_head", ParallelLMHead()) == (WNA16, 8)
    assert scheme("model.embed_tokens", VocabParallelEmbedding()) == (WNA16, 8)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spec", [row[0] for row in ROWS if row[4] == "tokens"])
def test_its_tokens_are_ours(spec, tmp_path):
    directory = exported(spec, tmp_path)
    settings = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    # Its int8 kernels for AMX, which it prefers on such a CPU, take no fp32.
    dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    command = [sys.executable, "-c", STOCK, str(directory), dtype]
    done = subprocess.run(
        command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-2000:]
    tokens, plugin = json.loads(lines[0].removeprefix("TOKENS "))
    assert not plugin
    model = anybit.load(tmp_path / "ours", dtype=torch.float32)
    judge(model, [tokens], [[*range(50, 62)]], near=0.05)  # its int8 products round otherwise
