"""Mixtral: Mistral with a mixture of experts for the MLP."""

from anybit.engine.models.layers import Attention, Block, Decoder, MoE, window_of
from anybit.engine.weights import Weights


class Mixtral(Decoder):
    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        attention = Attention(weights, f"{name}.self_attn", c, window=window_of(c, index))
        moe = MoE(
            weights, f"{name}.block_sparse_moe", c, c.num_local_experts, c.num_experts_per_tok,
            c.intermediate_size, normalize=True, names=("w1", "w3", "w2"),
        )  # fmt: skip
        return Block(weights, name, c, attention, moe)
