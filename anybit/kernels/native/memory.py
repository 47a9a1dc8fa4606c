"""Memory for weights, in pages of 2 MB where the system has them."""

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes from which large pages pay


def empty(*shape: int) -> Tensor:
    """A tensor of bytes.

    A product reads each weight once, and pages of 4 KB then cost a third of the time: the processor
    looks every page up, in two tables on a virtual machine.
    """
    out = torch.empty(*shape, dtype=torch.uint8)
    advise = _advise()
    if advise and out.numel() >= LARGE:
        page = mmap.PAGESIZE
        start = -(-out.data_ptr() // page) * page
        stop = (out.data_ptr() + out.numel()) // page * page
        advise(start, stop - start, mmap.MADV_HUGEPAGE)  # a wish, which may be refused
    return out


@cache
def _advise() -> Any:
    """`madvise` of the C library; None where there are no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
