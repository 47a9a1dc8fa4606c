"""What a layer does before and after the product with its stored weight."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from anybit.core.format import LAYER
from anybit.nn import op as ops


class Around(NamedTuple):
    """The tensors of a layer that backends never see; None for those that it lacks.

    Attributes:
        order: (K,), of the stored columns.
        rotate_in: (K,), of the inputs' rotation.
        rotate_out: (N, 1), of the outputs'.
    """

    order: Tensor | None
    rotate_in: Tensor | None
    rotate_out: Tensor | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor | None]) -> "Around":
        """Those among the stored tensors of a weight."""
        return cls(*map(tensors.get, LAYER))

    def before(self, x: Tensor) -> Tensor:
        """x (..., K) as the stored weight meets it."""
        if self.order is not None:
            return x.index_select(-1, self.order)
        return x if self.rotate_in is None else ops.run(ops.rotate, x, self.rotate_in, False)

    def inside(self, bias: Tensor | None) -> Tensor | None:
        """The bias that the kernel adds: not before outputs are rotated."""
        return bias if self.rotate_out is None else None

    def after(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer returns for the product y (..., N)."""
        if self.rotate_out is None:
            return y
        y = ops.run(ops.rotate, y, self.rotate_out, True)
        return y if bias is None else y + bias.to(y.dtype)
