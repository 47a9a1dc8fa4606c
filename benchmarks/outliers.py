"""A model with outlier channels that computes what another one does, bit for bit.

    python benchmarks/outliers.py models/pico build/pico-outliers

Large models have channels of activations that are 20 to 100 times as large as the others; pico has
none. Here one channel in 64 of every layer's input becomes 32 times as large, and the weights that
read it 32 times smaller: the gains of both norms, rows of the value projection and of the up
projection. Powers of two round nothing.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EVERY, FACTOR = 64, 32.0


def add_outliers(model: Any) -> None:
    """Scale channels of a Llama in place."""
    random = torch.Generator().manual_seed(0)

    def channels(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=random)[: size // EVERY]

    config = model.config
    dim = config.head_dim
    repeats = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            at = channels(config.hidden_size)
            norm.weight[at] *= FACTOR
            for reader in readers:
                reader.weight[:, at] /= FACTOR
        at = channels(config.intermediate_size)
        mlp.up_proj.weight[at] *= FACTOR
        mlp.down_proj.weight[:, at] /= FACTOR
        at = channels(config.num_key_value_heads * dim)
        attention.v_proj.weight[at] *= FACTOR
        heads = at // dim * repeats * dim + at % dim
        for repeat in range(repeats):  # query heads that share a value head
            attention.o_proj.weight[:, heads + repeat * dim] /= FACTOR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Llama")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    ids = torch.arange(1, 65)[None]
    with torch.no_grad():
        before = model(ids).logits
        add_outliers(model)
        difference = float((model(ids).logits - before).abs().max())
    print(f"largest difference of logits: {difference:g}")
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
