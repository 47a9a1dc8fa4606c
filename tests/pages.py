"""Which pages of a tensor take memory: what others of the process take changes no answer."""

import ctypes
import mmap

import torch


def taken(address: int, nbytes: int) -> int:
    """Bytes of the pages there that take memory; none where nothing is mapped."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(address + nbytes - first) // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), resident):
        return 0
    return sum(page & 1 for page in resident) * mmap.PAGESIZE


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Its address and its bytes."""
    return tensor.data_ptr(), tensor.nbytes
