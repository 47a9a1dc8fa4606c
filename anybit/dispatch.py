"""Which backend multiplies: the only place where that is decided.

A backend is a module with four functions (`Backend`). The first one in `BACKENDS` that does not
refuse takes the layer; `anybit doctor` prints every refusal.
"""

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from anybit.format import Format, Packed, get_format

ACTIVATIONS = ("int8", "fp8")


class Backend(Protocol):
    def refuse(
        self, fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
    ) -> str | None:
        """None when this backend can multiply such a layer, or the reason in words why not."""

    def prepare(
        self, packed: Packed, activation: str | None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """The tensors that `linear` wants, in this backend's own layout; made once, at load.

        dtype: of the activations, where it is known by then.
        """

    def release(self, prepared: list[Tensor]) -> list[Tensor] | None:
        """Of prepared tensors, those that make do without the canonical ones.

        None when the canonical tensors are what is multiplied.
        """

    def linear(
        self,
        x: Tensor,
        prepared: list[Tensor],
        bias: Tensor | None,
        fmt: Format,
        n: int,
        activation: str | None,
        scale: Tensor | None = None,
        sums: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x (..., K) -> (..., n), in x's dtype.

        With a scale (...,) fp32, x holds codes of the activation notation already, y comes in
        `dtype`, and sums (...,) int32 are those of int8 codes.
        """


HALVES = (torch.float16, torch.bfloat16)  # activations that kernels for GPUs multiply
# name: (module, device types). A module is imported when a layer on such a device first asks.
BACKENDS = {
    "hopper": ("anybit.kernels.hopper.backend", ("cuda",)),
    "codebook": ("anybit.kernels.hopper.codebook_backend", ("cuda",)),
    "triton": ("anybit.kernels.triton.backend", ("cuda",)),
    "cpu": ("anybit.kernels.cpu", ("cpu",)),
    "reference": ("anybit.kernels.reference", ()),
}


def get_backend(name: str) -> Backend:
    return cast(Backend, import_module(BACKENDS[name][0]))


def refusals(
    fmt: Format,
    activation: str | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> dict[str, str | None]:
    """Every backend's answer: None, or why it refuses. dtype: of the activations, if known."""
    if fmt.order:
        raise ValueError(f"{fmt.spec}: kernels take Packed.stored() and x in the stored order")
    out: dict[str, str | None] = {}
    for name, (_, devices) in BACKENDS.items():
        if devices and device.type not in devices:
            out[name] = f"runs on {' and '.join(devices)} only, not on {device.type}"
        elif devices == ("cuda",) and dtype is not None and dtype not in HALVES:
            out[name] = f"multiplies float16 and bfloat16 activations, not {dtype}"
        else:
            out[name] = get_backend(name).refuse(fmt, activation, shape, device)
    return out


def choose(
    fmt: Format,
    activation: str | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> str:
    """Name of the first backend that does not refuse."""
    answers = refusals(fmt, activation, shape, device, dtype)
    return next(name for name, reason in answers.items() if reason is None)


@cache
def parse_scheme(scheme: str) -> tuple[Format, str | None]:
    """`"liquid@int8"` -> (the format, "int8"): a layer's weight format and activation notation."""
    spec, at, activation = scheme.partition("@")
    if at and activation not in ACTIVATIONS:
        raise ValueError(
            f"unknown activation {activation!r} in {scheme!r}; known: {', '.join(ACTIVATIONS)}, or "
            "none at all for weights only"
        )
    return get_format(spec), activation or None


def scheme_name(fmt: Format, activation: str | None) -> str:
    """The inverse of `parse_scheme`."""
    return fmt.spec + (f"@{activation}" if activation else "")
