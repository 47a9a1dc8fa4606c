"""Qwen2-MoE and Qwen3-MoE: many small experts; Qwen2's has one more that every token sees."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models.layers import Biases, Decoder
from anybit.engine.models.llama import Mistral, Qwen3
from anybit.engine.models.parts import MLP, MoE
from anybit.engine.weights import Weights


class SharedMoE(nn.Module):
    """A mixture of experts plus a shared expert behind a gate of its own.

    normalize: as in `MoE`; None: config.json says it.
    """

    def __init__(
        self, weights: Weights, name: str, config: PretrainedConfig, normalize: bool | None = None
    ):
        super().__init__()
        self.experts = experts(weights, name, config, normalize)
        self.shared = MLP(
            weights, f"{name}.shared_expert", config, config.shared_expert_intermediate_size
        )
        self.gate = weights.linear([f"{name}.shared_expert_gate"], [1], config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.gate(x).sigmoid() * self.shared(x)


def experts(
    weights: Weights, name: str, config: PretrainedConfig, normalize: bool | None = None
) -> MoE:
    return MoE(
        weights,
        name,
        config,
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        bool(config.norm_topk_prob) if normalize is None else normalize,
    )


class Sparse(Decoder):
    """Experts in some layers."""

    moe: ClassVar[Callable[..., nn.Module]] = SharedMoE

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        if index not in c.mlp_only_layers and (index + 1) % c.decoder_sparse_step == 0:
            return self.moe(weights, name, c)
        return super().mlp(weights, name, index)


class Qwen2Moe(Sparse, Mistral):
    biases = Biases("qkv_bias")


class Qwen3Moe(Sparse, Qwen3):
    moe = staticmethod(experts)
