"""Qwen3: a norm on every head of Q and K."""

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, window_of
from anybit.engine.weights import Weights


class Qwen3(Decoder):
    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        bias, window = bool(c.attention_bias), window_of(c, index)
        attention = Attention(
            weights, f"{name}.self_attn", c, bias, output_bias=bias, qk_norm=True, window=window
        )
        return Block(
            weights, name, c, attention, MLP(weights, f"{name}.mlp", c, c.intermediate_size)
        )
