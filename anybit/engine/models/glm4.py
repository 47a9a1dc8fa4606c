"""GLM and GLM-4: neighbouring channels are rotated, in a part of each head; norms around."""

import torch

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import MLP, Decoder, Mixer, Norms
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Glm(Decoder):
    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        rope = Rope(self.config, length, device, partial=True, interleaved=True)
        return [rope] * self.config.num_hidden_layers

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(weights, name, self.config, bool(self.config.attention_bias))

    def mlp(self, weights: Weights, name: str, index: int) -> MLP:
        c = self.config
        return MLP(weights, name, c, c.intermediate_size, ("gate_up_proj", "down_proj"))


class Glm4(Glm):
    norms = Norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
