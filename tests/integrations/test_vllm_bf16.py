"""vLLM in bf16; on a GPU compiled, in CUDA graphs, with fused norms (`make test-vllm-gpu`).

In bf16 near ties fall either way, so each token is judged after the ones that vLLM wrote.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.integrations.transformers import AnybitConfig
from anybit.nn.model import dequantize_
from tests.integrations.generate import (
    PICO,
    PROMPTS,
    by_vllm,
    engine,
    gaps_of,
    judge,
    share,
    tokens_of,
)
from tests.integrations.test_vllm_engine import MIXTURES, PLANS, first_layer
from tests.integrations.test_vllm_running import RANK, adapter, changed, untied

ON_GPU = torch.cuda.is_available()
SCHEMES = [
    "int4:group=64,zero", "liquid@int8", "int4:group=128", "int3:group=64", "int8", "fp6",
    "sparse", "mxfp4", "int8@int8", "fp6@fp8", "codebook:m=1,v=4,group=128",
    "int4:group=128,rotate=k", first_layer("trellis:bits=3"),
    PLANS["unlike parts of a merged layer"],
]  # fmt: skip
OPTIONS = {"eager": not ON_GPU, "dtype": "bfloat16"}
if ON_GPU:
    current_platform.import_kernels()  # among others those that choose experts, if it has them
ROUTES = not ON_GPU or hasattr(torch.ops._moe_C, "topk_softmax")


@pytest.fixture(autouse=True)
def no_compiled_graph_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def written(model, tokens):
    """What transformers writes after the prompts."""
    model.generation_config.eos_token_id = None
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "suppress_tokens": [model.config.eos_token_id],
    }
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.mark.parametrize("plan", SCHEMES if ON_GPU else SCHEMES[:2], ids=str)
def test_checkpoint(tmp_path, plan):
    quantize_checkpoint(PICO, tmp_path / "out", plan)
    got = by_vllm(tmp_path / "out", **OPTIONS)
    judge(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval(), got)


@pytest.mark.skipif(not ROUTES, reason="vLLM lacks its operators for experts")
@pytest.mark.parametrize("plan", MIXTURES.values(), ids=MIXTURES)
def test_experts(tmp_path, mixtral, plan):
    quantize_checkpoint(mixtral, tmp_path / "out", plan)
    got = by_vllm(tmp_path / "out", **OPTIONS)
    model = dequantize_(anybit.load(tmp_path / "out", dtype=torch.float32)).eval()
    # In bf16 a near tie of the router chooses another expert, and other tokens follow. How often
    # depends on the model and the processor: transformers in bf16 tells.
    plain = dequantize_(anybit.load(tmp_path / "out", dtype=torch.bfloat16)).eval()
    gaps = gaps_of(model, written(plain, len(got[0])))
    judge(model, got, near=max(1.0, 1.25 * max(gaps)), likeliest=share(gaps) - 0.1)


def test_adapters(tmp_path):
    """Two adapters and none in one batch."""
    quantize_checkpoint(PICO, tmp_path / "out", "int4:group=128")
    model = dequantize_(anybit.load(tmp_path / "out", dtype=torch.float32)).eval()
    added = [adapter(model, tmp_path / f"adapter{i}", i) for i in (1, 2)]
    requests = [LoRARequest(f"a{i}", i, str(tmp_path / f"adapter{i}")) for i in (1, 2)]
    with engine(
        tmp_path / "out", enable_lora=True, max_lora_rank=RANK, max_loras=3, **OPTIONS
    ) as llm:
        got = tokens_of(llm, PROMPTS, lora_request=[*requests, None])
    judge(model, got[2:], PROMPTS[2:])
    for at, deltas in enumerate(added):
        with torch.no_grad():
            for name, delta in deltas.items():
                model.get_submodule(name).weight += delta
        judge(model, got[at : at + 1], PROMPTS[at : at + 1])
        with torch.no_grad():
            for name, delta in deltas.items():
                model.get_submodule(name).weight -= delta


@pytest.mark.parametrize("plan", ["liquid@int8", "int4:group=128"])
def test_new_weights(tmp_path, plan):
    """Quantized as they are loaded, and other ones into the running engine."""
    own = untied(tmp_path / "own")
    other = changed(own, tmp_path / "other")
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": plan}}}
    given = {"dtype": torch.float32, "quantization_config": AnybitConfig(plan)}
    with engine(own, **options, **OPTIONS) as llm:
        for path in (own, other):
            if path == other:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
                llm.reset_prefix_cache()
            judge(AutoModelForCausalLM.from_pretrained(path, **given).eval(), tokens_of(llm))
