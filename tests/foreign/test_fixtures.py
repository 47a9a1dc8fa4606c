"""Small checkpoints that the tools themselves made, and the digests of what they decode."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from tests.foreign.checks import converted
from tests.foreign.make import FIXTURES

CASES = sorted(path.name for path in FIXTURES.iterdir())
EXACT = {  # what each one becomes; all its layers, or all but down_proj
    "aqlm_2x8": "codebook",
    "awq_gemm": "int4:group=16,zero",
    "bnb_fp4_double": "fp4bnb:group=32",
    "bnb_nf4": "nf4:group=32",
    "bnb_nf4_double": "nf4:group=32",
    "ct_4bit": "int4:group=16",
    "ct_activations": "int4:group=32@int8",
    "ct_floats": "nvfp4:divide",
    "ct_mixed": "int3:group=16,zero",
    "ct_mixed_old": "int3:group=16,zero",
    "gemma": "int4",
    "gptq_2bit_v1": "int2:group=16,zero",
    "metal": "q4_1",
    "mlx": "q4_1:group=64",
    "quanto": "q4_1:group=64",
    "quark": "int4:group=16",
    "torchao": "int8:group=32,zero",
    "gptq_3bit_v2": "int3:zero",
    "gptq_4bit_act_order": "int4:group=16,order",
    "gptq_4bit_v1": "int4:group=16",
    "gptq_8bit_row": "int8",
    "hqq_1bit": "int1:group=16,zero",
    "hqq_2bit": "int2:group=16,zero",
    "hqq_3bit": "int3:zero",
    "hqq_4bit": "int4:group=16,zero",
    "hqq_8bit": "int8:zero",
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_tools_own(name: str, tmp_path: Path) -> None:
    report = converted(FIXTURES / name, tmp_path / "out")
    if name == "hqq_axis0":
        assert not report.formats
        assert set(report.decoded.values()) == {"groups run across rows (axis=0)"}
        assert "7 layers are dense now" in str(report)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16
        return
    assert EXACT[name] in report.formats.values()
    assert EXACT[name] in str(report)
    expected = {"model.layers.0.mlp.down_proj"} if name == "bnb_nf4" else set()
    assert set(report.decoded) == expected


@pytest.mark.parametrize("name", ["gptq_4bit_act_order", "ct_mixed", "bnb_nf4"])
def test_models_run(name: str, tmp_path: Path) -> None:
    """transformers, the engine, and a dense model of the decoded weights agree."""
    converted(FIXTURES / name, tmp_path / "out")
    model = anybit.load(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[1, 5, 9, 30, 7, 7, 12]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    with torch.no_grad():
        logits = model(prompt).logits
        dense = anybit.dequantize_(model)(prompt).logits
    # fp32 sums of at most 64 products each, in another order.
    torch.testing.assert_close(logits, dense, rtol=1e-4, atol=1e-5)
    llm = LLM(tmp_path / "out", dtype="float32")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert llm.generate([prompt[0].tolist()], params)[0].tokens == tokens
