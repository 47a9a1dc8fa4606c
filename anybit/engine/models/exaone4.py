"""EXAONE 4: norms after attention and MLP, and positions in the windows alone if there are any."""

import torch

from anybit.engine.models.llama import AROUND, Mistral
from anybit.engine.models.rope import NoRope, Rope


class Exaone4(Mistral):
    norms = AROUND
    attention_options = {"qk_norm": True}

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        c = self.config
        rope, none = Rope(c, length, device), NoRope(c, length, device)
        every = c.sliding_window is None
        return [rope if every or kind == "sliding_attention" else none for kind in c.layer_types]
