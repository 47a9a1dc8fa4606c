"""A custom format: 16 levels at quantiles of a normal distribution, similar to NF4."""

import torch

import anybit
from anybit.core.format import Format, register
from anybit.core.groups import store_scale
from anybit.evaluate.model import complete, load_text_model

LEVELS = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))  # the 16 values
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


@register("normal")
class Normal(Format):
    bits = 4

    def fit(self, w):
        return {"scale": store_scale(w.abs().amax(-1, keepdim=True) / LEVELS[-1])}

    def encode(self, w, grid):
        return torch.bucketize(w / grid["scale"].float(), MIDDLES.to(w.device)).to(torch.uint8)

    def values(self, codes, grid):
        return LEVELS.to(codes.device)[codes.int()]


model, tokenizer = load_text_model("models/pico")
print(complete(anybit.quantize_(model, "normal"), tokenizer, "class Stack:", max_tokens=48))
