"""Small models in GGUF files, written with the `gguf` package as llama.cpp's converter does."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.checkpoint.foreign.ggml import TYPES, pack
from anybit.checkpoint.foreign.gguf_families import SCALES
from tests.foreign.gguf_hybrids import ARCHITECTURES, HYBRIDS, Filed
from tests.foreign.gguf_hybrids import filed as hybrid
from tests.foreign.gguf_hybrids import keys as hybrid_keys

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
ROUTED = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
          "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 64}
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [2.0 + 0.1 * i for i in range(32)]}  # fmt: skip
# transformers' type: ggml's architecture, and settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("llama", {"num_local_experts": 3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen2_moe": ("qwen2moe", MOE | {"shared_expert_intermediate_size": 512}),
    "qwen3_moe": ("qwen3moe", MOE | {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3_text": ("gemma3", GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "granite": ("granite", {"attention_multiplier": 0.1, "embedding_multiplier": 3.0,
                            "residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": ("glm4moe", ROUTED | {"use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("deepseek2", ROUTED | {
        "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 256,
        "v_head_dim": 128, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
    }),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"],
                      "block_auto_adjust_ff_dim": False}),
}  # fmt: skip


def tiny(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model with random weights, norms among them, in fp32."""
    torch.manual_seed(0)
    own = (MODELS | HYBRIDS)[model_type][1]
    config = AutoConfig.for_model(model_type.split()[0], **SMALL | own | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(0.3, 0.2)
    return model.float().eval()


def quantized(w: Tensor, kind: str) -> tuple[np.ndarray, Tensor]:
    """Data as the file has them, and the weight that they stand for."""
    if kind == "BF16":
        number = GGMLQuantizationType.BF16
        data = quants.quantize(np.ascontiguousarray(w.numpy()), number)
        return data, torch.from_numpy(quants.dequantize(data, number))
    if kind in ("F32", "F16"):
        data = w.numpy().astype(np.float32 if kind == "F32" else np.float16)
        return data, torch.from_numpy(data.astype(np.float32))
    number = GGMLQuantizationType[kind]
    if kind in TYPES:
        data = pack(TYPES[kind], anybit.quantize_tensor(w, TYPES[kind].spec), "w").numpy()
    else:
        data = np.tile(block_of(kind), (len(w), w.shape[1] // gguf.GGML_QUANT_SIZES[number][0]))
        data = data.astype(np.uint8)
    return data, torch.from_numpy(quants.dequantize(data, number))


def block_of(kind: str) -> np.ndarray:
    """Some block of a type that nothing here quantizes to."""
    block = np.arange(gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1], dtype=np.uint8) % 32
    block[:2] = np.array([0.01], np.float16).view(np.uint8)
    return block


def paired(w: Tensor, heads: int) -> Tensor:
    """Rows of q or k as llama.cpp's converter puts them."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def write(
    model: PreTrainedModel,
    path: Path,
    kinds: Mapping[str, str],
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    tokens: int = 0,
    parts: int = 0,
    arch: str = "",
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model, and make its weights those of the file.

    Args:
        model: Its weights change to the decoded ones.
        path: To write.
        kinds: Types by patterns of ggml's names; F32 for others.
        metadata: Of the architecture, beside what the config says.
        extra: Tensors of the file alone.
        tokens: Of a vocabulary of single characters.
        parts: Tensors in a file; 0: one file holds all.
        arch: ggml's, where MODELS does not say it.
        head: Tensors of a head for further tokens, as transformers' checkpoints name them; they
            change, too.
    """
    config = model.config
    arch = arch or MODELS[config.model_type][0]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=parts)
    own = keys(config, arch) | dict(metadata or {})
    if head:  # whose layer is like the last
        own = {k: [*v, v[-1]] if isinstance(v, list) and "sections" not in k else v
               for k, v in own.items()}  # fmt: skip
        own |= {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    for key, value in own.items():
        found = gguf.GGUFValueType.get_type(value)
        found = gguf.GGUFValueType.UINT32 if found == gguf.GGUFValueType.INT32 else found
        writer.add_key_value(f"{arch}.{key}", value, found)
    if tokens:
        vocabulary(writer, tokens)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers + bool(head))
    how = hybrid if arch in ARCHITECTURES else plain
    beside = {behind(n, config.num_hidden_layers): t for n, t in (head or {}).items()}
    for name, parameter in (model.state_dict() | beside).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        filed = how(name, parameter, table, config, arch)
        if ".nextn." in name:
            filed = beside_layer(name, parameter, arch)
        for theirs, file, put in filed:
            kind = next((k for p, k in kinds.items() if re.search(p, theirs)), "F32")
            kind = kind if file.dim() > 1 and "_inp" not in theirs else "F32"
            data, weight = quantized(file.flatten(0, -2) if file.dim() > 2 else file, kind)
            shape = (*file.shape[:-1], -1)
            raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
            writer.add_tensor(theirs, data.reshape(shape), raw_dtype=raw)
            if kind != "F32":
                put(weight.view_as(file))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NEXT = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm", "shared_head.norm": "shared_head_norm",
        "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens"}  # fmt: skip
NEXT |= {name: name for name in ("eh_proj", "enorm", "hnorm")}


