"""The operator behind every quantized layer: traceable, compilable, capturable."""

import torch
from torch import Tensor

from anybit.dispatch import get_backend, parse_scheme

_library = torch.library.Library("anybit", "DEF")
_library.define(
    "linear(Tensor x, Tensor[] prepared, Tensor? bias, str scheme, int n, str backend) -> Tensor"
)


def _linear(
    x: Tensor, prepared: list[Tensor], bias: Tensor | None, scheme: str, n: int, backend: str
) -> Tensor:
    fmt, activation = parse_scheme(scheme)
    return get_backend(backend).linear(x, prepared, bias, fmt, n, activation)


def _linear_fake(
    x: Tensor, prepared: list[Tensor], bias: Tensor | None, scheme: str, n: int, backend: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("anybit::linear", _linear_fake, lib=_library)

linear = torch.ops.anybit.linear.default
