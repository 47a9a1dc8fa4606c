"""vLLM on a GPU: bf16, compiled, in CUDA graphs, with fused norms (`make test-vllm-gpu`)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from anybit.checkpoint.stream import quantize_checkpoint
from tests.integrations.generate import PICO, PROMPTS, by_vllm
from tests.integrations.test_vllm_engine import PLANS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SCHEMES = [
    "int4:group=128", "int4:group=64,zero", "int3:group=64", "int8", "fp6", "sparse", "mxfp4",
    "liquid@int8", "int8@int8", "fp6@fp8", "codebook:m=1,v=4,group=128", "trellis:bits=3",
    "int4:group=128,rotate=k", PLANS["unlike parts of a merged layer"],
]  # fmt: skip
NEAR = 0.5  # logits that rounding to bf16, and of activations after it, may tell apart


@pytest.mark.parametrize("plan", SCHEMES, ids=str)
def test_every_token_is_one_of_the_likeliest(tmp_path, plan):
    """In bf16 near ties fall either way: each token is judged after the ones that vLLM wrote."""
    quantize_checkpoint(PICO, tmp_path / "out", plan)
    got = by_vllm(tmp_path / "out", eager=False, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    gaps = []
    for prompt, text in zip(PROMPTS, got, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        gaps += (logits.amax(1) - chosen).tolist()
    assert max(gaps) < NEAR
    assert sum(gap == 0 for gap in gaps) > 0.9 * len(gaps)
