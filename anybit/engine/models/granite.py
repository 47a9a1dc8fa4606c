"""Granite: Llama with multipliers for embeddings, residuals, attention and logits."""

from torch import Tensor

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Mixer
from anybit.engine.models.llama import Llama
from anybit.engine.weights import Weights


class Granite(Llama):
    @property
    def embedding_scale(self) -> float:
        return float(self.config.embedding_multiplier)

    @property
    def residual_multiplier(self) -> float:
        return float(self.config.residual_multiplier)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        bias = bool(c.attention_bias)
        return Attention(weights, name, c, bias, output_bias=bias, scale=c.attention_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling
