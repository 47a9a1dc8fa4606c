"""What commands make of their options."""

from pathlib import Path
from typing import Any

from anybit.evaluate.corpus import calibration_text
from anybit.formats.presets import default_format
from anybit.nn.plan import plan_from, plan_of, read_plan
from anybit.progress import say
from anybit.quantizers.calibration.data import Calibration


def calibration_of(source: str, samples: int, length: int, kv_scales: bool = False) -> Calibration:
    """A file's text, or with "python" that of modules of the standard library."""
    texts: Any = [text for _, text in calibration_text()] if source == "python" else Path(source)
    return Calibration(texts, samples=samples, length=length, kv_scales=kv_scales)


def plan_of_options(
    formats: list[str] | None, file: Path | None, calibrated: bool
) -> dict[str, str | None]:
    """The plan of --format or --plan; without them a format for this machine, and says which."""
    if file:
        return plan_of(read_plan(file))
    if not formats:
        spec, why = default_format(calibrated)
        say(f"no --format: {spec} ({why}); `anybit formats` lists the others")
        formats = [spec]
    return plan_of(plan_from(formats))
