"""SmolLM3: Llama where every fourth layer or so knows no positions."""

import torch

from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import window_of
from anybit.engine.models.llama import Llama
from anybit.engine.models.rope import NoRope, Rope


class SmolLM3(Llama):
    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        c = self.config
        rope, none = Rope(c, length, device), NoRope(c, length, device)
        return [rope if used else none for used in c.no_rope_layers[: c.num_hidden_layers]]

    def window(self, index: int) -> int | None:
        window = window_of(self.config, index)
        if window and not self.config.use_sliding_window:
            raise UnknownModel("layers with windows, and use_sliding_window=False, are unknown")
        return window
