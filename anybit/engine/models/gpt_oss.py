"""GPT-OSS: attention with sinks, windows in every other layer, experts with biases."""

from torch import Tensor
from transformers import PretrainedConfig

from anybit.engine.models.layers import Attention, Decoder, Mixer, MoE, NormKind, window_of
from anybit.engine.weights import Weights
from anybit.nn.routing import Routing, kernels


class ClampedMoE(MoE):
    """Experts whose gate and up outputs alternate, are clamped, and meet as (up + 1) * swish."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        c = config
        super().__init__(
            weights, name, c, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size,
            normalize=True, names=("gate_up_proj", "down_proj"), router="router", bias=True,
        )  # fmt: skip
        # Constants before transformers 5.23.
        self.alpha, self.limit = getattr(c, "swiglu_alpha", 1.702), getattr(c, "swiglu_limit", 7.0)

    def between(self, x: Tensor, routing: Routing) -> Tensor:
        assert self.biases is not None
        if (fused := kernels(x)) is not None:
            made: Tensor = fused.clamped(x, routing.owners, self.biases[0], self.alpha, self.limit)
            return made
        x = x + self.biases[0][routing.owners.long()]
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())


class GptOss(Decoder):
    norm_kind = NormKind(wide=True)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        bias, window = bool(c.attention_bias), window_of(c, index)
        return Attention(weights, name, c, bias, output_bias=bias, window=window, sinks=True)

    def mlp(self, weights: Weights, name: str, index: int) -> MoE:
        return ClampedMoE(weights, name, self.config)
