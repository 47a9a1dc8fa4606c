"""What a chip of the Hopper family says of itself: launches and the cost model ask it."""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from anybit.kernels.cute.driver import call

# Of cuda.h: CU_DEVICE_ATTRIBUTE_CLOCK_RATE, ..._MULTIPROCESSOR_COUNT, ..._MEMORY_CLOCK_RATE,
# ..._GLOBAL_MEMORY_BUS_WIDTH.
CLOCK, MULTIPROCESSORS, MEMORY_CLOCK, BUS = 13, 16, 36, 37


@dataclass(frozen=True)
class Chip:
    """A GPU of sm_90, or a slice of one.

    No kernel is compiled for a chip: what differs is how it is launched, and which one is.

    Attributes:
        multiprocessors: How many.
        read: Bytes that its memory can bring in a clock cycle.
    """

    multiprocessors: int
    read: float


H200 = Chip(132, 2483)  # what the costs of the choice were timed on, at the clock that it names


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device of CUDA."""

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        call(
            "cuDeviceGetAttribute",
            ctypes.byref(value),
            which,
            torch.cuda.current_device() if device.index is None else device.index,
        )
        return value.value

    count, clock = attribute(MULTIPROCESSORS), attribute(CLOCK)  # clocks are in kHz
    read = 2 * attribute(MEMORY_CLOCK) * attribute(BUS) / 8 / max(clock, 1)  # two bits a clock
    if not clock or not read:  # virtual GPUs may not tell
        read = H200.read * count / H200.multiprocessors
    return Chip(count, read)
