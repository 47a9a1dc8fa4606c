"""The backend for H100 and H200 (sm_90a): kernels in CuTe DSL, in two families.

`scalar_linear.py` multiplies formats whose codes are numbers, `codebook_linear.py` those whose
codes are rows of a table. A kernel comes from the cache (see `jit.py`), else it is compiled into
it where the DSL is installed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from anybit.core.format import Format
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
from anybit.kernels.cute import cells
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import NAMES
from anybit.kernels.hopper import codebook_linear, scalar_linear

joins = True  # see `Backend.linear`


def family(fmt: Format) -> ModuleType:
    """The kernels for a format."""
    return codebook_linear if cells.takes(fmt) else scalar_linear


def refuse(layer: LayerSpec) -> str | None:
    reason = refuse_vendor() or refuse_dtype(layer.dtype)
    if reason := reason or family(layer.format).refuse_format(layer):
        return reason
    if torch.cuda.get_device_capability(layer.device) != (9, 0):
        return f"needs an H100 or H200 (sm_90a), not {torch.cuda.get_device_name(layer.device)}"
    return family(layer.format).refuse_kernels(layer)


def decodes(activation: str | None) -> bool:
    return False


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    return family(packed.format).prepare(packed, activation, dtype)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N)."""
    check_half(x, "hopper")
    return family(prepared.format).linear(x, prepared, bias)


def linear_restored(
    x: Tensor, prepared: Prepared, vectors: Sequence[Tensor], bias: Tensor | None
) -> Tensor | None:
    """See `backend.Restoring`."""
    if family(prepared.format) is not scalar_linear:
        return None
    check_half(x, "hopper")
    return scalar_linear.linear_restored(x, prepared, vectors, bias)


def needs(layer: LayerSpec, most: int, experts: bool = False) -> Needs:
    """See `backend.Compiled`."""
    assert layer.dtype is not None
    others = {name for dtype, name in NAMES.items() if dtype != layer.dtype}
    kernels = [
        kernel
        for kernel in family(layer.format).kernels_of(layer)
        if getattr(kernel, "grouped", experts) == experts
        and getattr(kernel, "output", None) not in others
    ]
    return Needs([partial(loaded, kernel, layer.device.index) for kernel in kernels])


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `backend.Tunable`."""
    found: dict[str, Callable[[Prepared], Tensor]] = family(prepared.format).candidates(x, prepared)
    return found


def takes_experts(layer: LayerSpec) -> bool:
    return family(layer.format) is scalar_linear


def prepare_experts(
    experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
) -> Prepared:
    return scalar_linear.prepare_experts(experts, activation, dtype)


def linear_experts(x: Tensor | Activations, starts: Tensor, prepared: Prepared) -> Tensor:
    """x (M, K) in fp16 or bf16, sorted by expert -> (M, N)."""
    check_half(x, "hopper")
    return scalar_linear.linear_experts(x, starts, prepared)
