"""Qwen3: a norm on every head of Q and K."""

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, window_of
from anybit.engine.weights import Weights


class Qwen3(Decoder):
    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        bias, window = bool(c.attention_bias), window_of(c, index)
        return Attention(weights, name, c, bias, output_bias=bias, qk_norm=True, window=window)
