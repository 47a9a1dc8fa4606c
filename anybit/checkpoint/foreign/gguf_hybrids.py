"""Models with recurrent layers in GGUF files: settings, and tensors that are stored otherwise.

llama.cpp's converter is the source: it joins and parts tensors, puts rows in another order, and
stores -exp(A_log) as A.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit.checkpoint.foreign.gguf_families import GATED, Family
from anybit.checkpoint.foreign.gguf_own import Own
from anybit.errors import InvalidInput

# Parts of transformers' names, as those have them that the `gguf` package knows.
WORDS = (
    (r"correction_bias", "correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"block_sparse_moe\.experts\.(\w+_proj)", r"mlp.experts.\1"),
    (r"block_sparse_moe\.router\.", "block_sparse_moe.router.layer."),
    (r"mixer\.experts\.", "mlp.experts."),
    (r"^model\.(layers\.\d+\.mixer\.)", r"backbone.\1"),
)
INTERVAL = 4  # of full attention, where a file names no layers


class Order(NamedTuple):
    """Where rows and columns of a tensor of the model lie in a file; None: as they are."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def same(self) -> bool:
        """Whether all lies as in the model."""
        return self.rows is None and self.columns is None


# Tensors.


def general(name: str) -> str:
    """A tensor's name in the words that the `gguf` package knows."""
    for ours, theirs in WORDS:
        name = re.sub(ours, theirs, name)
    return name


