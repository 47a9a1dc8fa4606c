"""Llama 1 to 3, and everything built like it."""

from anybit.engine.models.layers import MLP, Attention, Block, Decoder
from anybit.engine.weights import Weights


class Llama(Decoder):
    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        bias = bool(c.attention_bias)
        attention = Attention(weights, f"{name}.self_attn", c, bias=bias, output_bias=bias)
        mlp = MLP(weights, f"{name}.mlp", c, c.intermediate_size, bias=bool(c.mlp_bias))
        return Block(weights, name, c, attention, mlp)
