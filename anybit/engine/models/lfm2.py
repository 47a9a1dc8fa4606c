"""LFM2: short convolutions, and attention in some layers; also with a mixture of experts."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.experts import picked
from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import Decoder, Norms
from anybit.engine.models.parts import MLP, Mixer, MoE
from anybit.engine.models.recurrent import ShortConv
from anybit.engine.weights import Weights


class BiasedMoE(MoE):
    """Experts by their sigmoid scores, with biases that count for the choice alone."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        c = config
        super().__init__(
            weights,
            name,
            c,
            c.num_experts,
            c.num_experts_per_tok,
            c.moe_intermediate_size,
            normalize=bool(c.norm_topk_prob),
        )
        self.factor, self.correction = c.routed_scaling_factor, None
        if c.use_expert_bias:
            shape = (c.num_experts,)
            self.correction = weights.tensor(f"{name}.expert_bias", shape, torch.float32)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).float().sigmoid()
        by = scores if self.correction is None else scores + self.correction
        weight, chosen = picked(scores, by, self.top_k, self.normalize, 1e-6)
        return weight * self.factor, chosen


class Lfm2(Decoder):
    mlp_name = "feed_forward"
    norm_name = "embedding_norm"
    norms = Norms("operator_norm", None, "ffn_norm", None)
    attention_options = {
        "qk_norm": True,
        "output": "out_proj",
        "norm_names": ("q_layernorm", "k_layernorm"),
    }
    mlp_names = ("w1", "w3", "w2")

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        kind = self.config.layer_types[index]
        if kind == "conv":
            return ShortConv(weights, f"{name}.conv", self.config)
        if kind != "full_attention":
            raise UnknownModel(f"layer type {kind!r} is unknown")
        return super().mixer(weights, name, index)

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        size = c.intermediate_size
        if c.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if c.block_ffn_dim_multiplier is not None:
                size = int(c.block_ffn_dim_multiplier * size)
                size = -(-size // c.block_multiple_of) * c.block_multiple_of
        return MLP(weights, name, c, size, self.mlp_names)


class Lfm2Moe(Lfm2):
    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        if index >= c.num_dense_layers:
            return BiasedMoE(weights, name, c)
        return MLP(weights, name, c, c.intermediate_size, self.mlp_names)
