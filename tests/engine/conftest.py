"""Tiny random models of every architecture that the engine knows, as checkpoints on disk."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PICO = Path(__file__).parents[2] / "models" / "pico"

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# name: (model type, options). Windows are shorter than the texts, or they would do nothing.
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 12}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        MOE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 32, "norm_topk_prob": True}),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and other processes may use the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to a directory with such a model."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, options = ARCHITECTURES[name]
            made[name] = tmp_path_factory.mktemp(name)
            random_model(kind, options).save_pretrained(made[name])
        return made[name]

    return make


def random_model(kind: str, options: dict) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the usual 0.02 gives nearly equal logits, whatever the text
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    return model


def reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy continuation."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


def prompts(count: int, longest: int = 40, vocabulary: int = 96) -> list[list[int]]:
    """Random prompts of different lengths."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, longest, (count,), generator=random).tolist()
    return [torch.randint(2, vocabulary, (n,), generator=random).tolist() for n in sizes]


ROUND = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}  # fits all groups
ARCHITECTURES["llama-round"] = ("llama", ROUND)
ARCHITECTURES["qwen2-round"] = ("qwen2", ROUND)
