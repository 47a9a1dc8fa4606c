"""The families of models in GGUF files: ggml's names and keys, and transformers'."""

from collections.abc import Mapping
from typing import Any, NamedTuple

COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
ROPE = {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # says nothing of how to run a model
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
OTHERS = {"vocab_size", "attention.value_length", "tensor_data_layout"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
           "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip
SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
ROUTED = {  # by sigmoids, with a bias
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
SIGMOID = 2  # of expert_gating_func
SIGMOIDS = {"glm4moe": 2, "nemotron_h_moe": 2, "deepseek2": 0, "lfm2moe": 0}  # without that key
GATED = ("qwen3next", "qwen35", "qwen35moe")  # with layers of a gated delta rule
HEADED = {  # with heads for further tokens, and what counts those in config.json
    **dict.fromkeys(("deepseek2", "glm4moe"), "num_nextn_predict_layers"),
    **dict.fromkeys(GATED, "mtp_num_hidden_layers"),
}
PARTLY = ("phi3", "glm4", "glm4moe", *GATED)  # whose heads may be rotated in part
CONVOLUTIONS = {
    "shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps",
}  # fmt: skip
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}  # fmt: skip
MAMBA = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state"}
MAMBA2 = MAMBA | {"ssm.group_count": "mamba_n_groups"}
NEMOTRON = {
    "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}  # fmt: skip
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
# What a model does without a key, where that is not 0, none or "": llama.cpp's defaults.
USUAL = {
    "logit_scale": 1, "residual_scale": 1, "embedding_scale": 1, "expert_weights_scale": 1,
    "rope.scale_linear": 1, "rope.scaling.yarn_attn_factor": 1,
}  # fmt: skip
NOT_IDLE = {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"}  # at 0
OFF = {
    "expert_weights_norm",
    "swin_norm",
    "use_parallel_residual",
}  # false, where files say nothing
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled otherwise
GEMMA3_PERIOD, GEMMA3_LOCAL_BASE = 6, 10000.0
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


class Family(NamedTuple):
    """Models of one architecture.

    Attributes:
        arch: ggml's name.
        model_type: transformers' name.
        kind: Its class.
        keys: Of the architecture, and their names in config.json.
        fixed: Of config.json, where the file says nothing.
        paired: Rows of q and k are stored in pairs, as ggml's rotary embedding takes them.
        plus_one: Weights of norms are stored with 1 added.
        written: Whether such models are written, too.
        hybrid: Some of its layers are recurrent.
    """

    arch: str
    model_type: str
    kind: str
    keys: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}
    paired: bool = False
    plus_one: bool = False
    written: bool = True
    hybrid: bool = False


FAMILIES = (
    Family("llama", "llama", "LlamaForCausalLM", paired=True),
    Family(
        "llama", "mixtral", "MixtralForCausalLM", paired=True,
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    Family("qwen2", "qwen2", "Qwen2ForCausalLM"),
    Family("qwen3", "qwen3", "Qwen3ForCausalLM"),
    Family("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS | SHARED,
           {"norm_topk_prob": False}),
    Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, {"norm_topk_prob": True}),
    Family("gemma", "gemma", "GemmaForCausalLM", plus_one=True),
    Family("gemma2", "gemma2", "Gemma2ForCausalLM", WINDOW | CAPS, plus_one=True,
           fixed={"sliding_window": 4096}),
    Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", WINDOW | CAPS, plus_one=True,
           fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Family("phi3", "phi3", "Phi3ForCausalLM", WINDOW),
    Family("granite", "granite", "GraniteForCausalLM", SCALES, paired=True),
    Family("glm4", "glm4", "Glm4ForCausalLM"),
    Family("glm4moe", "glm4_moe", "Glm4MoeForCausalLM", ROUTED, written=False,
           fixed={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                  "norm_topk_prob": False}),
    Family("deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM", written=False,
           keys=ROUTED | {"attention.kv_lora_rank": "kv_lora_rank",
                          "rope.dimension_count": "qk_rope_head_dim"},
           fixed={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                  "norm_topk_prob": False, "attention_bias": False, "q_lora_rank": None}),
    Family("lfm2", "lfm2", "Lfm2ForCausalLM", CONVOLUTIONS, written=False, hybrid=True,
           fixed={"block_auto_adjust_ff_dim": False, "conv_bias": False}),
    Family("lfm2moe", "lfm2_moe", "Lfm2MoeForCausalLM", written=False, hybrid=True,
           keys=EXPERTS | CONVOLUTIONS | {"leading_dense_block_count": "num_dense_layers"},
           fixed={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0}),
    Family("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", EXPERTS | SHARED | DELTA,
           {"norm_topk_prob": True}, plus_one=True, written=False, hybrid=True),
    Family("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", DELTA, plus_one=True, written=False,
           hybrid=True),
    Family("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", EXPERTS | SHARED | DELTA,
           plus_one=True, written=False, hybrid=True),
    Family("granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", paired=True,
           keys=SCALES | MAMBA2 | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
           written=False, hybrid=True),
    Family("falcon-h1", "falcon_h1", "FalconH1ForCausalLM", written=False, hybrid=True,
           keys=MAMBA2 | {"ssm.inner_size": "mamba_d_ssm"}),
    Family("nemotron_h", "nemotron_h", "NemotronHForCausalLM", NEMOTRON, paired=True,
           written=False, hybrid=True),
    Family("nemotron_h_moe", "nemotron_h", "NemotronHForCausalLM", paired=True, written=False,
           hybrid=True, fixed={"routed_scaling_factor": 1.0, "norm_topk_prob": False},
           keys=ROUTED | NEMOTRON | {
               "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"}),
    Family("jamba", "jamba", "JambaForCausalLM", written=False, hybrid=True,
           keys=MAMBA | {"ssm.time_step_rank": "mamba_dt_rank", "expert_count": "num_experts",
                         "expert_used_count": "num_experts_per_tok"}),
)  # fmt: skip
