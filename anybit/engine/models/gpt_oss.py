"""GPT-OSS: attention with sinks, windows in every other layer, experts with biases."""

from torch import Tensor
from transformers import PretrainedConfig

from anybit.engine.models.layers import ATTENTION_BIAS
from anybit.engine.models.llama import Mistral
from anybit.engine.models.parts import MoE, NormKind
from anybit.engine.weights import Weights
from anybit.kernels.between import Routing, outside


class ClampedMoE(MoE):
    """Experts whose gate and up outputs alternate, are clamped, and meet as (up + 1) * swish."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        c = config
        super().__init__(
            weights,
            name,
            c,
            c.num_local_experts,
            c.num_experts_per_tok,
            c.intermediate_size,
            normalize=True,
            names=("gate_up_proj", "down_proj"),
            router="router",
            bias=True,
        )
        # Constants before transformers 5.23.
        self.alpha, self.limit = getattr(c, "swiglu_alpha", 1.702), getattr(c, "swiglu_limit", 7.0)

    def between(self, x: Tensor, routing: Routing) -> Tensor:
        assert self.biases is not None
        return outside(x).clamped(x, routing.owners, self.biases[0], self.alpha, self.limit)


class GptOss(Mistral):
    norm_kind = NormKind(wide=True)
    biases = ATTENTION_BIAS
    attention_options = {"sinks": True}

    def mlp(self, weights: Weights, name: str, index: int) -> MoE:
        return ClampedMoE(weights, name, self.config)
