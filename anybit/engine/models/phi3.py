"""Phi-3 and Phi-4: merged projections in the checkpoint, and a part of each head rotated."""

import torch

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, window_of
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Phi3(Decoder):
    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        return [Rope(self.config, length, device, partial=True)] * self.config.num_hidden_layers

    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        attention = Attention(
            weights, f"{name}.self_attn", c, window=window_of(c, index), names=("qkv_proj",)
        )
        mlp = MLP(
            weights, f"{name}.mlp", c, c.intermediate_size, names=("gate_up_proj", "down_proj")
        )
        return Block(weights, name, c, attention, mlp)
