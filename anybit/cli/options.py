"""What commands make of their options."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from anybit.core.scheme import parse_scheme
from anybit.evaluate.corpus import calibration_text, prose
from anybit.formats.presets import default_format
from anybit.nn.mixes import MIXTURE
from anybit.nn.model import outline_of
from anybit.nn.plan import Plan, plan_from, plan_of, read_plan
from anybit.progress import say
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.registry import CALIBRATED

# Where no text is named. In windows of 512 a model of 135 million parameters takes two cores about
# a minute; GPUs take more text.
WINDOWS, LENGTHS = 16, {"cpu": 512, "cuda": 2048}


def calibration_of(source: str, samples: int, length: int, kv_scales: bool = False) -> Calibration:
    """A file's text, or with "python" or "prose" what comes with Python."""
    texts: Any = Path(source)
    if source == "python":
        texts = [text for _, text in calibration_text()]
    elif source == "prose":
        texts = prose(held_out=False)
    return Calibration(texts, samples=samples, length=length, kv_scales=kv_scales)


def plan_of_options(
    formats: list[str] | None, file: Path | None, calibrated: bool, model: Callable[[], Any]
) -> dict[str, str | None]:
    """The plan of --format or --plan; without them a format for this machine, and says which.

    model: on the meta device, for mixtures of formats.
    """
    if file:
        return plan_for(read_plan(file), model)
    if not formats:
        spec, why = default_format(calibrated)
        say(f"no --format: {spec} ({why}); `anybit formats` lists the others")
        formats = [spec]
    return plan_for(plan_from(formats), model)


def plan_for(plan: Plan, model: Callable[[], Any]) -> dict[str, str | None]:
    """The plan in anybit's names, without mixtures."""
    mixed = any(MIXTURE.fullmatch(str(scheme).strip().lower()) for scheme in plan.values())
    return plan_of(outline_of(model()).without_mixtures(plan) if mixed else plan)


def default_calibration(plan: Mapping[str, str | None], method: str | None) -> Calibration | None:
    """Python's documentation, where no text is named: for formats that lose much less by it.

    Args:
        plan: {pattern: scheme or None}.
        method: Of --method; a calibrated one always gets the text, a data-free one never.

    Returns:
        The data; None to quantize without.

    Raises:
        FileNotFoundError: The method needs the text, and this Python was installed without it.
    """
    scheme = gains_by_data(plan) if method is None else method
    if not scheme or (method is not None and method.lower() not in CALIBRATED):
        return None
    try:
        texts = prose(held_out=False)
    except FileNotFoundError as error:
        if method is not None:
            raise
        say(f"{scheme} is rounded to nearest: {error}")
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    time = time_of(plan) if device == "cpu" else ""
    say(
        f"{scheme}: calibrating on Python's documentation ({time}--calibrate FILE takes your text; "
        "--method rtn rounds to nearest, in seconds)"
    )
    return Calibration(texts, samples=WINDOWS, length=LENGTHS[device])


def time_of(plan: Mapping[str, str | None]) -> str:
    """How long calibrating takes on a core of a CPU, as far as it was measured on a Zen 4.

    Of SmolLM2-135M by GPTQ (docs/quantize.md), and of a layer of Qwen2.5-Coder-1.5B as trellis
    codes.
    """
    names = {scheme.lower().partition(":")[0] for scheme in plan.values() if scheme}
    if "codebook" in names:
        return ""
    each = "two hours" if "trellis" in names else "15 minutes"
    return f"about {each} of CPU time for a billion weights; "


def warn_of_few_bits(plan: Mapping[str, str | None]) -> None:
    """Say what becomes of a model whose weights are rounded to fewer than 3 bits."""
    for scheme in filter(None, plan.values()):
        if parse_scheme(scheme)[0].bits_per_weight((4096, 4096)) < 3:
            text = (
                f"{scheme} without calibration: a model rounded to so few bits writes nonsense, as "
                "a rule; leave out --method, or give --calibrate FILE"
            )
            typer.secho(f"warning: {text}", fg="yellow", err=True)
            return


def gains_by_data(plan: Mapping[str, str | None]) -> str:
    """The first scheme of a plan that loses much less when calibrated, or "".

    Those of fewer than 8 bits, and those with quantized activations (`h200_published.csv`).
    """
    for scheme in filter(None, plan.values()):
        fmt, activation = parse_scheme(scheme)
        if activation or fmt.bits_per_weight((4096, 4096)) < 8:
            return scheme
    return ""
