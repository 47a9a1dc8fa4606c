"""A decoded copy of the weight and torch's own product: for every format and every device.

The reference decodes a weight in each call; here it is decoded once, into the dtype of the
activations, and takes their memory. Its values times their scale are rounded to that dtype, where
the reference scales in fp32.
"""

import os
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.errors import InvalidType
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.reference import quantized_activation

SHARE = 0.5  # of the memory that is free without decoded copies
UNKNOWN = 2 << 30  # bytes that are taken to be free where nothing tells
MEMINFO = Path("/proc/meminfo")

_held: Counter[torch.device] = Counter()  # bytes of the decoded copies that are alive


def refuse(layer: LayerSpec) -> str | None:
    if layer.decoded:
        return None
    return "holds a decoded copy of the weight, which keep='packed' or the free memory forbids"


def decodes(activation: str | None) -> bool:
    return True


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """The layout is the weight (N, K) in the dtype of the activations."""
    weight = held(packed.dequantize().to(dtype or torch.get_default_dtype()))
    return Prepared(packed.format, packed.shape, activation, (weight,), weight.dtype)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N)."""
    (weight,) = prepared.layout
    if prepared.activation is None and x.dtype != weight.dtype:
        raise InvalidType(f"x is {x.dtype}, and the weight was decoded to {weight.dtype}")
    seen = x if isinstance(x, Tensor) else None
    if seen is None or prepared.activation is not None:
        seen = quantized_activation(x, prepared.activation).to(weight.dtype)
    y = torch.nn.functional.linear(seen, weight, None if bias is None else bias.to(weight.dtype))
    return y.to(x.dtype)


def held(weight: Tensor) -> Tensor:
    """Count a decoded copy as long as it lives."""
    _held[weight.device] += weight.nbytes
    weakref.finalize(weight, _held.subtract, {weight.device: weight.nbytes})
    return weight


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether one more decoded copy leaves half of the memory free that would be without any."""
    free = free_bytes(device)
    free = UNKNOWN if free is None else free
    return _held[device] + nbytes <= SHARE * (free + _held[device])


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device now; None where it cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
