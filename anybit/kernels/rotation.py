"""Rotating activations: blockwise Hadamard transforms, for layers with rotated weights."""

from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.rotation import turned
from anybit.kernels.backend import HALVES, has_triton
from anybit.kernels.reference import quantized_activation


def rotate(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    """H (vector * x), or vector * (H x), of every token; see `core/rotation.py`.

    Args:
        x: (..., K) of any float dtype; the arithmetic is fp32.
        vector: K numbers.
        after: Whether the vector multiplies after H, as that of a layer's outputs does.

    Returns:
        (..., K) in x's dtype.
    """
    tokens = x.reshape(-1, x.shape[-1])
    kernels = family(tokens)
    if kernels is not None and vector.is_contiguous():
        return cast(Tensor, kernels.rotate(tokens, vector, after)).view(x.shape)
    v = vector.flatten().float()
    return (turned(x.float()) * v if after else turned(x.float() * v)).to(x.dtype)


def family(x: Tensor) -> Any:
    """The module whose kernels rotate x; None where torch does."""
    if x.is_cuda and has_triton() and x.dtype in (*HALVES, torch.float32):
        return import_module("anybit.kernels.triton.activation")
    if x.device.type == "cpu":
        from anybit.kernels.native import fused

        if fused.able() and fused.suits(x):
            return import_module("anybit.kernels.native.rotation")
    return None


def seen_by(packed: Packed, x: Tensor, activation: str | None) -> Tensor:
    """Activations fp32, quantized: with them, the decoded weight's product is the layer's."""
    if activation is None or not packed.format.rotate:
        return quantized_activation(x, activation)
    vector = packed.grid["rotate_in"]
    return turned(quantized_activation(rotate(x, vector, False), activation)) / vector.float()
