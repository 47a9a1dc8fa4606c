"""GLM and GLM-4: neighbouring channels are rotated, in a part of each head; norms around."""

import torch

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, Norms
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Glm(Decoder):
    norms = Norms()

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        rope = Rope(self.config, length, device, partial=True, interleaved=True)
        return [rope] * self.config.num_hidden_layers

    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        attention = Attention(weights, f"{name}.self_attn", c, bool(c.attention_bias))
        mlp = MLP(
            weights, f"{name}.mlp", c, c.intermediate_size, names=("gate_up_proj", "down_proj")
        )
        return Block(weights, name, c, attention, mlp, self.norms)


class Glm4(Glm):
    norms = Norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
