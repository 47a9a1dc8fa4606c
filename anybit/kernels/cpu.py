"""torch's own low-bit CPU operators, where they compute a format exactly."""

import torch
from torch import Tensor

from anybit.format import Format, Packed


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    return "not written yet"


def prepare(packed: Packed) -> list[Tensor]:
    raise NotImplementedError


def linear(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    activation: str | None,
) -> Tensor:
    raise NotImplementedError
