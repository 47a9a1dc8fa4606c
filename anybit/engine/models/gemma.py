"""Gemma 1 to 3 (text). From 2 on: norms around attention and MLP, windows, soft caps."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.engine.models.layers import ATTENTION_BIAS, Decoder, Norms
from anybit.engine.models.parts import NormKind


@cache
def rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


class Gemma(Decoder):
    norm_kind = NormKind(wide=True, offset=1.0)
    biases = ATTENTION_BIAS

    @property
    def embedding_scale(self) -> float:
        # Rounded to the model's dtype, as the models were trained: 55.5 in bf16, not 55.43.
        return rounded(self.config.hidden_size**0.5, self.embed_tokens.dtype)


class Gemma2(Gemma):
    norms = Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    windows = True

    @property
    def attention_options(self) -> dict[str, Any]:
        c = self.config
        return {"scale": c.query_pre_attn_scalar**-0.5, "softcap": c.attn_logit_softcapping}

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else (logits / cap).tanh() * cap


class Gemma3(Gemma2):
    """Gemma 2 with norms of Q's and K's heads, other frequencies in the windows, no soft caps."""

    @property
    def attention_options(self) -> dict[str, Any]:
        return {"scale": self.config.query_pre_attn_scalar**-0.5, "qk_norm": True}
