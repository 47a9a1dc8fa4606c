"""What the kernels for `mma.sync` are launched with."""

import ctypes
from ctypes import c_int32, c_uint64
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from anybit.kernels.cute.driver import CARVEOUT, Launcher, address_of, call

POINTERS = (
    "x", "w", "row_scale", "row_zero", "token_scale", "token_sum", "bias", "y", "work", "counters",
    "starts",
)  # fmt: skip


OF_CODEBOOKS = "x", "w", "book", "row_scale", "bias", "y", "work", "counters"


class MmaArguments(ctypes.Structure):
    """The parameters of all but `codebook.py`; work and what follows it are `gemm.py`'s alone."""

    _fields_ = [
        *((name, c_uint64) for name in POINTERS),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("experts", c_int32),
    ]


class CodebookArguments(ctypes.Structure):
    """The parameters of `codebook.py`; splits: CTAs that share K."""

    _fields_ = [
        *((name, c_uint64) for name in OF_CODEBOOKS),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("splits", c_int32),
    ]


class MmaLauncher(Launcher):
    """A kernel with `MmaArguments`."""

    arguments: ClassVar[type[ctypes.Structure]] = MmaArguments
    pointers: ClassVar[tuple[str, ...]] = POINTERS
    last: ClassVar[str] = "experts"

    def __init__(self, path: Path, device: int):
        super().__init__(path, device)
        call("cuKernelSetAttribute", CARVEOUT, 100, self.kernel, device)

    def launch(
        self,
        x: Tensor,
        tensors: tuple[Tensor | int | None, ...],
        n: int,
        grid: int,
        overlap: bool,
        last: int = 0,
    ) -> None:
        """Launch on the current stream of x's device.

        tensors: those of `pointers` behind x, or their addresses; None for none. overlap: begin
        before the previous kernel of the stream has finished; the kernel must be made for that.
        last: the last parameter.
        """
        frame = self.frame()
        a = frame.arguments
        a.m, a.k = x.shape
        a.n = n
        setattr(a, self.last, last)
        for name, tensor in zip(self.pointers, (x, *tensors), strict=True):
            setattr(a, name, address_of(tensor))
        frame.start(grid, overlap, x.device.index)


class CodebookLauncher(MmaLauncher):
    """A kernel of `codebook.py`."""

    arguments = CodebookArguments
    pointers = OF_CODEBOOKS
    last = "splits"
