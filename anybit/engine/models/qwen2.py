"""Qwen2 and Qwen2.5: biases on Q, K and V, and a sliding window in some layers."""

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, window_of
from anybit.engine.weights import Weights


class Qwen2(Decoder):
    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        return Attention(weights, name, c, bias=True, window=window_of(c, index))
