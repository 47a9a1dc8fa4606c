"""Mixtral: Mistral with a mixture of experts for the MLP."""

from anybit.engine.models.llama import Mistral
from anybit.engine.models.parts import MoE
from anybit.engine.weights import Weights


class Mixtral(Mistral):
    mlp_name = "block_sparse_moe"

    def mlp(self, weights: Weights, name: str, index: int) -> MoE:
        c = self.config
        return MoE(
            weights,
            name,
            c,
            c.num_local_experts,
            c.num_experts_per_tok,
            c.intermediate_size,
            normalize=True,
            names=("w1", "w3", "w2"),
        )
