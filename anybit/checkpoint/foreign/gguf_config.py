"""What the metadata of a GGUF file says in the words of transformers' config.json.

Every key of an architecture is understood or refused: one that is left out can change a model's
output without an error. Constants that llama.cpp has in its code are here, too.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.gguf_families import (
    CAPS,
    COMMON,
    FAMILIES,
    GEMMA3_LOCAL_BASE,
    GEMMA3_PERIOD,
    GEMMA_27B,
    HEADED,
    PARTLY,
    SIGMOID,
    SIGMOIDS,
    TOKENS,
    Family,
)
from anybit.checkpoint.foreign.gguf_file import Block, Contents
from anybit.checkpoint.foreign.gguf_hybrids import settings
from anybit.checkpoint.foreign.gguf_own import Own
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

BIASED = ("llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "granite")


def family_of(contents: Contents) -> Family:
    """Which models a file is one of.

    Raises:
        InvalidInput: None that can be read.
    """
    arch = contents.metadata.get("general.architecture")
    experts = contents.metadata.get(f"{arch}.expert_count", 0)
    found = [f for f in FAMILIES if f.arch == arch]
    for family in found:
        if len(found) == 1 or bool(experts) == ("expert_count" in family.keys):
            return family
    raise InvalidInput(
        f"{contents.files[0]}: models of architecture {arch!r} cannot be read, only "
        f"{', '.join(dict.fromkeys(f.arch for f in FAMILIES))}"
    )


def config_of(contents: Contents) -> dict[str, Any]:
    """The config.json of a file's model.

    Raises:
        InvalidInput: The architecture is unknown, or a key is missing or not understood.
    """
    family = family_of(contents)
    own = Own(contents, family)
    config: dict[str, Any] = {"architectures": [family.kind], "model_type": family.model_type}
    config |= family.fixed
    own.values["block_count"] = own.layers()
    if family.hybrid:
        config |= settings(own, family)
    if family.arch in SIGMOIDS:
        sigmoids(own)
    if family.arch in HEADED and (heads := own.number("nextn_predict_layers", 0)):
        config[HEADED[family.arch]] = heads
    if family.arch == "glm4moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in contents.tensors
    if family.arch == "deepseek2":
        config |= latent(own)
    keys = COMMON | dict(family.keys)
    config |= {name: own.number(key) for key, name in keys.items() if key in own.values}
    sizes(own, config)
    config["vocab_size"] = vocabulary(contents)
    config["tie_word_embeddings"] = "output.weight" not in contents.tensors
    if family.hybrid or family.model_type in BIASED:
        config["attention_bias"] = own.has("attn_q.bias")
    if family.model_type in ("llama", "granite"):
        config["mlp_bias"] = "blk.0.ffn_up.bias" in contents.tensors
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    config |= {cap: None for cap in CAPS if config.get(cap) == 0}
    if not own.flag("attention.causal", True):
        config["is_causal"] = False
    for name, key in TOKENS.items():
        token = contents.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[key] = token if isinstance(token, int) else None
    rope(own, config)
    if family.arch.startswith("granite"):  # where transformers' default is 1
        config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)
    if family.arch in GEMMA_27B:
        heads = config["hidden_size"] // config["num_attention_heads"]
        large = config["num_hidden_layers"] == GEMMA_27B[family.arch]
        config["query_pre_attn_scalar"] = heads if large else config["head_dim"]
    if family.arch == "gemma3":
        gemma3(own, config)
    own.check_all_known()
    config["dtype"] = dtype_of(contents)
    return config


def sizes(own: Own, config: dict[str, Any]) -> None:
    """Layers, channels and heads: those that are said, checked, and what is by default."""
    path, tensors = own.path, len(own.contents.tensors)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise InvalidInput(f"{path}: has no whole number of {name} in its metadata")
    if "attention.layer_norm_rms_epsilon" not in own.values:  # which has no default
        raise InvalidInput(f"{path}: has no attention.layer_norm_rms_epsilon in its metadata")
    if (layers := config["num_hidden_layers"]) > tensors:
        raise InvalidInput(f"{path}: {layers} layers in its metadata, and {tensors} tensors")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("num_key_value_heads", "head_dim"):
        if not isinstance(config[name], int) or config[name] < 1:
            raise InvalidInput(f"{path}: {name} is {config[name]!r} in its metadata")
    if own.number("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise InvalidInput(f"{path}: keys and values of different lengths cannot be read")


def vocabulary(contents: Contents) -> int:
    """How many tokens the embeddings have; InvalidInput where the tokenizer has more."""
    path, embedding = contents.files[0], contents.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidInput(f"{path}: has no token_embd.weight; it is not a language model")
    rows, tokens = embedding.shape[0], contents.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise InvalidInput(
            f"{path}: its tokenizer has {len(tokens)} tokens, and token_embd.weight {rows} rows; "
            "the file is damaged or badly made: convert the original model again"
        )
    return rows


def rope(own: Own, config: dict[str, Any]) -> None:
    """Rotary embeddings: their base, how they are stretched, and how much of a head they turn."""
    tensors, path = own.contents.tensors, own.path
    factor = own.number("rope.scaling.factor", 1.0) or 1.0  # llama.cpp takes 0 for 1
    scaling = own.text("rope.scaling.type", "none" if factor == 1 else "linear")
    if factor < 1:
        raise InvalidInput(f"{path}: rotary embeddings stretched {factor} times cannot be read")
    own.extrapolates(factor, scaling)
    factors = [name for name in tensors if name.startswith(("rope_freqs", "rope_factors"))]
    made = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10000.0)}
    attention = own.number("rope.scaling.attn_factor", 1.0)
    original = own.number("rope.scaling.original_context_length")
    if factors:
        short, long = ("rope_factors_short.weight", "rope_factors_long.weight")
        if factors == ["rope_freqs.weight"]:  # at all lengths, as Llama 3.1 has them
            short = long = factors[0]
            original = config.get("max_position_embeddings")
        elif set(factors) != {short, long} or not original:
            raise InvalidInput(f"{path}: {', '.join(factors)} cannot be read")
        if scaling not in ("none", "longrope"):
            raise InvalidInput(f"{path}: {scaling} with {factors[0]} cannot be read")
        made |= {
            "rope_type": "longrope",
            "short_factor": numbers(own, short),
            "long_factor": numbers(own, long),
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        }
        config["original_max_position_embeddings"] = original
    elif scaling == "linear":
        made |= {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn" and original:
        made |= {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention * (1 + 0.1 * math.log(factor)),
            "beta_fast": own.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": own.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings": original,
        }
        if own.arch == "deepseek2":  # whose file has a tenth, of what scales scores
            scores = round(10 * own.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
            made |= {"attention_factor": 1.0, "mscale": scores, "mscale_all_dim": scores}
    elif scaling != "none":
        raise InvalidInput(f"{path}: rotary embeddings of type {scaling!r} cannot be read")
    elif factor != 1:
        raise InvalidInput(f"{path}: rotary embeddings stretched {factor} times, but of no type")
    elif original and own.arch == "phi3":
        config["original_max_position_embeddings"] = original
    turned = own.number("rope.dimension_count", config["head_dim"])
    if own.arch.startswith("qwen35"):
        made["mrope_section"] = sections(own)
    if turned != config["head_dim"] or own.arch in PARTLY:  # a part of it there by default
        if own.arch not in PARTLY:
            raise InvalidInput(
                f"{path}: {turned} of {config['head_dim']} channels are rotated, which "
                f"{own.arch} of transformers does not do"
            )
        made["partial_rotary_factor"] = turned / config["head_dim"]
    config["rope_parameters"] = made


def sections(own: Own) -> list[int]:
    """Of rotary embeddings of pictures; a text has one position in all three."""
    own.known.add("rope.dimension_sections")
    found = own.values.get("rope.dimension_sections")
    if not isinstance(found, list) or not all(isinstance(n, int) and n >= 0 for n in found):
        raise InvalidInput(f"{own.path}: {own.arch}.rope.dimension_sections is no list of numbers")
    return found[:3]


def numbers(own: Own, name: str) -> list[float]:
    """A small dense tensor."""
    block = own.contents.tensors[name]
    if block.kind != "F32" or len(block.shape) != 1 or block.shape[0] > 1024:
        raise InvalidInput(f"{own.path}: {name} is no short list of F32 numbers")
    return [float(x) for x in block.stored.read()]


def gemma3(own: Own, config: dict[str, Any]) -> None:
    """Layers with a window, and their own base."""
    local = own.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE)
    near = own.values.get("attention.sliding_window_pattern")  # one for each layer, or a period
    if not isinstance(near, list):
        period = max(1, own.number("attention.sliding_window_pattern", GEMMA3_PERIOD))
        near = [(i + 1) % period != 0 for i in range(config["num_hidden_layers"])]
    own.known.add("attention.sliding_window_pattern")
    config["layer_types"] = ["sliding_attention" if n else "full_attention" for n in near]
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def sigmoids(own: Own) -> None:
    """InvalidInput where routers are none by sigmoids."""
    if own.number("expert_gating_func", SIGMOIDS[own.arch]) != SIGMOID:
        raise InvalidInput(f"{own.path}: experts that are chosen by no sigmoid cannot be read")


def latent(own: Own) -> dict[str, Any]:
    """Of DeepSeek: sizes of heads. Files say how llama.cpp runs them, as one head of latents."""
    turned = own.number("rope.dimension_count", 0)
    old = [own.number(f"attention.{name}_length", 0) for name in ("key", "value")]
    wide, value = (
        own.number(f"attention.{name}_length_mla", size)
        for name, size in zip(("key", "value"), old, strict=True)
    )
    own.values |= {"attention.key_length": turned, "attention.value_length": turned}
    own.values["attention.head_count_kv"] = own.number("attention.head_count")
    ranks = {"q_lora_rank": own.number("attention.q_lora_rank")}
    return ranks | {"qk_nope_head_dim": wide - turned, "v_head_dim": value}


# The way back.


IDLE = {  # of a config.json, without effect on a model's outputs, or said by tensors
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "head_dim",
    "initializer_range",
    "max_window_layers",
    "original_max_position_embeddings",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "_attn_implementation",
}


# llama.cpp reads these as floats, and refuses whole numbers.
REAL = ("freq_base", "freq_base_swa", "factor", "epsilon", "softcapping")


def metadata_of(
    config: Any, family: Family, names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata that says what a configuration of transformers does; the inverse of `config_of`.

    Args:
        config: transformers' configuration.
        family: Of its models.
        names: ggml's names of the model's tensors.

    Returns:
        Values by key, and small tensors by name.

    Raises:
        InvalidInput: GGUF has no word for a setting.
    """
    arch, heads = family.arch, config.num_attention_heads
    own = {
        key: getattr(config, name)
        for key, name in {**COMMON, **family.keys}.items()
        if getattr(config, name, None) is not None
    }
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    own |= {"attention.key_length": dim, "attention.value_length": dim}
    own["vocab_size"] = config.vocab_size
    own |= {"attention.causal": False} if getattr(config, "is_causal", None) is False else {}
    given = config.rope_parameters
    if family.arch == "gemma3":
        own["rope.freq_base_swa"] = given["sliding_attention"]["rope_theta"]
        given = given["full_attention"]
    turned = int(dim * given.get("partial_rotary_factor", 1.0))
    own |= {"rope.freq_base": given["rope_theta"], "rope.dimension_count": turned}
    more, tensors = stretched(config, given, turned)
    metadata = {
        f"{arch}.{key}": float(value) if key.endswith(REAL) else value
        for key, value in (own | more).items()
    }
    metadata["general.architecture"] = arch
    shape = (config.vocab_size, config.hidden_size)
    nowhere = Stored(Path("the checkpoint"), "F32", shape, 0, 0)
    blocks = {name: Block("F32", shape, nowhere) for name in names}
    back = config_of(Contents((nowhere.file,), metadata, blocks))
    again, before = {"is_causal": True} | type(config)(**back).to_dict(), config.to_dict()
    idle = IDLE | ({"rope_parameters"} if tensors else set())
    for key in before:
        if key not in idle and not same(again.get(key), before[key]):
            raise InvalidInput(
                f"config.json: {key} is {str(before[key])[:60]}, and llama.cpp's {arch} would run "
                f"with {str(again.get(key))[:60]}; this model cannot be written as GGUF"
            )
    return metadata, tensors


