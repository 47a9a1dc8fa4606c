"""K or V in int8, with a scale of each token and head, or static ones of channels."""

import torch
from torch import Tensor

from anybit.kernels.kv.format import Numbers, zeros
from anybit.kernels.reference import over

LARGEST = 127.0
# Scales of zeros would divide by zero; any other scale keeps zeros as they are.
LEAST_SCALE = 1e-10


class Int8(Numbers):
    """A scale in fp32 for each token and head."""

    kind, side_by_side, most_bias = "dynamic", True, 10.0

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def of_layer(self, scale: Tensor) -> Numbers:
        return StaticInt8(scale)

    def empty_scale(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        blocks, heads, size, _ = shape
        return zeros((blocks, heads, 1, size, 1), torch.float32, device)

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        own = over(x.float().abs().amax(-1, keepdim=True), LARGEST).clamp_min(LEAST_SCALE)
        return rounded(x.float() / own), own[..., None]

    def decode(self, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scale is not None
        return codes.to(dtype) * scale[..., 0].to(dtype)


class StaticInt8(Numbers):
    """Scales (kv_heads, head_dim) that calibration leaves in a checkpoint."""

    kind, side_by_side, static = "static", True, True

    def __init__(self, scale: Tensor):
        super().__init__(torch.int8)
        self.scale = scale

    def empty_scale(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        return self.scale.to(device, torch.float32)

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert scale is not None
        return rounded(x.float() / scale), None

    def decode(self, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scale is not None
        return codes.to(dtype) * scale.to(dtype)


def rounded(x: Tensor) -> Tensor:
    return x.round().clamp(-LARGEST, LARGEST).to(torch.int8)
