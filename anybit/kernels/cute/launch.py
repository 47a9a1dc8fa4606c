"""What kernels are launched with: of every family, the names of its parameters in their order.

In the DSL a kernel gets them as one named tuple; the driver reads a struct of the same names. Those
before `m` are addresses, 0 for none, the others numbers.
"""

import ctypes
from collections import namedtuple
from ctypes import c_int32, c_uint64
from functools import cache
from typing import Any, ClassVar

import torch

from anybit.kernels import compilations
from anybit.kernels.cute.driver import CARVEOUT, Launcher
from anybit.kernels.cute.jit import KernelSpec, built

# Of the products of `kernels/mma`, of which not all read `work` and what follows it: tokens x and
# blobs w; scales and zero points of rows; a table that weights are looked up in; scales and sums of
# quantized tokens; a bias in the dtype of y; a workspace and counters where sums of CTAs meet;
# where the tokens of each expert start; how many times two rows of x have one of y, if any do
# (`backend.Pairs`).
ProductArguments = namedtuple(
    "ProductArguments",
    "x w row_scale row_zero table token_scale token_sum bias y work counters starts "
    "pairs m n k experts",
)

# Of weights in 16 bits as they come, with so many rows. n: outputs of a token, with padding.
PlainArguments = namedtuple("PlainArguments", "x w bias y m n k rows")

# Of Hopper's main loop, likewise; a table may be a codebook. stride: from a token's outputs to the
# next token's, of which these n may be some.
GemmArguments = namedtuple(
    "GemmArguments",
    "x w row_scale row_zero table token_scale token_sum bias y starts work counters pairs m n "
    "stride k experts",
)

# Of products of codebooks. cluster: CTAs of a cluster, 1 where there are none. splits: clusters
# that share K. early: whether weights are fetched before the previous kernel has ended.
CodebookArguments = namedtuple(
    "CodebookArguments", "x w book row_scale bias y work counters m n k cluster splits early"
)


def structure(parameters: Any) -> type[ctypes.Structure]:
    """The struct that the driver reads."""
    names: tuple[str, ...] = parameters._fields
    numbers = names[names.index("m") :]
    fields = [(name, c_int32 if name in numbers else c_uint64) for name in names]
    return type(parameters.__name__, (ctypes.Structure,), {"_fields_": fields})


class ProductLauncher(Launcher):
    arguments = structure(ProductArguments)
    settings: ClassVar[tuple[tuple[int, int], ...]] = ((CARVEOUT, 100),)


class PlainLauncher(ProductLauncher):
    arguments = structure(PlainArguments)


class CodebookLauncher(Launcher):
    arguments = structure(CodebookArguments)
    settings: ClassVar[tuple[tuple[int, int], ...]] = ((CARVEOUT, 100),)


@cache
def loaded(kernel: KernelSpec, device: int) -> Launcher:
    """A kernel on a device."""
    path = built(kernel)
    compilations.note(str(kernel))
    with torch.cuda.device(device):
        return kernel.launcher(path, device)
