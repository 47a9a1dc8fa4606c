"""Other tools' mixtures of experts, in transformers and in the engine."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.foreign.bitfields import pack
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.files.safetensors import WEIGHTS
from tests.engine.conftest import ARCHITECTURES, prompts, random_model, reference

GROUP = 16


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_experts(act_order: bool, tmp_path: Path) -> None:
    dense, gptq = tmp_path / "dense", tmp_path / "gptq"
    for directory in (dense, gptq):
        random_model(*ARCHITECTURES["qwen3_moe"]).save_pretrained(directory)
    decoded, packed = load_file(dense / WEIGHTS), {}
    for name, weight in load_file(dense / WEIGHTS).items():
        if not name.endswith("_proj.weight"):
            packed[name] = weight
            continue
        layer, (n, k) = name.removesuffix(".weight"), weight.shape
        p = anybit.quantize_tensor(weight, f"int4:group={GROUP},zero")
        order = torch.randperm(k) if act_order else torch.arange(k)
        codes = torch.empty(n, k, dtype=torch.uint8)
        codes[:, order] = p.codes()
        decoded[name] = torch.empty(n, k)
        decoded[name][:, order] = p.dequantize()
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = (torch.arange(k) // GROUP).int()
        packed |= {
            f"{layer}.qweight": pack(codes, 4).T.contiguous(),
            f"{layer}.qzeros": pack(p.grid["zero"].T.contiguous(), 4),
            f"{layer}.scales": p.grid["scale"].T.contiguous(),
            f"{layer}.g_idx": g_idx,
        }
    save_file(decoded, dense / WEIGHTS)
    save_file(packed, gptq / WEIGHTS)
    config = json.loads((gptq / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "checkpoint_format": "gptq_v2",
    }
    (gptq / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(gptq, tmp_path / "ours")
    assert not report.unexpected
    greedy = SamplingParams(max_tokens=8, temperature=0)
    wanted = LLM(dense, dtype="float32").generate(prompts(2), greedy)
    found = LLM(tmp_path / "ours", dtype="float32").generate(prompts(2), greedy)
    assert [x.tokens for x in found] == [x.tokens for x in wanted]
    model = anybit.load(tmp_path / "ours")
    for prompt, answer in zip(prompts(2), wanted, strict=True):
        assert reference(model, prompt, 8)[: len(answer.tokens)] == answer.tokens
