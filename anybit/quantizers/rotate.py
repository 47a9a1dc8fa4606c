"""Rotate, then quantize: the weight that is stored lies between two Hadamard transforms.

W = diag(rotate_out) H V H diag(rotate_in), and another quantizer rounds V by the statistics of
H (rotate_in * x). QuIP# (https://arxiv.org/abs/2402.04396) and QuaRot
(https://arxiv.org/abs/2404.00456) do the same with transforms of whole rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from anybit.core.format import Format, get_format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.rtn import RTN


@dataclass(frozen=True)
class Rotate(Quantizer):
    """Rotate every layer that can be, and quantize with another quantizer.

    `Rotate(then=GPTQ(data))` on "int4" is `GPTQ(data)` on "int4:rotate=k", but that layers whose
    sizes have no blocks are quantized without rotation. A layer that its format already rotates
    stays as it is.

    Attributes:
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them; by
            default that of `then`.
        then: Any other quantizer; one that is calibrated gets the same data.
        rotate: "k" for inputs, "kn" for inputs and outputs.
    """

    calibration: Source | Calibration | None = field(default=None, repr=False)
    then: Quantizer = field(default_factory=RTN)
    rotate: str = "k"

    def __post_init__(self) -> None:
        get_format(f"int8:rotate={self.rotate}")  # raises
        if self.calibration is None:
            object.__setattr__(self, "calibration", self.then.calibration)

    @property
    def needs(self) -> tuple[str, ...]:
        """As `then` has it."""
        return self.then.needs

    @property
    def whole_block(self) -> bool:
        """As `then` has it."""
        return self.then.whole_block

    def format(self, fmt: Format, shape: tuple[int, int]) -> Format:
        """The format, rotated where the shape can be."""
        fmt = self.then.format(fmt, shape)
        if fmt.order or fmt.rotate:
            return fmt
        rotated = dataclasses.replace(fmt, rotate=self.rotate)
        try:
            rotated.check(*shape)
        except InvalidInput:
            return fmt
        return rotated

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """As `then` does; `quantize_weight` rotates before."""
        return self.then.quantize(w, fmt, statistics)

    def quantize_block(
        self,
        block: nn.Module,
        schemes: Mapping[str, str],
        statistics: Mapping[str, Statistics],
        outputs: Sequence[Callable[[], Tensor]],
    ) -> None:
        """As `then` does."""
        self.then.quantize_block(block, schemes, statistics, outputs)

    def transform(
        self,
        block: nn.Module,
        schemes: Mapping[str, str],
        statistics: dict[str, Statistics],
        output: Callable[[], Tensor],
    ) -> dict[str, Statistics]:
        """As `then` does."""
        return self.then.transform(block, schemes, statistics, output)
