"""Tiny random models of transformers' architectures, found in its own registries.

A configuration is made by shrinking the defaults of the class, by rules over the names of its
fields. So an architecture that is new in transformers is tried unasked.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

REGISTRIES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)
CAUSAL = frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
MOST_PARAMETERS = 40_000_000  # of a model that is worth its time
MOST_LAYERS = 4
VOCABULARY, LENGTH = 512, 16
TOKENS = range(4, 480)  # those of prompts; above are placeholders of images, below special ones

# Sizes by the names of fields, for those fields that a configuration has.
SIZES = {
    128: "hidden_size d_model n_embd dim embedding_dim moe_intermediate_size out_hidden_size "
    "shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "projector_hidden_size projection_dim image_token_embed_dim moe_hidden_size ple_embed_dim "
    "projector_input_dim projector_output_dim vision_output_dim "
    "cross_attention_hidden_size encoder_hidden_size embedding_size nemo_conv_channels "
    "ext_pw_out_channel depthwise_separable_out_channel",
    256: "intermediate_size dff ffn_dim dim_ff d_ff encoder_ffn_dim decoder_ffn_dim n_inner "
    "ffn_hidden_size dense_intermediate_size mlp_hidden_size intermediate_size_mlp "
    "max_position_embeddings n_positions projection_intermediate_size mlp_dim "
    "alignment_intermediate_size",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_decoder_layers "
    "depth num_blocks num_key_value_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token top_k_experts moe_k moe_topk zero_expert_num",
    4: "num_attention_heads swa_num_attention_heads n_head num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads",
    32: "head_dim swa_head_dim d_kv kv_lora_rank qk_nope_head_dim v_head_dim mamba_d_head "
    "base_channels linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
    "hc_lowrank o_lora_rank",
    16: "rotary_dim qk_rope_head_dim mamba_d_state state_size num_embeddings",
    8: "mamba_n_heads mamba_dt_rank",
    64: "q_lora_rank",
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab "
    "ngram_vocab_size_base entity_vocab_size",
    0: "pad_token_id decoder_start_token_id num_kv_shared_layers",
    1: "bos_token_id first_k_dense_replace n_group topk_group mm_tokens_per_image",
}  # fmt: skip
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL["eos_token_id"] = 2
IMAGE = {"image_size": 28, "patch_size": 14}
LAYER_SMALL = SMALL | {"head_dim": 64}  # of layers that differ from the others

# What the rules cannot know, by the type of a configuration.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_loops": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "inkling2_loop_text": {
        "num_hidden_layers": 6, "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2,
        "loop_layer_index_end": 4, "loop_gate_rank": 16, "unpadded_vocab_size": VOCABULARY,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 128},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 128},
    "step3p5": {"sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "mamba_headdim": 32, "attention_hidden_size": 256, "attention_head_dim": 64,
        "hybrid_layer_ids": [1],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A tiny model of one of transformers' classes."""

    architecture: str

    @property
    def type(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.architecture)  # type: ignore[no-any-return]

    def config(self) -> Any:
        config = shrink(self.type.config_class())
        shrink_placeholders(config)
        config.architectures = [self.architecture]
        return config

    def make(self) -> PreTrainedModel:
        """The model in fp32 with random weights, seeded. Raises ValueError when it is too large."""
        config = self.config()
        with torch.device("meta"):
            size = sum(p.numel() for p in self.type(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{self.architecture} has {size:,} parameters in its tiny form")
        torch.manual_seed(0)
        return self.type(config).float().eval()


def architectures() -> Iterator[str]:
    """Every class of the registries, once."""
    seen = set()
    for registry in REGISTRIES:
        for names in getattr(modeling_auto, registry).values():
            name = names if isinstance(names, str) else names[0]
            if name not in seen and hasattr(transformers, name):
                seen.add(name)
                yield name


def shrink(config: Any) -> Any:
    """Apply the rules, in place, to a configuration and those inside of it."""
    overrides = layer_overrides(config)
    if overrides:
        config.per_layer_config = None
    kept = shrink_layers(config)
    for name, value in SMALL.items():
        if isinstance(read(config, name), int):
            write(config, name, value)
    if isinstance(read(config, "num_hidden_layers"), int):
        write(config, "num_hidden_layers", len(kept))
    for name in ("head_dim", "num_key_value_heads", "vocab_size"):  # None follows from others
        if name in vars(config) and not read(config, name):
            write(config, name, SMALL[name])
    shrink_vision(config, len(kept))
    shrink_latent_attention(config)
    shrink_rope(config)
    for name, value in FIELDS.get(read(config, "model_type"), {}).items():
        setattr(config, name, value)
    if overrides:
        config.per_layer_config = {
            at: {n: LAYER_SMALL.get(n, v) for n, v in overrides[layer].items()}
            for at, layer in enumerate(kept)
            if layer in overrides
        }
    for name in read(config, "sub_configs") or ():
        if read(config, name) is not None:
            shrink(read(config, name))
    return config


def layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Fields that some layers of a model have of their own."""
    if not read(config, "is_heterogeneous"):
        return {}
    return {int(layer): found for layer, found in config.to_dict()["per_layer_config"].items()}


def shrink_layers(config: Any) -> list[int]:
    """Keep one layer of each kind, two at least, in all lists that have an entry a layer.

    Returns:
        Which layers are kept.
    """
    count = read(config, "num_hidden_layers")
    if not isinstance(count, int) or count <= 2:
        return [0, 1]
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    if not lists:
        return [0, 1]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    others = [layer for layer in range(count) if layer not in kinds.values()]
    kept = sorted([*kinds.values(), *others][: min(max(len(kinds), 2), MOST_LAYERS)])
    for name, value in lists.items():
        write(config, name, [SMALL.get(name, value[layer]) for layer in kept])
    return kept


def shrink_vision(config: Any, layers: int) -> None:
    """Two by two patches, except where layers divide the image further."""
    if any(isinstance(read(config, name), (list, tuple)) for name in ("depths", "hidden_sizes")):
        return
    for name, value in IMAGE.items():
        found = read(config, name)
        if isinstance(found, int):
            write(config, name, value)
        elif isinstance(found, (list, tuple)) and len(found) == 2 and found[0] == found[1]:
            write(config, name, [value] * 2)
    if isinstance(read(config, "depth"), int) and isinstance(read(config, "embed_dim"), int):
        write(config, "embed_dim", SMALL["hidden_size"])
    if isinstance(read(config, "stage_names"), list):
        config.stage_names = ["stem", *(f"stage{layer + 1}" for layer in range(layers))]
        config.set_output_features_output_indices(out_features=None, out_indices=None)


def shrink_latent_attention(config: Any) -> None:
    """Make the widths of DeepSeek's attention fit each other."""
    rope = read(config, "qk_rope_head_dim")
    if not rope:
        return
    parameters = read(config, "rope_parameters") or {}
    write(config, "head_dim", int(rope / parameters.get("partial_rotary_factor", 1)))
    write(config, "qk_head_dim", rope + (read(config, "qk_nope_head_dim") or 0))
    write(config, "num_key_value_heads", SMALL["num_attention_heads"])


def shrink_rope(config: Any) -> None:
    """Divide a head's rotary dimensions between time, height and width, where a model does."""
    if "mrope_section" not in read_source(config):
        return
    width = read(config, "head_dim") or 32
    for name in ("rope_parameters", "rope_scaling"):
        rope = read(config, name)
        if not isinstance(rope, dict):
            continue
        part = rope.get("partial_rotary_factor") or read(config, "partial_rotary_factor") or 1
        half = int(width * part) // 2
        parts = len(rope.get("mrope_section") or (0, 0, 0))
        section = [half // 4] * (parts - 1) if parts == 3 else [half // parts] * (parts - 1)
        rope["mrope_section"] = [half - sum(section), *section]


def read_source(config: Any) -> str:
    """The source of the models of a configuration."""
    module = inspect.getmodule(type(config))
    name = (module.__name__ if module else "").replace("configuration_", "modeling_")
    try:
        return inspect.getsource(__import__(name, fromlist=["_"]))
    except (ImportError, OSError, ValueError):
        return ""


def shrink_placeholders(config: Any) -> None:
    """Give the tokens that stand for images, audio and such an id inside of the vocabulary."""
    free = iter(range(TOKENS.stop, VOCABULARY))
    for name, value in list(vars(config).items()):
        named = name.endswith(("_token_id", "_token_index")) and name not in SMALL
        if named and isinstance(value, int):
            write(config, name, next(free))


def read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field that is defined for each layer, say
        return None


def write(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property that follows from other fields
        return


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Seeded inputs of a model: tokens, and an image where the model takes one beside them."""
    plain = plain_inputs(model)
    try:
        seeing = plain | image_inputs(model, plain["input_ids"])
        with torch.no_grad():
            model(**seeing)
        return seeing
    except Exception:  # it takes no images, or wants them in a form of its own
        return plain


def plain_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model's forward asks for at least."""
    random = torch.Generator().manual_seed(1)
    config, wanted = model.config, inspect.signature(model.forward).parameters
    ids = torch.randint(TOKENS.start, TOKENS.stop, (1, LENGTH), generator=random)
    out: dict[str, Tensor] = {}
    if model.main_input_name == "pixel_values" and "input_ids" not in wanted:
        return {"pixel_values": image(config, random)}
    if model.main_input_name == "input_features":
        bins, frames = config.num_mel_bins, 2 * config.max_source_positions
        out["input_features"] = torch.randn(1, bins, frames, generator=random)
    elif "input_ids" in wanted:
        out["input_ids"] = ids
    elif "input_values" in wanted:
        out["input_values"] = torch.randn(1, 8000, generator=random)
    pixels = wanted.get("pixel_values")
    if pixels and pixels.default is pixels.empty:
        out["pixel_values"] = image(read(config, "vision_config") or config, random)
    if config.is_encoder_decoder and "decoder_input_ids" in wanted:
        out["decoder_input_ids"] = ids[:, : LENGTH // 2]
    return out


def image(config: Any, random: torch.Generator) -> Tensor:
    size = read(config, "image_size") or IMAGE["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(1, read(config, "num_channels") or 3, height, width, generator=random)


def image_inputs(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """An image, and the tokens with as many placeholders as it has features."""
    config, random = model.config, torch.Generator().manual_seed(2)
    wanted = inspect.signature(model.forward).parameters
    vision = config.vision_config
    if "image_grid_thw" in wanted:  # 4 x 4 patches, each a row
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        given = {
            "pixel_values": torch.randn(16, width, generator=random),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
    else:
        given = {"pixel_values": image(vision, random)}
        if "image_sizes" in wanted:
            given["image_sizes"] = torch.tensor([given["pixel_values"].shape[2:]])
    with torch.no_grad():
        found = model.get_image_features(**given)  # type: ignore[operator]
    count = math.prod(features(found).shape[:-1])
    token = read(config, "image_token_id") or read(config, "image_token_index")
    placeholders = torch.full((1, count), token)
    out = given | {"input_ids": torch.cat([ids[:, :4], placeholders, ids[:, 4:]], 1)}
    if "mm_token_type_ids" in wanted:
        out["mm_token_type_ids"] = (out["input_ids"] == token).int()
    return out


def features(found: Any) -> Tensor:
    """The features of all images, in the last dimension."""
    found = getattr(found, "pooler_output", found)
    return torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
