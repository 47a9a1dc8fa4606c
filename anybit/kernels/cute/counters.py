"""Counters of CTAs that share a tile: zeros, which every launch leaves as zeros.

Launches that may run at the same time must not share them. Those of a stream run one after the
other, and so do those that a CUDA graph captured from one stream; but two graphs may be replayed at
once. So each stream has counters of its own, and in each capture others.

The memory is the driver's, not torch's: a tensor that is made during a capture lies in the graph's
pool, where other graphs write, and is filled when the graph is replayed only. A graph owns what
tells us when it is gone (a user object of the driver, which stays until no replay runs any more);
then a later capture gets its counters. A graph that is instantiated twice must not be replayed by
both at once.
"""

import ctypes
import threading
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from anybit.kernels.cute.driver import call

LEAST = 4096  # words: eight warps of 512 CTAs
SLAB = 64 * LEAST
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NOT_WAITED_FOR = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
MOVED = 1  # CU_GRAPH_USER_OBJECT_MOVE
SEMAPHORE = 64  # bytes, at least those of sem_t

Key = tuple[int, int, int]  # device, stream, capture; 0 for no capture


class Lent(NamedTuple):
    """Counters of a graph. gone: the semaphore that is raised when the graph has been destroyed."""

    key: Key
    address: int
    words: int
    gone: int


_lock = threading.Lock()
_kept: dict[Key, tuple[int, int]] = {}  # address, words
_slabs: dict[int, tuple[int, int]] = {}  # device -> where the rest of its slab begins, its words
_lent: list[Lent] = []
_returned: dict[int, list[tuple[int, int]]] = {}  # device -> (address, words)


def zeros(words: int, device: torch.device) -> int:
    """The address of 32-bit counters for one launch on the current stream of the device."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    capture, graph = capture_of(stream) if torch.cuda.is_current_stream_capturing() else (0, 0)
    key = device.index, stream, capture
    address, room = _kept.get(key, (0, 0))
    if room < words:
        with _lock:
            address, room = piece(max(words, LEAST), device)
            if capture:
                _lent.append(Lent(key, address, room, destroyed(graph)))
            _kept[key] = address, room
    return address


def piece(words: int, device: torch.device) -> tuple[int, int]:
    """The address of words of a device that nothing else has, and how many they are."""
    take_back()
    returned = _returned.get(device.index, [])
    for i, (_, room) in enumerate(returned):
        if room >= words:
            return returned.pop(i)
    address, rest = _slabs.get(device.index, (0, 0))
    if rest < words:
        rest = max(words, SLAB)
        with torch.cuda.device(device):
            address = fresh(rest)
    _slabs[device.index] = address + 4 * words, rest - words
    return address, words


def take_back() -> None:
    """Note which graphs are gone."""
    for lent in list(_lent):
        if libc().sem_trywait(c_void_p(lent.gone)) == 0:
            _lent.remove(lent)
            libc().free(c_void_p(lent.gone))
            _kept.pop(lent.key, None)
            _returned.setdefault(lent.key[0], []).append((lent.address, lent.words))


def capture_of(stream: int) -> tuple[int, int]:
    """The number of the capture that a stream is part of, which no other has; its graph."""
    status, number, graph = c_int(), c_uint64(), c_uint64()
    call(
        "cuStreamGetCaptureInfo_v2",
        c_void_p(stream),
        ctypes.byref(status),
        ctypes.byref(number),
        ctypes.byref(graph),
        None,
        None,
    )
    return number.value, graph.value


def destroyed(graph: int) -> int:
    """The address of a semaphore that the driver raises when a graph has been destroyed.

    The driver does so in a thread of its own, perhaps after the interpreter's end: so what it calls
    is a function in C, and the memory is that of C.
    """
    gone, owner = libc().calloc(1, SEMAPHORE), c_void_p()
    libc().sem_init(c_void_p(gone), 0, 0)
    post = ctypes.cast(libc().sem_post, c_void_p)
    call("cuUserObjectCreate", ctypes.byref(owner), c_void_p(gone), post, 1, NOT_WAITED_FOR)
    call("cuGraphRetainUserObject", c_void_p(graph), owner, 1, MOVED)
    return int(gone)


@cache
def libc() -> Any:
    """The C library."""
    library = ctypes.CDLL(None)
    library.calloc.restype = c_void_p
    return library


def fresh(words: int) -> int:
    """The address of words that are zeros now, even while graphs are captured.

    On a stream of its own, which no capture contains, and in the mode in which a thread may take
    memory during captures (torch's allocator does so, too).
    """
    memory, stream, mode = c_uint64(), c_void_p(), c_int(RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        call("cuMemAlloc_v2", ctypes.byref(memory), c_size_t(4 * words))
        call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        call("cuMemsetD32Async", memory, 0, c_size_t(words), stream)
        call("cuStreamSynchronize", stream)
        call("cuStreamDestroy_v2", stream)
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return memory.value
