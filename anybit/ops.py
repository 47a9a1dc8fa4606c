"""The operator behind every quantized layer: traceable, compilable, capturable."""

from typing import NamedTuple

import torch
from torch import Tensor

from anybit.dispatch import get_backend, parse_scheme

_library = torch.library.Library("anybit", "DEF")
_library.define(
    "linear(Tensor x, Tensor[] prepared, Tensor? bias, str scheme, int n, str backend, "
    "Tensor? scale=None, Tensor? sums=None, ScalarType? dtype=None) -> Tensor"
)


CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of activation notations


class Tokens(NamedTuple):
    """Activations that are quantized already, which `QuantLinear` takes in the place of x.

    codes (..., K): int8 or float8_e4m3fn. scale (...,) fp32: of each token. sums (...,) int32: of a
    token's int8 codes; empty for fp8. dtype: what y comes in.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor
    dtype: torch.dtype


def _linear(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    scheme: str,
    n: int,
    backend: str,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if x.is_cuda and x.device.index != torch.cuda.current_device():  # kernels run on the current
        with torch.cuda.device(x.device):
            return _linear(x, prepared, bias, scheme, n, backend, scale, sums, dtype)
    fmt, activation = parse_scheme(scheme)
    return get_backend(backend).linear(x, prepared, bias, fmt, n, activation, scale, sums, dtype)


def _linear_fake(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    scheme: str,
    n: int,
    backend: str,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=dtype or x.dtype)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("anybit::linear", _linear_fake, lib=_library)

linear = torch.ops.anybit.linear.default
