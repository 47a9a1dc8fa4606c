"""Memory during calibration: blocks visit the GPU in turn, freed memory goes back at once."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from anybit.nn.linear import QuantLinear

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
MAPPED, LARGEST = 1 << 20, 32 << 20  # bytes; the second is the most that glibc sets by itself


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
            module.dtype = None
            module.forget()


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, freed allocations of 1 MB and more go back to the system at once.

    glibc keeps freed allocations of up to 32 MB, and the gaps that they leave are filled badly:
    GPTQ of blocks of hidden size 768 took 0.71 to 0.86 GB, more in later blocks, and 0.65 GB in
    each of them with this.
    """
    malloc_option(M_MMAP_THRESHOLD, MAPPED)
    try:
        yield
    finally:
        malloc_option(M_MMAP_THRESHOLD, LARGEST)


def malloc_option(option: int, value: int) -> None:
    """Set an option of glibc's allocator; without effect on other systems."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(option, value)


def trim_memory() -> None:
    """Give smaller freed allocations back to the system, too."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
