"""Counters of CTAs that share a tile: zeros, which every launch leaves as zeros.

Launches that may run at the same time must not share them. Those of a stream run one after the
other, and so do those that a CUDA graph captured from one stream; but two graphs may be replayed at
once. So each stream has counters of its own, and in each capture others.

The memory is the driver's, not torch's: a tensor that is made during a capture lies in the graph's
pool, where other graphs write, and is filled when the graph is replayed only. A graph does not say
when it is gone, so nothing is given back: 16 KB for each capture, of slabs of 1 MB. A graph that is
instantiated twice must not be replayed by both at once.
"""

import ctypes
from ctypes import c_int, c_size_t, c_uint64, c_void_p

import torch

from anybit.kernels.cute.driver import call

LEAST = 4096  # words: eight warps of 512 CTAs
SLAB = 64 * LEAST
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

# (device, stream, capture) -> (address, words); 0 for no capture.
_kept: dict[tuple[int, int, int], tuple[int, int]] = {}
_slabs: dict[int, tuple[int, int]] = {}  # device -> where the rest of its slab begins, its words


def zeros(words: int, device: torch.device) -> int:
    """The address of 32-bit counters for one launch on the current stream of the device."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    capture = capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = device.index, stream, capture
    address, room = _kept.get(key, (0, 0))
    if room < words:
        room = max(words, LEAST)
        address = piece(room, device)
        _kept[key] = address, room
    return address


def piece(words: int, device: torch.device) -> int:
    """The address of words of a device that nothing else has had."""
    address, rest = _slabs.get(device.index, (0, 0))
    if rest < words:
        rest = max(words, SLAB)
        with torch.cuda.device(device):
            address = fresh(rest)
    _slabs[device.index] = address + 4 * words, rest - words
    return address


def capture_of(stream: int) -> int:
    """The number of the capture that a stream is part of, which no other capture ever has."""
    status, number = c_int(), c_uint64()
    call(
        "cuStreamGetCaptureInfo_v2",
        c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None,
    )  # fmt: skip
    return number.value


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