def parts_of(name: str, family: Family, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors of a file that hold a tensor's rows one after another; (): one of its name."""
    block = "blk." + name.split(".")[2] if name.count(".") > 2 else ""
    if family.arch == "qwen3next" and name.endswith("in_proj_qkvz.weight"):
        return f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"
    if family.arch == "granitehybrid" and ".shared_mlp." in name:
        end = "_shexp.weight" if config["num_local_experts"] else ".weight"
        words = ("gate", "up") if ".input_linear." in name else ("down",)
        return tuple(f"{block}.ffn_{word}{end}" for word in words)
    return ()


def order_of(name: str, family: Family, config: Mapping[str, Any], n: int) -> Order:
    """The order of a tensor's n rows, and of its columns, in a file.

    ggml rotates neighbours in some families, transformers the two halves of a head. And heads of V
    that share one of K lie side by side in transformers, apart in ggml.
    """
    kind = name.split(".")[-2] if "." in name else ""
    if family.paired and kind in ("q_proj", "k_proj"):
        which = "num_attention_heads" if kind == "q_proj" else "num_key_value_heads"
        return Order(torch.arange(n).view(config[which], -1, 2).transpose(1, 2).flatten())
    if family.arch not in GATED or ".linear_attn." not in name:
        return Order()
    k, v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    wide, value = k * config["linear_key_head_dim"], config["linear_value_head_dim"]
    if family.arch == "qwen3next":
        if kind != "in_proj_qkvz":
            return Order()
        sizes = (wide, wide, v * value, v * value)
        each = [part.view(k, -1) for part in torch.arange(sum(sizes)).split(sizes)]
        return Order(torch.cat(each, 1).flatten())

    def heads(channels: int) -> Tensor:
        return torch.arange(v * channels).view(v // k, k, channels).transpose(0, 1).flatten()

    if kind == "norm" or v == k:
        return Order()
    if kind == "out_proj":
        return Order(columns=heads(value))
    if kind in ("in_proj_qkv", "conv1d"):
        return Order(torch.cat((torch.arange(2 * wide), 2 * wide + heads(value))))
    return Order(heads(value if kind == "in_proj_z" else 1))


def change_of(name: str, family: Family) -> Callable[[Tensor], Tensor] | None:
    """What makes the model's numbers of those in a file; None where they are the same."""
    if name.endswith(".A_log"):
        return lambda a: (-a).log()
    if family.plus_one and name.endswith("norm.weight") and ".linear_attn." not in name:
        return lambda w: w - 1
    return None


# Settings.


def settings(own: Own, family: Family) -> dict[str, Any]:
    """What config.json says of recurrent layers; what is one number in all layers becomes one."""
    for key in family.keys:
        if key.startswith(("ssm.", "shortconv.")) and not own.number(key, 0):
            raise InvalidInput(f"{own.path}: has no {key} in its metadata")
    if family.arch in GATED:
        return delta(own)
    if family.arch in MAMBA:
        return MAMBA[family.arch](own)
    heads = by_layer(own, "attention.head_count_kv")  # none in layers that are convolutions
    return {"layer_types": ["full_attention" if n else "conv" for n in heads]}


def by_layer(own: Own, key: str) -> list[int]:
    """A number for each layer, of which all that are not 0 are the same: that is left in `own`."""
    numbers = own.each_layer(key)
    own.values[key] = [n for n in numbers if n] or 0
    return numbers[: own.number("block_count")]


def divided(own: Own, key: str, by: int) -> int:
    """A number over another one."""
    number = own.number(key, 0)
    if not number or not by or number % by:
        raise InvalidInput(f"{own.path}: {own.arch}.{key} is {number}, no multiple of {by}")
    return int(number // by)


def delta(own: Own) -> dict[str, Any]:
    """Of Qwen3-Next and later: which layers attend, and the heads of the others."""
    layers = own.number("block_count", 0)
    interval = own.number("full_attention_interval", INTERVAL) or INTERVAL
    found = [(i + 1) % interval != 0 for i in range(layers)]
    if (key := "attention.recurrent_layers") in own.values:
        found = own.each_layer(key)
    k, v = own.number("ssm.group_count"), own.number("ssm.time_step_rank", 0)
    if v % k:
        raise InvalidInput(f"{own.path}: {v} heads of V and {k} of K in its metadata")
    return {
        "layer_types": ["linear_attention" if r else "full_attention" for r in found[:layers]],
        "linear_num_value_heads": v,
        "linear_value_head_dim": divided(own, "ssm.inner_size", v),
    }


def mamba2(own: Own, heads: str, size: str) -> dict[str, Any]:
    """Heads of Mamba 2, and the channels of each, by their names in config.json."""
    count = own.number("ssm.time_step_rank", 0)
    return {heads: count, size: divided(own, "ssm.inner_size", count)}


def granite(own: Own) -> dict[str, Any]:
    """Of Granite 4: layers, heads, and whether anything rotates."""
    heads = by_layer(own, "attention.head_count_kv")
    rotated = own.flag("rope.scaling.finetuned", True)
    return mamba2(own, "mamba_n_heads", "mamba_d_head") | {
        "layer_types": ["attention" if n else "mamba" for n in heads],
        "position_embedding_type": "rope" if rotated else None,
        "mamba_expand": divided(own, "ssm.inner_size", own.number("embedding_length", 0)),
        "num_local_experts": own.number("expert_count", 0),
        "num_experts_per_tok": own.number("expert_used_count", 0),
        "mamba_conv_bias": own.has("ssm_conv1d.bias"),
    }


def falcon(own: Own) -> dict[str, Any]:
    """Of Falcon-H1, whose multipliers are in the weights of a file."""
    one = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
    return mamba2(own, "mamba_n_heads", "mamba_d_head") | {
        **{f"{name}_multiplier": 1.0 for name in one},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        "mamba_rms_norm": own.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": own.has("ssm_conv1d.bias"),
    }


def nemotron(own: Own) -> dict[str, Any]:
    """Of Nemotron-H: layers are one of three kinds each."""
    heads, wide = (by_layer(own, k) for k in ("attention.head_count_kv", "feed_forward_length"))
    experts = own.number("expert_count", 0)
    kinds = [
        "attention" if a else ("moe" if experts else "mlp") if b else "mamba"
        for a, b in zip(heads, wide, strict=True)
    ]
    epsilon = own.number("attention.layer_norm_epsilon")
    if epsilon is not None:  # of the same norms, where llama.cpp does not find the other key
        own.values.setdefault("attention.layer_norm_rms_epsilon", epsilon)
    return mamba2(own, "mamba_num_heads", "mamba_head_dim") | {
        "layers_block_type": kinds,
        "use_conv_bias": own.has("ssm_conv1d.bias"),
        "moe_latent_size": own.number("moe_latent_size", 0) or None,
    }


def jamba(own: Own) -> dict[str, Any]:
    """Of Jamba: every how many layers one attends, or has experts."""
    heads, tensors = by_layer(own, "attention.head_count_kv"), own.contents.tensors
    routed = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(len(heads))]
    return {
        **periodic(own, "attn", [bool(n) for n in heads]),
        **periodic(own, "expert", routed),
        "mamba_expand": divided(own, "ssm.inner_size", own.number("embedding_length", 0)),
        "mamba_conv_bias": own.has("ssm_conv1d.bias"),
    }


def periodic(own: Own, what: str, layers: list[bool]) -> dict[str, int]:
    """Which layers are of a kind, as a period and an offset."""
    which = [i for i, yes in enumerate(layers) if yes]
    first = which[0] if which else len(layers)
    period = which[1] - first if len(which) > 1 else len(layers) + 1
    if which != list(range(first, len(layers), period)):
        raise InvalidInput(f"{own.path}: its layers {which} ({what}) do not lie equally far apart")
    return {f"{what}_layer_period": period, f"{what}_layer_offset": first}


MAMBA: dict[str, Callable[[Own], dict[str, Any]]] = {
    "granitehybrid": granite,
    "falcon-h1": falcon,
    "nemotron_h": nemotron,
    "nemotron_h_moe": nemotron,
    "jamba": jamba,
}
