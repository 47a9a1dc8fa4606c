"""Mistral: Llama with a sliding window over the context."""

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, window_of
from anybit.engine.weights import Weights


class Mistral(Decoder):
    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        attention = Attention(weights, f"{name}.self_attn", c, window=window_of(c, index))
        return Block(
            weights, name, c, attention, MLP(weights, f"{name}.mlp", c, c.intermediate_size)
        )
