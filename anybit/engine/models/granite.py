"""Granite: Llama with multipliers for embeddings, residuals, attention and logits."""

from torch import Tensor

from anybit.engine.models.layers import MLP, Attention, Block, Decoder
from anybit.engine.weights import Weights


class Granite(Decoder):
    @property
    def embedding_scale(self) -> float:
        return float(self.config.embedding_multiplier)

    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        bias = bool(c.attention_bias)
        attention = Attention(
            weights, f"{name}.self_attn", c, bias, output_bias=bias, scale=c.attention_multiplier
        )
        mlp = MLP(weights, f"{name}.mlp", c, c.intermediate_size, bias=bool(c.mlp_bias))
        return Block(weights, name, c, attention, mlp, multiplier=c.residual_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling
