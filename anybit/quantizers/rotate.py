"""Rotate, then quantize: the weight that is stored lies between two Hadamard transforms.

W = diag(rotate_out) H V H diag(rotate_in), and another quantizer rounds V by the statistics of
H (rotate_in * x). QuIP# (https://arxiv.org/abs/2402.04396) and QuaRot
(https://arxiv.org/abs/2404.00456) do the same with transforms of whole rows.
"""

import dataclasses
from dataclasses import dataclass

from anybit.core.format import Format, get_format
from anybit.errors import InvalidInput
from anybit.quantizers.before import Before


@dataclass(frozen=True)
class Rotate(Before):
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

    rotate: str = "k"

    def __post_init__(self) -> None:
        get_format(f"int8:rotate={self.rotate}")  # raises
        if self.calibration is None:
            object.__setattr__(self, "calibration", self.then.calibration)

    def format(self, fmt: Format, shape: tuple[int, int]) -> Format:
        """The format, rotated where the shape can be."""
        fmt = super().format(fmt, shape)
        if fmt.order or fmt.rotate:
            return fmt
        rotated = dataclasses.replace(fmt, rotate=self.rotate)
        try:
            rotated.check(*shape)
        except InvalidInput:
            return fmt
        return rotated
