"""Many calls of kernels as one: threads start once, and wait for each other between calls."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from anybit.kernels.native import build
from anybit.kernels.native.ir import PTR, Function
from anybit.kernels.native.isa import Isa

NAMES = ("calls", "count", "barrier")


class Program:
    """Calls that are made again and again, with the same arguments.

    Args:
        calls: kernels and their arguments, in order. Memory that these point to must outlive this.
        isa: what the kernels were compiled for.
    """

    def __init__(self, calls: Sequence[tuple[build.Kernel, Sequence[int]]], isa: Isa):
        self.kernels = [kernel for kernel, _ in calls]  # own the code
        self.threads = torch.get_num_threads()  # which workspaces were made for
        numbers = [number for _, arguments in calls for number in arguments]
        self.fresh = (ctypes.c_int64 * len(numbers))(*numbers)
        self.blocks = (ctypes.c_int64 * len(numbers))()  # kernels count in their arguments
        pairs, at = [], ctypes.addressof(self.blocks)
        for kernel, arguments in calls:
            pairs += [kernel.address, at]
            at += 8 * len(arguments)
        self.pairs = (ctypes.c_int64 * len(pairs))(*pairs)
        barrier = ctypes.cast(build.openmp().GOMP_barrier, ctypes.c_void_p).value or 0
        self.block = (ctypes.c_int64 * len(NAMES))(
            ctypes.addressof(self.pairs), len(calls), barrier
        )
        self.all = all_kernel(isa)

    def run(self) -> None:
        """Make all calls."""
        ctypes.memmove(self.blocks, self.fresh, ctypes.sizeof(self.fresh))
        threads = min(torch.get_num_threads(), self.threads)
        if threads == 1:
            self.all.call(ctypes.addressof(self.block))
        else:
            build.parallel()(self.all.address, ctypes.addressof(self.block), threads, 0)


@cache
def all_kernel(isa: Isa) -> build.Kernel:
    f = Function("all", NAMES, isa)
    with f.loop(0, f.number("count")) as i:
        call = f.at("calls", i << 4)
        f.run(f.load(PTR, call), f.load(PTR, call, 8))
        f.run(f.pointer("barrier"))
    return build.kernel(f)
