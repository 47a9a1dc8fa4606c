"""Tensors and keys of models with recurrent layers, as llama.cpp's converter writes them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Filed = tuple[str, Tensor, Callable[[Tensor], Any]]
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                        "partial_rotary_factor": 0.25},
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2}
GRANITE = MAMBA | {
    "layer_types": ["mamba", "attention"], "num_local_experts": 3, "num_experts_per_tok": 2,
    "shared_intermediate_size": 512, "attention_multiplier": 0.1, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8,
    "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2,
}  # fmt: skip
# transformers' type, and what the case changes: ggml's architecture, and settings.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2_moe": ("lfm2moe", ROUTED | {
        "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    }),
    "qwen3_next": ("qwen3next", ROUTED | GATED | {"shared_expert_intermediate_size": 256}),
    "qwen3_5_text": ("qwen35", GATED),
    "qwen3_5_moe_text": ("qwen35moe", ROUTED | GATED | {"shared_expert_intermediate_size": 256}),
    "granitemoehybrid": ("granitehybrid", GRANITE),
    "granitemoehybrid dense": ("granitehybrid", GRANITE | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope",
        "shared_intermediate_size": 256,
    }),
    "falcon_h1": ("falcon-h1", MAMBA | {
        "mamba_d_ssm": 512, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9], "mlp_multipliers": [0.8, 1.1],
        "key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
    }),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h moe": ("nemotron_h_moe", NEMOTRON | {
        "layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "routed_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 512,
    }),
    "jamba": ("jamba", {
        "num_experts": 3, "num_experts_per_tok": 2, "attn_layer_offset": 1,
        "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "num_hidden_layers": 4,
    }),
}  # fmt: skip

ARCHITECTURES = {arch for arch, _ in HYBRIDS.values()}


def keys(config: Any, arch: str) -> dict[str, Any]:
    """What an architecture has beside the usual metadata."""
    attends = [
        kind in ("full_attention", "attention") for kind in getattr(config, "layer_types", [])
    ]
    heads = [config.num_key_value_heads * yes for yes in attends]
    if arch == "lfm2moe":
        return {
            "attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2,
        }  # fmt: skip
    if arch.startswith("qwen3"):
        sections = {"rope.dimension_sections": [11, 11, 10, 0]} if "35" in arch else {}
        return sections | {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "attention.recurrent_layers": [not yes for yes in attends],
            "full_attention_interval": 4, "rope.dimension_count": config.head_dim // 4,
        }  # fmt: skip
    if arch == "nemotron_h" or arch == "nemotron_h_moe":
        kinds = [{"linear_attention": "mamba"}.get(k, k) for k in config.layers_block_type]
        wide = config.intermediate_size if arch == "nemotron_h" else config.moe_intermediate_size
        out = ssm(config.conv_kernel, config.ssm_state_size, config.n_groups,
                  config.mamba_num_heads, config.mamba_head_dim)  # fmt: skip
        out |= {
            "attention.head_count_kv": heads, "rope.scaling.finetuned": False,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "feed_forward_length": [wide * (k in ("mlp", "moe")) for k in kinds],
        }  # fmt: skip
        return out if arch == "nemotron_h" else out | {
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1, "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor, "expert_group_count": 1,
        }  # fmt: skip
    if arch == "jamba":
        return {
            "attention.head_count_kv": heads, "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.state_size": config.mamba_d_state, "ssm.time_step_rank": config.mamba_dt_rank,
        }  # fmt: skip
    out = ssm(config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups,
              config.mamba_n_heads, config.mamba_d_head)  # fmt: skip
    if arch == "granitehybrid":
        out |= {
            "attention.head_count_kv": heads, "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }  # fmt: skip
    return out


def ssm(kernel: int, state: int, groups: int, heads: int, size: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": kernel, "ssm.state_size": state, "ssm.group_count": groups,
        "ssm.time_step_rank": heads, "ssm.inner_size": heads * size,
    }  # fmt: skip


def filed(name: str, w: Tensor, table: Any, config: Any, arch: str) -> Iterator[Filed]:
    """ggml's names of a tensor's parts, what a file holds, and what takes that back."""
    block = "blk." + name.split(".")[2] if ".layers." in name else ""
    kind = name.split(".")[-2]

    def same(part: Tensor) -> Callable[[Tensor], Any]:
        return lambda back: part.copy_(back.view_as(part))

    def moved(rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return w[rows], lambda back: w.index_copy_(0, rows, back)

    if name == "lm_head.weight":
        theirs = "output.weight"
    elif name.endswith("A_log"):
        flat = arch == "jamba" or arch.startswith("qwen3")
        rows = tiled(config, 1) if arch.startswith("qwen35") else torch.arange(len(w))
        yield f"{block}.ssm_a", -w.exp()[rows] if flat else -w.exp()[:, None], same(w)
        return
    elif name.endswith(("experts.gate_up_proj", "input_linear.weight")):
        end = "exps" if w.dim() == 3 else "shexp" if config.num_local_experts else ""
        for half, part in zip(("gate", "up"), w.chunk(2, -2), strict=True):
            yield f"{block}.ffn_{half}{'_' * bool(end)}{end}.weight", part, same(part)
        return
    elif name.endswith("in_proj_qkvz.weight"):
        k, wide = config.linear_num_key_heads, config.linear_key_head_dim
        value = config.linear_num_value_heads // k * config.linear_value_head_dim
        parts = torch.arange(len(w)).view(k, -1).split([wide, wide, value, value], 1)
        rows = torch.cat([part.flatten() for part in parts[:3]])
        yield f"{block}.attn_qkv.weight", *moved(rows)
        yield f"{block}.attn_gate.weight", *moved(parts[3].flatten())
        return
    else:
        for ours, words in (
            ("experts.down_proj", "ffn_down_exps.weight"),
            ("experts.up_proj", "ffn_up_exps.weight"),
            ("moe.output_linear.weight", "ffn_down_exps.weight"),
            ("router.layer.weight", "ffn_gate_inp.weight"),
            ("router.weight", "ffn_gate_inp.weight"), ("mixer.gate.weight", "ffn_gate_inp.weight"),
            ("e_score_correction_bias", "exp_probs_b.bias"), ("expert_bias", "exp_probs_b.bias"),
            ("dt_bias", "ssm_dt.bias"), (".D", "ssm_d"),
            ("shared_mlp.output_linear.weight",
             f"ffn_down{'_shexp' * bool(getattr(config, 'num_local_experts', 0))}.weight"),
        ):  # fmt: skip
            if name.endswith(ours):
                theirs = f"{block}.{words}"
                break
        else:
            known = name.replace("model.", "backbone.", 1) if ".mixer." in name else name
            theirs = table.get_name(known, try_suffixes=(".weight", ".bias"))
    assert theirs, name
    if "conv" in kind and w.dim() == 3:
        w = w[:, 0]
    if theirs.endswith(("ssm_d", "inp_shexp.weight")):
        flat = w[0] if theirs.endswith("inp_shexp.weight") else w if arch == "jamba" else w[:, None]
        yield theirs, flat, same(w)
    elif theirs.endswith("ssm_norm.weight") and not arch.startswith("qwen3"):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        yield theirs, w.view(groups, -1), same(w)
    elif arch.startswith("qwen3") and name.endswith("norm.weight") and "linear" not in name:
        yield theirs, w + 1, same(w)
    elif arch.startswith("qwen35") and ".linear_attn." in name:
        wide = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        many = tiled(config, config.linear_value_head_dim)
        if kind == "out_proj":
            yield theirs, w[:, many], lambda back: w.index_copy_(1, many, back)
        elif kind in ("in_proj_qkv", "conv1d"):
            yield theirs, *moved(torch.cat((torch.arange(wide), wide + many)))
        elif kind == "norm":
            yield theirs, w, same(w)
        else:
            yield theirs, *moved(many if kind == "in_proj_z" else tiled(config, 1))
    elif arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and kind in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
        yield theirs, *moved(torch.arange(len(w)).view(heads, 2, -1).transpose(1, 2).flatten())
    elif arch == "falcon-h1":
        factor = multiplier(name, config, len(w))
        yield theirs, w * factor, lambda back: w.copy_(back / factor)
    else:
        yield theirs, w, same(w)


def tiled(config: Any, size: int) -> Tensor:
    """Rows of the model where a file has them: first heads of all groups, then second ones."""
    k = config.linear_num_key_heads
    return (
        torch.arange(config.linear_num_value_heads * size)
        .view(k, -1, size)
        .transpose(0, 1)
        .flatten()
    )


def multiplier(name: str, config: Any, rows: int) -> Tensor:
    """Of Falcon-H1: by what the rows of a weight are multiplied in a file."""
    one = torch.ones(rows, 1) if ".weight" in name and "norm" not in name else torch.ones(rows)
    for ours, factor in (
        ("gate_proj", config.mlp_multipliers[0]), ("down_proj", config.mlp_multipliers[1]),
        ("k_proj", config.key_multiplier * config.attention_in_multiplier),
        ("q_proj", config.attention_in_multiplier), ("v_proj", config.attention_in_multiplier),
        ("o_proj", config.attention_out_multiplier), ("out_proj", config.ssm_out_multiplier),
        ("lm_head", config.lm_head_multiplier), ("embed_tokens", config.embedding_multiplier),
    ):  # fmt: skip
        if ours in name:
            return one * factor
    if "in_proj" in name:
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads)
        each = [torch.full((n, 1), m) for n, m in zip(sizes, config.ssm_multipliers, strict=True)]
        return torch.cat(each) * config.ssm_in_multiplier
    return one
