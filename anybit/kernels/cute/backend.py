"""What the backends of kernels in CuTe DSL share: layouts, and activations as kernels take them."""

from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.backend import (
    Activations,
    Backend,
    LayerSpec,
    Needs,
    Prepared,
    check_half,
    refuse_dtype,
    refuse_vendor,
)
from anybit.kernels.cute import cells, operands
from anybit.kernels.cute.jit import KernelSpec
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.products import Launch, multiply, on_its_device


class CuteBackend(Backend):
    """A backend of two families of kernels, of which one layout each serves every GPU.

    Args:
        name: Its own.
        scalar: The module that multiplies formats whose codes are numbers.
        codebook: The one for those whose codes are rows of a table.
    """

    joins = True

    def __init__(self, name: str, scalar: ModuleType, codebook: ModuleType):
        self.name, self.scalar, self.codebook = name, scalar, codebook

    def refuse(self, layer: LayerSpec) -> str | None:
        books = cells.takes(layer.format)
        refuse_format = cells.refuse if books else operands.refuse_format
        if reason := refuse_vendor() or refuse_dtype(layer.dtype) or refuse_format(layer):
            return reason
        return self.refuse_here(layer)

    def refuse_here(self, layer: LayerSpec) -> str | None:
        """Why it does not multiply a layer that has a layout."""
        raise NotImplementedError

    def kernels_of(self, layer: LayerSpec, experts: bool) -> Iterable[KernelSpec]:
        """All that may multiply a layer that it takes, with a dtype."""
        raise NotImplementedError

    def needs(self, layer: LayerSpec, most: int, experts: bool = False) -> Needs:
        device = layer.device.index
        return Needs([partial(loaded, k, device) for k in self.kernels_of(layer, experts)])

    def prepare(
        self,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None = None,
        decoded: bool = False,
    ) -> Prepared:
        make = cells.prepare if cells.takes(packed.format) else operands.prepare
        return make(packed, activation, dtype)

    def prepare_experts(
        self, experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
    ) -> Prepared:
        return operands.prepare_experts(experts, activation, dtype)

    def linear(self, x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """x (M, K) in fp16 or bf16 -> (M, N)."""
        check_half(x, self.name)
        y: Tensor
        if cells.takes(prepared.format):
            y = self.codebook.multiply(x, prepared, bias)
        elif launch := self.quantizing(x, prepared):
            assert isinstance(x, Tensor)
            layout, n = prepared.layout, prepared.shape[0]
            y = multiply(operands.aligned(x), None, None, layout, bias, n, x.dtype, [launch])
        else:
            pairs = x.paired if isinstance(x, Activations) else None
            given = operands.tokens(x, prepared)
            y = self.scalar.multiply(*given, prepared, bias, x.dtype, pairs=pairs)
        return y

    def quantizing(self, x: Tensor | Activations, prepared: Prepared) -> Launch | None:
        """The launch that multiplies tokens and quantizes them itself; None: there is none."""
        return None

    def linear_experts(self, x: Tensor | Activations, starts: Tensor, prepared: Prepared) -> Tensor:
        """x (M, K) in fp16 or bf16, sorted by expert -> (M, N)."""
        check_half(x, self.name)
        given = operands.tokens(x, prepared)
        launching = on_its_device(self.scalar.multiply)
        return launching(*given, prepared, None, x.dtype, starts=starts)
