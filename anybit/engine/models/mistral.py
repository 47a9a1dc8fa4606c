"""Mistral: Llama with a sliding window over the context."""

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, window_of
from anybit.engine.weights import Weights


class Mistral(Decoder):
    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(weights, name, self.config, window=window_of(self.config, index))
