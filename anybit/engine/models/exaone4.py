"""EXAONE 4: norms after attention and MLP, and positions in the windows alone if there are any."""

import torch

from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder, Mixer, window_of
from anybit.engine.models.olmo2 import NORMS
from anybit.engine.models.rope import NoRope, Rope
from anybit.engine.weights import Weights


class Exaone4(Decoder):
    norms = NORMS

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        c = self.config
        rope, none = Rope(c, length, device), NoRope(c, length, device)
        every = c.sliding_window is None
        return [rope if every or kind == "sliding_attention" else none for kind in c.layer_types]

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        return Attention(weights, name, c, qk_norm=True, window=window_of(c, index))
