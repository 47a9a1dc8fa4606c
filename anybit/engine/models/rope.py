"""Rotary embeddings."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anybit.engine.models import UnknownModel


class Rope(nn.Module):
    """Cosines and sines (length, head_dim / 2) fp32 of every position.

    Channel i of a head is rotated with channel i + head_dim / 2. `order` brings a head's channels
    into that order where a model pairs others; None: they are in it.

    Args:
        config: Its `rope_parameters` say what the frequencies are.
        length: Positions.
        layer_type: Whose parameters to take, where layers have different ones.
        partial: Rotate only the part of the channels that `rope_parameters` name.
        interleaved: The model pairs channels 2 i and 2 i + 1.
    """

    cos: Tensor
    sin: Tensor
    order: Tensor | None

    def __init__(
        self,
        config: PretrainedConfig,
        length: int,
        device: torch.device,
        layer_type: str | None = None,
        partial: bool = False,
        interleaved: bool = False,
    ):
        super().__init__()
        dim = head_dim(config)
        parameters = config.rope_parameters
        parameters = parameters[layer_type] if layer_type else parameters
        kind = parameters["rope_type"]
        check_length(config, length)
        if kind == "default":
            rotary = int(dim * parameters.get("partial_rotary_factor", 1.0)) if partial else dim
            frequency = parameters["rope_theta"] ** -(torch.arange(0, rotary, 2).float() / rotary)
            factor = 1.0
        elif kind in ROPE_INIT_FUNCTIONS:
            options = {"layer_type": layer_type} if layer_type else {}
            frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, **options)
        else:
            raise UnknownModel(f"rope type {kind!r} is unknown")
        angle = torch.arange(length).float()[:, None] * frequency.float()
        self._set(angle.cos() * factor, angle.sin() * factor, dim, interleaved, device)

    def _set(
        self, cos: Tensor, sin: Tensor, dim: int, interleaved: bool, device: torch.device
    ) -> None:
        """Take the tables of the pairs that are rotated; the rest of `dim` channels stays."""
        length, pairs = cos.shape
        if dim % 2:
            raise UnknownModel(f"heads of {dim} channels, an odd number, are not rotated in pairs")
        rest = dim // 2 - pairs
        cos = torch.cat([cos, cos.new_ones(length, rest)], 1)
        sin = torch.cat([sin, sin.new_zeros(length, rest)], 1)
        self.register_buffer("cos", cos.to(device))
        self.register_buffer("sin", sin.to(device))
        rotated = torch.arange(2 * pairs)
        rotated = rotated.view(pairs, 2).T if interleaved else rotated.view(2, pairs)
        still = torch.arange(2 * pairs, dim).view(2, rest)
        order = torch.cat([rotated, still], 1).flatten()
        plain = torch.equal(order, torch.arange(dim))
        self.register_buffer("order", None if plain else order.to(device))


class NoRope(Rope):
    """Tables that rotate nothing, for layers without positions."""

    def __init__(self, config: PretrainedConfig, length: int, device: torch.device):
        nn.Module.__init__(self)
        none = torch.empty(length, 0)
        self._set(none, none, head_dim(config), False, device)


def check_length(config: PretrainedConfig, length: int) -> None:
    """UnknownModel when the frequencies of any layer change before a sequence has this length."""
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type")
        known = parameters.get("original_max_position_embeddings") or 0
        known = known or getattr(config, "original_max_position_embeddings", None) or 0
        if kind == "dynamic" or (kind == "longrope" and length > known):
            raise UnknownModel(
                f"rope type {kind!r} changes with a sequence's length, as no KV cache can"
                + (f" beyond length={known}" if kind == "longrope" else "")
            )


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """What config.json says of rotary embeddings: once, and for layers that differ again."""
    given = getattr(config, "rope_parameters", None) or {}
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
