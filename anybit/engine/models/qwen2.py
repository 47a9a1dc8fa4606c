"""Qwen2 and Qwen2.5: biases on Q, K and V, and a sliding window in some layers."""

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, window_of
from anybit.engine.weights import Weights


class Qwen2(Decoder):
    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        attention = Attention(
            weights, f"{name}.self_attn", c, bias=True, window=window_of(c, index)
        )
        return Block(
            weights, name, c, attention, MLP(weights, f"{name}.mlp", c, c.intermediate_size)
        )
