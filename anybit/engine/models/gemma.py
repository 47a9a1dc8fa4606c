"""Gemma 1 to 3 (text). From 2 on: norms around attention and MLP, windows, soft caps."""

from functools import cache

import torch
from torch import Tensor

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, NormKind, Norms, window_of
from anybit.engine.weights import Weights


@cache
def rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


class Gemma(Decoder):
    norm_kind = NormKind(wide=True, offset=1.0)

    @property
    def embedding_scale(self) -> float:
        # Rounded to the model's dtype, as the models were trained: 55.5 in bf16, not 55.43.
        return rounded(self.config.hidden_size**0.5, self.embed_tokens.dtype)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        bias = bool(self.config.attention_bias)
        return Attention(weights, name, self.config, bias, output_bias=bias)


class Gemma2(Gemma):
    norms = Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    qk_norm = False

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        bias = bool(c.attention_bias)
        return Attention(
            weights,
            name,
            c,
            bias,
            output_bias=bias,
            qk_norm=self.qk_norm,
            window=window_of(c, index),
            scale=c.query_pre_attn_scalar**-0.5,
            softcap=self.softcap,
            norm=self.norm_kind,
        )

    @property
    def softcap(self) -> float | None:
        """Of attention scores."""
        return self.config.attn_logit_softcapping

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else (logits / cap).tanh() * cap


class Gemma3(Gemma2):
    """Gemma 2 with norms of Q's and K's heads, other frequencies in the windows, no soft caps."""

    qk_norm = True
    softcap = None
