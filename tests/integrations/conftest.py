"""vLLM's tests run in an environment of their own: `make test-vllm`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen3MoeConfig

PICO = Path(__file__).parents[2] / "models" / "pico"

collect_ignore_glob = [] if find_spec("vllm") else ["test_vllm*.py"]

if find_spec("vllm"):  # which reads these when it is imported
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 4100,  # vLLM pads it
    "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory):
    """A random mixture of 5 experts, dense, with a head of its own."""
    # Two ranks hold 3 and 2.
    config = MixtralConfig(intermediate_size=192, num_local_experts=5, **SIZES)
    return made(config, tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """A random Qwen3 of 6 experts, with norms of Q and K."""
    config = Qwen3MoeConfig(
        intermediate_size=192, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False, **(SIZES | {"head_dim": 32}),
    )  # fmt: skip
    return made(config, tmp_path_factory.mktemp("qwen3"))


def made(config, path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(path)
    return path
