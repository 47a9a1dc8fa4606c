"""Memory for weights, in pages of 2 MB where the system has them."""

import mmap
import threading
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes from which a copy into large pages pays
PAGE = 1 << 21
CHUNK = 1 << 25  # bytes that weights of less share
LINE = 64

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


def empty(*shape: int) -> Tensor:
    """A tensor of bytes that begins a cache line.

    A product reads each weight once, and pages of 4 KB then cost a third of the time: the processor
    looks every page up, in two tables on a virtual machine. Small weights lie side by side, for
    most of them hold no whole page; their memory is free once all of a chunk are.
    """
    global _chunk
    count = prod(shape)
    if count >= CHUNK:
        return _pages(count)[:count].view(shape)
    with _lock:
        if len(_chunk) < count:
            _chunk = _pages(CHUNK)
        out, _chunk = _chunk[:count], _chunk[-(-count // LINE) * LINE :]
    return out.view(shape)


def placed(t: Tensor) -> Tensor:
    """A copy of a tensor there."""
    return empty(t.nbytes).view(t.dtype).view(t.shape).copy_(t)


def _pages(count: int) -> Tensor:
    """At least `count` bytes of whole pages, which take memory as they are written."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8)
    room = mmap.mmap(-1, count + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a wish, which may be refused
        room.madvise(mmap.MADV_HUGEPAGE)
    out = torch.frombuffer(room, dtype=torch.uint8)
    return out[-out.data_ptr() % PAGE :][: -(-count // PAGE) * PAGE]
