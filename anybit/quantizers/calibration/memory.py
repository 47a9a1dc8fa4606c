"""Memory during calibration: blocks visit the GPU in turn, freed memory goes back after each."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from anybit.nn.linear import QuantLinear


@contextmanager
def on_device(block: nn.Module, device: torch.device) -> Iterator[None]:
    """The block is on `device` inside, and its quantized layers know the dtype of their input.

    Parameters that it has lost by then are those of dense layers, which `restored_on_error` keeps;
    they are back where they were, and take no memory of `device`.
    """
    home = next(block.parameters()).device
    before = [] if device == home else [(p, p.data) for p in block.parameters()]
    block.to(device)
    try:
        yield
    finally:
        forget_dtypes(block.modules())
        block.to(home)
        kept = set(block.parameters())
        for p, data in before:
            if p not in kept:
                p.data = data


def forget_dtypes(modules: Iterable[nn.Module]) -> None:
    """Quantized layers choose a kernel anew when they are called, since the model may be cast."""
    for module in modules:
        if isinstance(module, QuantLinear):
            module.dtype, module.keep = None, "auto"
            module.forget()


def trim_memory() -> None:
    """Give freed allocations back to the system that glibc keeps: those of up to 32 MB."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
