"""What quantizers share that change something first, and leave the codes to another quantizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.quantizers.base import Block, Quantizer
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.rtn import RTN


@dataclass(frozen=True)
class Before(Quantizer):
    """Does what `then` does; a subclass says what comes before.

    Attributes:
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them.
        then: Any other quantizer; one that is calibrated gets the same data.
    """

    calibration: Source | Calibration | None = field(default=None, repr=False)
    then: Quantizer = field(default_factory=RTN)

    @property
    def needs(self) -> tuple[str, ...]:
        """As `then` has it."""
        return self.then.needs

    @property
    def whole_block(self) -> bool:
        """As `then` has it."""
        return self.then.whole_block

    def format(self, fmt: Format, shape: tuple[int, int]) -> Format:
        """As `then` does."""
        return self.then.format(fmt, shape)

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """As `then` does."""
        return self.then.quantize(w, fmt, statistics)

    def quantize_block(self, block: Block) -> None:
        """As `then` does."""
        self.then.quantize_block(block)

    def transform(self, block: Block) -> Mapping[str, Statistics]:
        """As `then` does."""
        return self.then.transform(block)
