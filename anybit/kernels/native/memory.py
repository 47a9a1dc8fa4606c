"""Memory for weights, in pages of 2 MB where the system has them."""

import mmap
import threading
from contextlib import suppress
from math import prod
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes from which a copy into large pages pays
PAGE = 1 << 21
CHUNK = 1 << 25  # bytes that weights of less share
LINE = 64

_lock = threading.Lock()


class Room(NamedTuple):
    """Bytes `first` to `last` of memory that is given out."""

    memory: mmap.mmap | None = None
    first: int = 0
    last: int = 0


_left = Room()  # of the last chunk


def empty(*shape: int) -> Tensor:
    """A tensor of bytes that begins a cache line.

    A product reads each weight once, and pages of 4 KB then cost a third of the time: the processor
    looks every page up, in two tables on a virtual machine. Small weights lie side by side, for
    most of them hold no whole page, and each gives its memory back when it ends. Each is a tensor
    of its own: parts of one would be copied with all of it, and be written to as it may be.
    """
    global _left
    count = prod(shape)
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.uint8)
    with _lock:
        room = _left
        if room.last - room.first < count:
            room = _pages(max(count, CHUNK))
        rest = room._replace(first=room.first + -(-count // LINE) * LINE)
        if room is _left or count < CHUNK:
            _left = rest
    assert room.memory is not None
    own = memoryview(room.memory)[room.first : room.first + count]  # its storage holds this
    finalize(own, _give_back, room.memory, room.first, room.first + count).atexit = False
    return torch.frombuffer(own, dtype=torch.uint8).view(shape)


def placed(t: Tensor) -> Tensor:
    """A copy of a tensor there."""
    return empty(t.nbytes).view(t.dtype).view(t.shape).copy_(t)


def _give_back(memory: mmap.mmap, first: int, last: int) -> None:
    """Free bytes `first` to `last`, but for those that share a page of the system with others."""
    first += -first % mmap.PAGESIZE
    last -= last % mmap.PAGESIZE
    if first < last:
        with suppress(OSError):  # all of it is freed with the mapping
            memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pages(count: int) -> Room:
    """At least `count` bytes of whole pages, which take memory as they are written."""
    memory = mmap.mmap(-1, count + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a wish, which may be refused
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    return Room(memory, first, first + -(-count // PAGE) * PAGE)
