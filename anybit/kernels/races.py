"""Random choices: each token arrives after a random time, and the first one wins."""

import torch
from torch import Tensor

# Odd numbers as signed integers of 32 bits: 2^32 over the golden ratio; MurmurHash3's finalizer.
GOLDEN = 0x9E3779B9 - (1 << 32)
FACTORS = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
MURMUR = (16, FACTORS[0]), (13, FACTORS[1]), (16, 0)


def race(weights: Tensor, keys: Tensor, order: Tensor | None = None) -> Tensor:
    """Draw a column (B,) by weights (B, V) and what is random about each draw, keys (B, 2) int32.

    order (B, V): the tokens that columns stand for, if they are not their numbers.

    Each token arrives after an exponential time at the rate of its weight, and the first one wins,
    which each does with its share of the weights. Two models that are given the same key choose the
    same token nearly as often as any two draws by their probabilities can, so a draft is drawn with
    the key of the token that it stands for, and taken if it is that token (Daliri et al., Coupling
    without communication and drafter-invariant speculative decoding, 2024).
    """
    if order is None:
        order = torch.arange(weights.shape[1], device=keys.device)
    return (weights / waits(keys, order.int())).argmax(-1)


def waits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponential random numbers (B, V), by keys (B, 2) int32 and tokens (V,) or (B, V)."""
    bits = tokens * GOLDEN
    for key in (keys[:, :1], keys[:, 1:]):
        bits = bits ^ key
        for shift, factor in MURMUR:
            bits = bits ^ (bits >> shift & (1 << 32 - shift) - 1)  # a shift that lets zeros in
            bits = bits * factor if factor else bits
    # Small numbers, which win, are exact to 2^-32; none is infinite.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2**-31
    return -torch.log1p(-uniform.clamp_max(1 - 2**-24))
