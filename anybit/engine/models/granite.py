"""Granite: Llama with multipliers for embeddings, residuals, attention and logits."""

from typing import Any

from torch import Tensor

from anybit.engine.models.llama import Llama


class Granite(Llama):
    @property
    def embedding_scale(self) -> float:
        return float(self.config.embedding_multiplier)

    @property
    def residual_multiplier(self) -> float:
        return float(self.config.residual_multiplier)

    @property
    def attention_options(self) -> dict[str, Any]:
        return {"scale": self.config.attention_multiplier}

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling
