"""What commands make of their options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybit.core.scheme import parse_scheme
from anybit.evaluate.corpus import calibration_text, prose
from anybit.formats.presets import default_format
from anybit.nn.plan import plan_from, plan_of, read_plan
from anybit.progress import say
from anybit.quantizers.calibration.data import Calibration

CALIBRATE_BELOW = 5.5  # bits a weight


def calibration_of(source: str, samples: int, length: int, kv_scales: bool = False) -> Calibration:
    """A file's text, or with "python" or "prose" what comes with Python."""
    texts: Any = Path(source)
    if source == "python":
        texts = [text for _, text in calibration_text()]
    elif source == "prose":
        texts = prose(held_out=False)
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


def few_bits(plan: Mapping[str, str | None]) -> str:
    """The scheme of fewest bits in a plan, if these are so few that calibration is worth it."""
    shape = 4096, 4096
    found = {scheme: parse_scheme(scheme)[0] for scheme in plan.values() if scheme}
    bits = {s: fmt.bits_per_weight(shape) for s, fmt in found.items()}
    least = min(bits, key=bits.__getitem__, default="")
    return least if least and bits[least] < CALIBRATE_BELOW else ""
