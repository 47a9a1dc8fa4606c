"""Greedy tokens from vLLM and from transformers."""

import gc
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

PICO = Path(__file__).parents[2] / "models" / "pico"
TOKENS = 24
PROMPTS = [
    AutoTokenizer.from_pretrained(PICO)(text).input_ids
    for text in ("def main(", "import os\n\nclass ", "    for i in range(")
]

# Of the logits' spread: what rounding to bf16 tells apart, and that of activations after it. Wrong
# tokens are several away.
NEAR = 0.25


@contextmanager
def engine(path, eager=True, **options):
    """vLLM, in fp32 unless the options say otherwise."""
    given: dict[str, Any] = {"dtype": "float32"}
    if torch.cuda.is_available():  # the default takes nearly all memory; others test beside it
        given |= {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": 1 << 26}
    gc.collect()  # an engine that failed to start ends the process groups when it is collected
    llm = None
    try:
        llm = vllm.LLM(
            str(path),
            enforce_eager=eager,
            max_model_len=128,
            max_num_seqs=4,
            seed=0,
            **(given | options),
        )
        yield weakref.proxy(llm)  # a reference would keep it alive beyond `cleanup`
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def model_of(path, tmp_path):
    """vLLM's model in fp32, without an engine."""
    given = EngineArgs(str(path), dtype="float32", max_model_len=128, skip_tokenizer_init=True)
    config = given.create_engine_config()
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            yield get_model(vllm_config=config)
    finally:
        cleanup_dist_env_and_memory()


def by_vllm(path, prompts=PROMPTS, **options):
    """Greedy tokens of each prompt, from vLLM in fp32."""
    with engine(path, **options) as llm:
        return tokens_of(llm, prompts)


def tokens_of(llm, prompts=PROMPTS, **options):
    """Greedy tokens of each prompt, from an engine of vLLM's."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(given, sampling, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def by_transformers(path, prompts=PROMPTS, **options):
    """Greedy tokens of each prompt, from transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    return greedy(model, prompts)


def greedy(model, prompts=PROMPTS):
    """Greedy tokens of each prompt, from a model of transformers."""
    out = []
    for ids in prompts:
        given = torch.tensor([ids])
        text = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            do_sample=False,
        )
        out.append(text[0, len(ids) :].tolist())
    return out


def judge(model, got, prompts=PROMPTS, near=NEAR, likeliest=0.9):
    """Assert that each token, after those before it, is a model's likeliest, or next to it."""
    gaps = gaps_of(model, got, prompts)
    assert max(gaps) < near
    assert share(gaps) > likeliest


def share(gaps):
    """How many of the tokens were the likeliest."""
    return sum(gap == 0 for gap in gaps) / len(gaps)


def gaps_of(model, got, prompts=PROMPTS):
    """How far each token's logit is below the likeliest one's, in standard deviations of logits."""
    gaps = []
    for prompt, text in zip(prompts, got, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        logits[:, model.config.eos_token_id] = -torch.inf  # vLLM writes a number of tokens
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        gaps += ((logits.amax(1) - chosen) / logits[logits.isfinite()].std()).tolist()
    return gaps
