"""The backend for H100 and H200 (sm_90a): kernels in CuTe DSL, in two families.

`scalar_linear.py` multiplies formats whose codes are numbers, `codebook_linear.py` those whose
codes are rows of a table. A kernel comes from the cache (see `jit.py`), else it is compiled into
it where the DSL is installed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.cute import cells
from anybit.kernels.cute.backend import CuteBackend
from anybit.kernels.cute.jit import KernelSpec
from anybit.kernels.cute.operands import NAMES
from anybit.kernels.cute.products import Launch
from anybit.kernels.hopper import codebook_linear, scalar_linear


class HopperBackend(CuteBackend):
    def refuse_here(self, layer: LayerSpec) -> str | None:
        books = cells.takes(layer.format)
        if books and (reason := codebook_linear.refuse_shape(layer)):
            return reason
        if torch.cuda.get_device_capability(layer.device) != (9, 0):
            return f"needs an H100 or H200 (sm_90a), not {torch.cuda.get_device_name(layer.device)}"
        return (codebook_linear if books else scalar_linear).refuse_kernels(layer)

    def kernels_of(self, layer: LayerSpec, experts: bool) -> list[KernelSpec]:
        others = {name for dtype, name in NAMES.items() if dtype != layer.dtype}
        family = codebook_linear if cells.takes(layer.format) else scalar_linear
        every = [*family.kernels_of(layer)]
        if layer.activation == "int8" and not experts:
            every += scalar_linear.quantizing_kernels(layer)
        return [
            kernel
            for kernel in every
            if getattr(kernel, "grouped", experts) == experts
            and getattr(kernel, "output", None) not in others
        ]

    def quantizing(self, x: Tensor | Activations, prepared: Prepared) -> Launch | None:
        """For one token in int8, which a launch of its own would take longer to quantize."""
        if prepared.activation != "int8" or isinstance(x, Activations) or len(x) != 1:
            return None
        return scalar_linear.quantizing(prepared.format, *prepared.shape, x.dtype, x.device)

    def candidates(self, x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
        family = codebook_linear if cells.takes(prepared.format) else scalar_linear
        return family.candidates(x, prepared)

    def takes_experts(self, layer: LayerSpec) -> bool:
        return not cells.takes(layer.format)


BACKEND = HopperBackend("hopper", scalar_linear, codebook_linear)
