"""Stock vLLM, without anybit, reads what `anybit export` writes (`make test-vllm`)."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.files.directory import read_json
from anybit.nn.model import quantized_layers
from tests.foreign.test_anywhere import ROWS
from tests.integrations.generate import judge
from tests.tiny import short_pico

CHILD = Path(__file__).with_name("stock.py")
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
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
INTEGERS = "not supported by CPUWNA16, supported types are"
REFUSED = {  # what vLLM says on a CPU; the others are integers
    "int4:group=32": "",
    "int4:group=32,zero": "",
    "int4:group=32@int8": "",
    "fp8": "Failed to find a kernel that can implement the ScaledMM linear layer",
    "nvfp4:divide": "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported",
    "mxfp4": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "mxfp8": "Failed to find a kernel that can implement the MXFP8 linear layer",
}
FOUR = ("int4:group=32", "int4:group=32,zero")  # which it multiplies with on a CPU
READ = [row[0] for row in ROWS if row[4] == "weights"]
RUN = [row[0] for row in ROWS if row[4] == "tokens"]


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


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes an export, beside `ours`, of calibrated weights, once for each plan."""

    @cache
    def make(plan):
        folder = tmp_path_factory.mktemp("export")
        ids = torch.randint(4000, (8, 64), generator=torch.Generator().manual_seed(0))
        calibrate_checkpoint(short_pico(), folder / "ours", json.loads(plan), anybit.GPTQ(ids))
        return export_checkpoint(folder / "ours", folder / "theirs").out

    return lambda plan: make(json.dumps(plan))


@pytest.fixture(scope="module")
def stock(exported, tmp_path_factory):
    """What a process with vLLM alone makes of all rows."""
    place = tmp_path_factory.mktemp("stock")
    # Its int8 kernels for AMX, which it prefers on such a CPU, take no fp32.
    exact = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    cases = {spec: {"dtype": exact, "what": "tokens"} for spec in RUN}
    cases |= {f"{spec} tokens": {"dtype": "float16", "what": "tokens"} for spec in FOUR}
    cases |= {spec: {"dtype": "float32", "what": "weights"} for spec in READ}
    for name, case in cases.items():
        case["path"] = str(exported(name.removesuffix(" tokens")))
    (place / "cases").write_text(json.dumps(cases))
    (place / "anybit.py").write_text("raise ImportError('it is not there')")
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    settings["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, CHILD, place / "cases", place / "results"],
        env=os.environ | settings, cwd=place, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return read_json(place / "results")


def scheme_of(directory, monkeypatch):
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
def test_it_has_a_scheme_for_each_row(row, exported, monkeypatch):
    scheme = scheme_of(exported(row[0]), monkeypatch)
    name, bits = scheme("model.layers.0.self_attn.qkv_proj", QKVParallelLinear())
    assert name == SCHEMES.get(row[0], WNA16)
    assert bits == anybit.get_format(row[0].partition("@")[0]).bits


def test_heads_and_embeddings_are_found_by_their_classes(exported, monkeypatch):
    plan = {"*": "int4:group=32", "*embed_tokens": "int8:group=32", "lm_head": "int8:group=32"}
    scheme = scheme_of(exported(plan), monkeypatch)
    assert scheme("model.layers.0.self_attn.qkv_proj", QKVParallelLinear()) == (WNA16, 4)
    assert scheme("lm_head", ParallelLMHead()) == (WNA16, 8)
    assert scheme("language_model.lm_head", ParallelLMHead()) == (WNA16, 8)
    assert scheme("model.embed_tokens", VocabParallelEmbedding()) == (WNA16, 8)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("spec", READ)
def test_its_layers_hold_our_weights(spec, exported, stock):
    said, wanted = stock[spec]["refusal"], REFUSED.get(spec, INTEGERS)
    assert (wanted in said) if wanted else not said
    held = load_file(stock[spec]["weights"])
    ours = dict(quantized_layers(anybit.load(exported(spec).with_name("ours"))))
    for name, weight in held.items():
        before, _, last = name.rpartition(".")
        parts = [ours.pop(f"{before}.{part}") for part in FUSED.get(last, [last])]
        assert torch.equal(weight, torch.cat([part.dequantize().float() for part in parts])), name
    assert not ours


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [*RUN, *(f"{spec} tokens" for spec in FOUR)])
def test_its_tokens_are_ours(name, exported, stock):
    spec = name.removesuffix(" tokens")
    model = anybit.load(exported(spec).with_name("ours"), dtype=torch.float32)
    judge(model, [stock[name]], [[*range(50, 62)]], near=0.05)  # its products round otherwise
