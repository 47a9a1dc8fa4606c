"""The backend for NVIDIA GPUs from Ampere on that have no kernels of their own: CuTe DSL, mma.sync.

It takes formats whose codes are numbers, or rows of a codebook, in Hopper's layouts. Its kernels
were measured on few GPUs, so each must pass a self-test on the GPU at hand before it is used
(`selftest.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import cells, operands
from anybit.kernels.cute.backend import CuteBackend
from anybit.kernels.cute.jit import KernelSpec, missing_kernels
from anybit.kernels.mma import codebook_linear, linear, selftest
from anybit.kernels.mma.tiles import gpu_of

OLDEST = (8, 0)  # the first architecture with bf16 tensor cores and cp.async
OLDEST_FP8 = (8, 9)


class MmaBackend(CuteBackend):
    def refuse_here(self, layer: LayerSpec) -> str | None:
        books = cells.takes(layer.format)
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
        return missing_kernels(kernels) or selftest.refuse(layer, kernels)

    def kernels_of(self, layer: LayerSpec, experts: bool) -> list[KernelSpec]:
        assert layer.dtype is not None
        return [*selftest.kernels_of(layer, layer.dtype, gpu_of(layer.device), experts)]

    def candidates(self, x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
        """None of codebooks, which have one kernel each."""
        return {} if cells.takes(prepared.format) else linear.candidates(x, prepared)

    def takes_experts(self, layer: LayerSpec) -> bool:
        """Not where their kernels do not fit, or fail their own self-test."""
        if layer.dtype not in operands.NAMES or operands.refuse_format(layer):  # codebooks as well
            return False
        kernels = selftest.kernels_of(layer, layer.dtype, gpu_of(layer.device), experts=True)
        if not kernels or missing_kernels(kernels):
            return False
        return not selftest.refuse(layer, kernels, experts=True)


BACKEND = MmaBackend("mma", linear, codebook_linear)