def same(got: Any, wanted: Any) -> bool:
    """Whether a setting says what another one does; of objects, every word of that."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return all(same(got.get(key), value) for key, value in wanted.items() if value is not None)
    if isinstance(wanted, float) and isinstance(got, int | float):
        return math.isclose(got, wanted, rel_tol=1e-6)
    return bool(got == wanted)


def stretched(
    config: Any, given: Mapping[str, Any], turned: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of stretched rotary embeddings."""
    kind = given["rope_type"]
    if kind in ("linear", "yarn"):
        out = {"rope.scaling.type": kind, "rope.scaling.factor": given["factor"]}
        if kind == "yarn":
            usual = 1 + 0.1 * math.log(given["factor"])
            attention = given.get("attention_factor") or usual
            out |= {
                "rope.scaling.original_context_length": given["original_max_position_embeddings"],
                "rope.scaling.attn_factor": attention / usual,
            }
            betas = {name: given.get(name) for name in ("beta_fast", "beta_slow")}
            out |= {f"rope.scaling.yarn_{name}": float(b) for name, b in betas.items() if b}
        return out, {}
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = given["rope_theta"] ** -(torch.arange(0, turned, 2).float() / turned)
        return {}, {"rope_freqs.weight": plain / ROPE_INIT_FUNCTIONS[kind](config)[0].float()}
    if kind == "longrope":
        short, long = (torch.tensor(given[f"{name}_factor"]).float() for name in ("short", "long"))
        attention = given.get("attention_factor")
        if torch.equal(short, long) and attention == 1.0:
            return {}, {"rope_freqs.weight": short}
        known = config.original_max_position_embeddings
        factor = config.max_position_embeddings / known
        usual = math.sqrt(1 + math.log(factor) / math.log(known)) if factor > 1 else 1.0
        out = {
            "rope.scaling.original_context_length": known,
            "rope.scaling.attn_factor": attention or usual,
        }
        return out, {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    return {}, {}


def dtype_of(contents: Contents) -> str:
    """The dtype of activations, which no file says: that of its 16-bit numbers, or bfloat16."""
    kinds = {block.kind for block in contents.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if "F16" in kinds and "BF16" not in kinds else "bfloat16"
