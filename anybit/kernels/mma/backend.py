"""The backend for NVIDIA GPUs from Ampere on that have no kernels of their own: CuTe DSL, mma.sync.

It takes formats whose codes are numbers, or rows of a codebook, in Hopper's layouts. Its kernels
were measured on few GPUs, so each must pass a self-test on the GPU at hand before it is used
(`selftest.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.backend import (
    Activations,
    LayerSpec,
    Needs,
    Prepared,
    check_half,
    refuse_dtype,
    refuse_vendor,
)
from anybit.kernels.cute import cells, operands
from anybit.kernels.cute.jit import missing_kernels
from anybit.kernels.cute.launch import loaded
from anybit.kernels.mma import codebook_linear as codebooks
from anybit.kernels.mma import linear as products
from anybit.kernels.mma import selftest
from anybit.kernels.mma.tiles import gpu_of

OLDEST = (8, 0)  # the first architecture with bf16 tensor cores and cp.async
OLDEST_FP8 = (8, 9)
joins = True  # see `Backend.linear`


def refuse(layer: LayerSpec) -> str | None:
    books = cells.takes(layer.format)
    refuse_format = cells.refuse if books else operands.refuse_format
    if reason := refuse_vendor() or refuse_dtype(layer.dtype) or refuse_format(layer):
        return reason
    if books and (reason := cells.refuse_dense()):
        return reason
    for dtype in () if books else operands.NAMES if layer.dtype is None else [layer.dtype]:
        operand = getattr(torch, operands.operand_of(layer.activation, dtype))
        if operands.decoder_for(layer.format, operand).sums:
            return "scales of groups cannot be multiplied into fp8 weights, nor into sums here"
    gpu, name = gpu_of(layer.device), torch.cuda.get_device_name(layer.device)
    if gpu.capability[0] == 9:
        return "on an H100 or H200, `hopper` has kernels of its own"
    if gpu.capability < OLDEST or gpu.architecture is None:
        return f"needs a GPU of sm_80 or later that CuTe DSL compiles for, not {name}"
    if layer.activation == "fp8" and gpu.capability < OLDEST_FP8:
        return f"fp8 products need a GPU of sm_89 or later, not {name}"
    dtypes = [torch.float16, torch.bfloat16] if layer.dtype is None else [layer.dtype]
    kernels = [k for dtype in dtypes for k in selftest.kernels_of(layer, dtype, gpu)]
    if not kernels:
        return f"its tiles do not fit into the shared memory of {name}: {gpu.shared} bytes"
    if reason := missing_kernels(kernels):
        return reason
    return selftest.refuse(layer, kernels)


def decodes(activation: str | None) -> bool:
    return False


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """See `operands.prepare` and `cells.prepare`."""
    make = cells.prepare if cells.takes(packed.format) else operands.prepare
    return make(packed, activation, dtype)


def needs(layer: LayerSpec, most: int, experts: bool = False) -> Needs:
    """See `backend.Compiled`."""
    assert layer.dtype is not None
    kernels = selftest.kernels_of(layer, layer.dtype, gpu_of(layer.device), experts)
    return Needs([partial(loaded, kernel, layer.device.index) for kernel in kernels])


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `backend.Tunable`; each codebook has one kernel."""
    return {} if cells.takes(prepared.format) else products.candidates(x, prepared)


def takes_experts(layer: LayerSpec) -> bool:
    """Not where their kernels do not fit, or fail their own self-test."""
    if layer.dtype not in operands.NAMES or operands.refuse_format(layer):  # codebooks as well
        return False
    kernels = selftest.kernels_of(layer, layer.dtype, gpu_of(layer.device), experts=True)
    missing = missing_kernels(kernels)
    if not kernels or missing:
        return False
    return not selftest.refuse(layer, kernels, experts=True)


def prepare_experts(
    experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
) -> Prepared:
    """See `operands.prepare_experts`."""
    return operands.prepare_experts(experts, activation, dtype)


def linear_experts(x: Tensor, starts: Tensor, prepared: Prepared) -> Tensor:
    """x (M, K) in fp16 or bf16, sorted by expert -> (M, N)."""
    check_half(x, "mma")
    return products.linear_experts(x, starts, prepared)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N)."""
    check_half(x, "mma")
    family = codebooks if cells.takes(prepared.format) else products
    return family.linear(x, prepared, bias)
