"""OLMo 2 and 3: norms after attention and MLP instead of before, and of Q and K as a whole."""

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, NormKind, Norms, window_of
from anybit.engine.weights import Weights

NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class Olmo2(Decoder):
    norms = NORMS
    norm_kind = NormKind(wide=True)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        bias = bool(c.attention_bias)
        return Attention(
            weights,
            name,
            c,
            bias,
            output_bias=bias,
            qk_norm="whole",
            window=window_of(c, index),
            norm=self.norm_kind,
        )
