"""Blockwise Hadamard rotations of a weight, and of what a layer multiplies it with.

A rotated layer holds a weight V, and stands for

    W = diag(rotate_out) H V H diag(rotate_in)

H is block-diagonal, of Sylvester's Hadamard matrices, normalized: symmetric and orthogonal. They
have 128 rows, or the largest power of two that divides the size. So
y = rotate_out * H (V (H (rotate_in * x))).
The two vectors are random signs where anybit makes them (QuIP#, https://arxiv.org/abs/2402.04396);
they may hold any numbers but 0, as EXL3's `suh` and `svh` do.

Outliers of a weight and of its inputs are spread over the columns of a block, so that they cost a
scale less.
"""

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anybit.errors import InvalidInput

if TYPE_CHECKING:
    from anybit.core.format import Grid

LARGEST, SMALLEST = 128, 16  # rows of a block
SIDES = ("", "k", "kn")


class Rotation(NamedTuple):
    """The vectors of one layer.

    Attributes:
        rotate_in: (K,).
        rotate_out: (N, 1); None where only inputs are rotated.
    """

    rotate_in: Tensor
    rotate_out: Tensor | None = None

    @classmethod
    def random(cls, sides: str, shape: tuple[int, int], device: torch.device) -> "Rotation":
        """Signs for a weight (N, K), the same for all of that size: layers that read one input
        share its rotation.

        Args:
            sides: "k" or "kn".
            shape: (N, K).
            device: Where the vectors go.
        """
        n, k = shape
        out = signs(n).to(device)[:, None] if "n" in sides else None
        return cls(signs(k).to(device), out)

    @classmethod
    def of(cls, grid: "Grid") -> "Rotation":
        """The vectors that a rotated weight's grid holds."""
        return cls(grid["rotate_in"], grid.get("rotate_out"))

    def tensors(self) -> "Grid":
        """The vectors under their names in a grid."""
        out = self.rotate_out
        return {"rotate_in": self.rotate_in} | ({} if out is None else {"rotate_out": out})

    def rotated(self, w: Tensor) -> Tensor:
        """W (N, K) -> the weight V that the layer holds, fp32.

        Raises:
            InvalidInput: A vector holds a zero, so that no V gives W.
        """
        if not all(bool((vector != 0).all()) for vector in self.tensors().values()):
            raise InvalidInput(
                "a weight cannot be rotated by a vector that holds zeros; use random signs "
                "(quantize_tensor)"
            )
        v = turned(w.float() / self.rotate_in.float())
        return v if self.rotate_out is None else turned(v.T / self.rotate_out.float().T).T

    def restored(self, v: Tensor) -> Tensor:
        """The inverse of `rotated`."""
        w = turned(v.float()) * self.rotate_in.float()
        return w if self.rotate_out is None else turned(w.T).T * self.rotate_out.float()


def turned(x: Tensor) -> Tensor:
    """H applied to the last dimension of x, in x's dtype. Twice is x again."""
    h = hadamard(block(x.shape[-1])).to(x.device, x.dtype)
    return (x.unflatten(-1, (-1, len(h))) @ h).flatten(-2)


@cache
@torch.inference_mode(False)  # or gradients could not pass it later
def hadamard(size: int) -> Tensor:
    """The normalized Hadamard matrix (size, size) fp32 of a power of two, in Sylvester's order."""
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")  # whatever the defaults are meanwhile
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / size**0.5


def signs(size: int) -> Tensor:
    """Random signs (size,) fp16, always the same for a size."""
    random = torch.Generator("cpu").manual_seed(size)
    return torch.randint(2, (size,), generator=random, device="cpu").mul_(2).sub_(1).half()


def block(size: int) -> int:
    """Rows of a block of H: the largest power of two that divides the size, at most `LARGEST`."""
    return min(size & -size, LARGEST)


def check_size(size: int, name: str, spec: str) -> None:
    """Raise InvalidInput unless H exists for a size: of N or K, as `name` says."""
    if block(size) < SMALLEST:
        raise InvalidInput(
            f"{name}={size} cannot be rotated in format {spec!r}: blocks have a power of two of "
            f"{SMALLEST} to {LARGEST} rows, and the largest that divides {size} is {block(size)}; "
            "leave rotate out for this layer"
        )


def check_part(size: int, start: int, stop: int, spec: str) -> None:
    """Raise InvalidInput unless rows start to stop of `size` are whole blocks of their own H."""
    unit, part = block(size), stop - start
    if part != size and (start % unit or block(part) != unit):
        raise InvalidInput(
            f"rows or columns {start} to {stop} of {size} split blocks of {unit} that are rotated "
            f"in format {spec!r}; cut at multiples of {unit}, or use its dequantized weight"
        )
