"""OLMo 2 and 3: norms after attention and MLP instead of before, and of Q and K as a whole."""

from anybit.engine.models.layers import MLP, Attention, Block, Decoder, NormKind, Norms, window_of
from anybit.engine.weights import Weights

NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class Olmo2(Decoder):
    norm_kind = NormKind(wide=True)

    def block(self, weights: Weights, name: str, index: int) -> Block:
        c = self.config
        bias = bool(c.attention_bias)
        attention = Attention(
            weights, f"{name}.self_attn", c, bias, output_bias=bias, qk_norm="whole",
            window=window_of(c, index), norm=self.norm_kind,
        )  # fmt: skip
        mlp = MLP(weights, f"{name}.mlp", c, c.intermediate_size)
        return Block(weights, name, c, attention, mlp, NORMS, self.norm_kind)
