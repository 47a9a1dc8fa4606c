"""What commands make of their options."""

from pathlib import Path
from typing import Any

from anybit.evaluate.corpus import calibration_text
from anybit.quantizers.calibration.data import Calibration


def calibration_of(source: str, samples: int, length: int, kv_scales: bool = False) -> Calibration:
    """A file's text, or with "python" that of modules of the standard library."""
    texts: Any = [text for _, text in calibration_text()] if source == "python" else Path(source)
    return Calibration(texts, samples=samples, length=length, kv_scales=kv_scales)
