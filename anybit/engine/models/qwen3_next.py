"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, gated attention in the others."""

import torch
from torch import nn
from transformers import PretrainedConfig

from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import ATTENTION_BIAS, Decoder, Further
from anybit.engine.models.parts import Mixer, NormKind
from anybit.engine.models.qwen_moe import SharedMoE, Sparse
from anybit.engine.models.recurrent import GatedDelta
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights


class Qwen3_5(Decoder):
    norm_kind = NormKind(wide=True, offset=1.0)
    biases = ATTENTION_BIAS
    attention_options = {"qk_norm": True, "gated": True}
    rope_options = {"partial": True}
    together = False  # whether projections of the delta rule are

    @classmethod
    def further(cls, config: PretrainedConfig) -> Further | None:
        full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
        return Further("mtp", "mtp.layers.0", *names, full[-1]) if full else None

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        for images in ("mrope_section", "mrope_interleaved"):  # all axes of text are one
            self.config.rope_parameters.get(images)
        return super().rope_of_layers(length, device)

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        c, kind = self.config, self.config.layer_types[index]
        if kind == "full_attention":
            return super().mixer(weights, name, index)
        if kind != "linear_attention":
            raise UnknownModel(f"layer type {kind!r} is unknown")
        return GatedDelta(weights, f"{name}.linear_attn", c, self.together)


class Qwen3Next(Sparse, Qwen3_5):
    together = True


class Qwen3_5Moe(Qwen3_5):
    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        return SharedMoE(weights, name, self.config, normalize=True)
