"""vLLM's tests run in an environment of their own: `make test-vllm`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

PICO = Path(__file__).parents[2] / "models" / "pico"

collect_ignore_glob = [] if find_spec("vllm") else ["test_vllm*.py"]

if find_spec("vllm"):  # which reads these when it is imported
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory):
    """A random mixture of 5 experts, dense, with a head of its own."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4100,  # vLLM pads it
        num_local_experts=5,  # so that two ranks hold 3 and 2
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("mixtral")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(path)
    return path
