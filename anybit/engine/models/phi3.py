"""Phi-3 and Phi-4: merged projections in the checkpoint, and a part of each head rotated."""

import torch

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import MLP, Decoder, Mixer, window_of
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Phi3(Decoder):
    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        return [Rope(self.config, length, device, partial=True)] * self.config.num_hidden_layers

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        return Attention(weights, name, c, window=window_of(c, index), names=("qkv_proj",))

    def mlp(self, weights: Weights, name: str, index: int) -> MLP:
        c = self.config
        return MLP(weights, name, c, c.intermediate_size, ("gate_up_proj", "down_proj"))
