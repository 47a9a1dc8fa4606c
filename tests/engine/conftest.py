"""Tiny random models of every architecture that the engine knows, as checkpoints on disk."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:  # it takes 3 s, which files of tests without models do without
    from transformers import PreTrainedModel

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

LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4}
LATENT |= {"topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.7}
OPT = {"ffn_dim": 96, "pad_token_id": 3}
GEMMA = {"head_dim": 16, "sliding_window": 12, "tie_word_embeddings": False}
GEMMA |= {"query_pre_attn_scalar": 9}

MAMBA: dict[str, Any] = {"mamba_chunk_size": 8}
MAMBA |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}
FALCON: dict[str, Any] = {"mamba_d_ssm": 128}
FALCON |= {"head_dim": 16, "embedding_multiplier": 3.0, "key_multiplier": 0.6}
FALCON |= {"mlp_multipliers": [0.8, 0.7], "attention_in_multiplier": 1.2, "ssm_in_multiplier": 0.9}
FALCON |= {"attention_out_multiplier": 0.7, "ssm_out_multiplier": 1.1, "lm_head_multiplier": 0.5}
FALCON |= {"ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
DELTA |= {"linear_value_head_dim": 16, "head_dim": 16}

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
    "deepseek_v2": ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_group": None}),
    "deepseek_v2-biases": ("deepseek_v2", LATENT | {"mlp_bias": True, "attention_bias": True}),
    "deepseek_v2-groups": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "deepseek_v3-halves": ("deepseek_v3", LATENT | {"rope_interleave": False}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    # Soft caps that the scores and logits of these models reach.
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 12, "partial_rotary_factor": 0.5}),
    "phi3-whole": ("phi3", {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.5,
            "logits_scaling": 5.0,
        },
    ),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 12},
    ),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 16}),
    "exaone4": (
        "exaone4",
        {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 12,
            "intermediate_size": 32,
            "swiglu_limit": 1.0,
        },
    ),
    "opt": ("opt", OPT | {"activation_function": "gelu"}),
    "opt-norms-after": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-bare": (
        "opt",
        OPT
        | {
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
            "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        MOE
        | {
            "layer_types": ["full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1], "mamba_proj_bias": True}),
    "falcon_h1": ("falcon_h1", MAMBA | FALCON),
    "falcon_h1-norm": (
        "falcon_h1",
        MAMBA | FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 96,
            "num_local_experts": 4,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.4,
            "embedding_multiplier": 3.0,
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        MAMBA
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 12,
            "use_bias": True,
            "chunk_size": 8,
            "max_position_embeddings": None,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 20,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        MOE
        | DELTA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        MOE
        | DELTA
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_5": ("qwen3_5_text", DELTA | {"layer_types": ["linear_attention", "full_attention"]}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.25}),
}


RECURRENT = (
    "lfm2",
    "lfm2_moe",
    "bamba",
    "falcon_h1",
    "falcon_h1-norm",
    "granitemoehybrid",
    "jamba",
    "mamba2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)


@pytest.fixture(autouse=True, scope="module")
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


def random_model(kind: str, options: dict) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if not hasattr(AutoConfig.for_model(kind), "swiglu_limit"):  # older versions of transformers
        options = {name: value for name, value in options.items() if name != "swiglu_limit"}
    if kind in ("bamba", "granitemoehybrid", "mamba2") and not norms_groups():
        options = options | {"mamba_n_groups": 1, "n_groups": 1}
    config = AutoConfig.for_model(kind, **(SMALL | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the usual 0.02 gives nearly equal logits, whatever the text
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed_tokens" in name:  # what some models multiply by the root of 64
                parameter.normal_(std=0.15 / (8 if kind.startswith("gemma") else 1))
            else:
                parameter.normal_(std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(std=0.3)
    return model


def norms_groups() -> bool:
    """Whether Mamba 2's groups of heads have a norm each, as they had where models were trained."""
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    return "group_size" in inspect.signature(MambaRMSNormGated.__init__).parameters


def reference(model: "PreTrainedModel", prompt: list[int], count: int) -> list[int]:
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
ARCHITECTURES["llama-round"] = ("llama", ROUND | {"intermediate_size": 128})
ARCHITECTURES["qwen2-round"] = ("qwen2", ROUND)
