"""Llama 1 to 3, and everything built like it: what differs stands in fields."""

from anybit.engine.models.layers import ATTENTION_BIAS, Biases, Decoder, Norms
from anybit.engine.models.parts import NormKind

AROUND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
MERGED = ("gate_up_proj", "down_proj")  # as checkpoints hold them


class Llama(Decoder):
    biases = ATTENTION_BIAS._replace(mlp="mlp_bias")


class SeedOss(Llama):
    biases = Biases("attention_bias", "attention_out_bias", "mlp_bias")


class Ernie(Decoder):
    """ERNIE 4.5: neighbouring channels are rotated."""

    biases = Biases("use_bias", "use_bias", "use_bias")
    rope_options = {"interleaved": True}


class Mistral(Decoder):
    """A sliding window over the context."""

    windows = True


class Qwen2(Mistral):
    """And Qwen2.5."""

    biases = Biases(qkv=True)


class Qwen3(Mistral):
    """A norm on every head of Q and K."""

    biases = ATTENTION_BIAS
    attention_options = {"qk_norm": True}


class Olmo2(Mistral):
    """OLMo 2 and 3: norms after attention and MLP instead of before, and of Q and K as a whole."""

    norms = AROUND
    norm_kind = NormKind(wide=True)
    biases = ATTENTION_BIAS
    attention_options = {"qk_norm": "whole"}


class Phi3(Mistral):
    """Phi-3 and Phi-4: merged projections in the checkpoint, and a part of each head rotated."""

    attention_options = {"names": ("qkv_proj",)}
    mlp_names = MERGED
    rope_options = {"partial": True}


class Glm(Decoder):
    """Neighbouring channels are rotated, in a part of each head."""

    biases = Biases("attention_bias")
    mlp_names = MERGED
    rope_options = {"partial": True, "interleaved": True}


class Glm4(Glm):
    """Norms around attention and MLP."""

    norms = Norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
