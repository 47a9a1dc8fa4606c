"""Llama 1 to 3, and everything built like it."""

import torch
from torch import nn

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import MLP, Decoder, Mixer
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Llama(Decoder):
    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether Q, K and V, attention's output, and the MLP have biases."""
        c = self.config
        return bool(c.attention_bias), bool(c.attention_bias), bool(c.mlp_bias)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        bias, output, _ = self.biases
        return Attention(weights, name, self.config, bias, output_bias=output)

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        return MLP(weights, name, c, c.intermediate_size, bias=self.biases[2])


class SeedOss(Llama):
    @property
    def biases(self) -> tuple[bool, bool, bool]:
        c = self.config
        return bool(c.attention_bias), bool(c.attention_out_bias), bool(c.mlp_bias)


class Ernie(Llama):
    """ERNIE 4.5: neighbouring channels are rotated."""

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        bias = bool(self.config.use_bias)
        return bias, bias, bias

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        return [Rope(self.config, length, device, interleaved=True)] * self.config.num_hidden_layers