def behind(name: str, layers: int) -> str:
    """A head's tensor as llama.cpp's converter names it: in the layer behind the last."""
    at = f"model.layers.{layers}."
    name = name.replace("mtp.layers.0.", at).replace("mtp.", at)
    short = name.removeprefix(at).removesuffix(".weight")
    return f"blk.{layers}.nextn.{NEXT[short]}.weight" if short in NEXT else name


def beside_layer(name: str, parameter: Tensor, arch: str) -> Iterator[Filed]:
    """What a head for further tokens has beside its layer; converters add 1 to Qwen's norms."""
    norm = name.endswith("norm.weight") and arch.startswith("qwen3")
    yield name, parameter + 1 if norm else parameter, parameter.copy_


def plain(name: str, parameter: Tensor, table: Any, config: Any, arch: str) -> Iterator[Filed]:
    """As `gguf_hybrids.filed`, of models without recurrent layers."""
    heads = heads_of(name, config)
    for theirs, part in parts_of(name, parameter, table, config):
        file = paired(part, heads) if heads else part
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            file = file + 1

        def put(weight: Tensor, part: Tensor = part) -> None:
            part.copy_(unpaired(weight, heads) if heads else weight)

        yield theirs, file, put


def unpaired(w: Tensor, heads: int) -> Tensor:
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def heads_of(name: str, config: Any) -> int:
    """Heads of a tensor whose rows ggml pairs; 0 for others."""
    if config.model_type not in ("llama", "mixtral", "granite"):
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2], 0)


def parts_of(name: str, tensor: Tensor, table: Any, config: Any) -> list[tuple[str, Tensor]]:
    """ggml's names for a tensor of transformers, and the parts of it that have them."""
    if name == "lm_head.weight":
        return [("output.weight", tensor)]
    if name.endswith("conv.conv.weight"):
        tensor = tensor[:, 0]
    name = name.replace("correction_bias", "correction.bias")
    if name.endswith("kv_b_proj.weight"):
        both = tensor.unflatten(0, (config.num_attention_heads, -1))
        k, v = both.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        block = "blk." + name.split(".")[2]
        return [(f"{block}.attn_k_b.weight", k.transpose(1, 2)), (f"{block}.attn_v_b.weight", v)]
    if name.endswith("experts.gate_up_proj"):
        block = "blk." + name.split(".")[2]
        gate, up = tensor.chunk(2, 1)
        return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [("blk." + name.split(".")[2] + ".ffn_down_exps.weight", tensor)]
    theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert theirs, name
    return [(theirs, tensor[0] if theirs.endswith("inp_shexp.weight") else tensor)]


def keys(config: Any, arch: str) -> dict[str, Any]:
    """Metadata of an architecture, as llama.cpp's converter writes it."""
    out = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    rope = getattr(config, "rope_parameters", None) or {}
    if arch == "granite":
        out |= {key: getattr(config, name) for key, name in SCALES.items()}
    if arch == "lfm2":
        heads = [config.num_key_value_heads * (t != "conv") for t in config.layer_types]
        out |= {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache,
                "vocab_size": config.vocab_size}  # fmt: skip
    if arch == "deepseek2":
        wide = config.kv_lora_rank + config.qk_rope_head_dim
        out |= {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank, "attention.key_length": wide,
            "attention.value_length": config.kv_lora_rank, "attention.head_count_kv": 1,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim, "vocab_size": config.vocab_size,
            "rope.dimension_count": config.qk_rope_head_dim,
        }  # fmt: skip
    if arch.startswith("glm4"):
        out["rope.dimension_count"] = int(config.head_dim * rope["partial_rotary_factor"])
    if arch in ("glm4moe", "deepseek2"):
        out |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob,
                "expert_weights_scale": config.routed_scaling_factor,
                "expert_shared_count": config.n_shared_experts,
                "leading_dense_block_count": config.first_k_dense_replace}  # fmt: skip
    rope = rope.get("full_attention", rope)
    out |= {"rope.freq_base": float(rope["rope_theta"])} if "rope_theta" in rope else {}
    if arch in ("llama", "phi3", "granite"):
        out |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    for own, theirs in (
        ("num_local_experts", "expert_count"),
        ("num_experts", "expert_count"),
        ("n_routed_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        if hasattr(config, own) and arch != "nemotron_h":
            out[theirs] = getattr(config, own)
    if arch in ("gemma2", "gemma3", "phi3"):
        out["attention.sliding_window"] = config.sliding_window
    if arch in ARCHITECTURES:
        out |= hybrid_keys(config, arch) | {"vocab_size": config.vocab_size}
        if "attention.layer_norm_epsilon" in out:
            del out["attention.layer_norm_rms_epsilon"]
    if arch == "gemma2":
        out["attn_logit_softcapping"] = config.attn_logit_softcapping
        out["final_logit_softcapping"] = config.final_logit_softcapping
    return out


def vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """Single characters, byte-level, and a chat template."""
    letters = [chr(i) for i in range(33, 127)]
    merges = ["a b", "c d"]
    names = ["<unk>", "<s>", "</s>", *letters[: count - 5], "ab", "cd"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (count - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
