"""Llama 1 to 3, and everything built like it."""

import torch

from anybit.engine.models.layers import MLP, Attention, Block, Decoder
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Llama(Decoder):
    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether Q, K and V, attention's output, and the MLP have biases."""
        c = self.config
        return bool(c.attention_bias), bool(c.attention_bias), bool(c.mlp_bias)

    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        bias, output, inner = self.biases
        attention = Attention(weights, f"{name}.self_attn", c, bias, output_bias=output)
        mlp = MLP(weights, f"{name}.mlp", c, c.intermediate_size, bias=inner)
        return Block(weights, name, c, attention, mlp)


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
