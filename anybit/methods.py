"""Quantizers by name, from directory to directory: what `anybit quantize` and `plan` do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from anybit.checkpoint import save
from anybit.dispatch import parse_scheme
from anybit.evaluate.corpus import calibration_text
from anybit.quantize import quantize_
from anybit.quantizers.additive import Additive
from anybit.quantizers.calibrate import Calibrated
from anybit.quantizers.clip import Clip
from anybit.quantizers.gptq import GPTQ
from anybit.quantizers.hqq import HQQ
from anybit.quantizers.rtn import RTN
from anybit.quantizers.smooth import Smooth
from anybit.quantizers.text import Calibration

DATA_FREE: dict[str, type[RTN]] = {"rtn": RTN, "clip": Clip, "hqq": HQQ}
CALIBRATED: dict[str, Callable[[Calibration], Calibrated]] = {
    "gptq": GPTQ,
    "additive": Additive,
    "smooth": lambda text: Smooth(text, then=Clip()),
    "smooth+gptq": lambda text: Smooth(text, then=GPTQ()),
}


def quantize_directory(
    model: Path,
    out: Path,
    plan: Mapping[str, str | None],
    method: str | None,
    text: Calibration | None,
    overwrite: bool,
) -> object:
    """Quantize the model in a directory to another one; returns what there is to say about it.

    method: a name of `DATA_FREE`, or of `CALIBRATED` with text; None chooses. Only clip and hqq
    hold the whole model in memory.
    """
    if method is None:
        method = default_method(plan) if text else "rtn"
    known = CALIBRATED if text else DATA_FREE
    if method not in known:
        other = DATA_FREE if text else CALIBRATED
        reason = (
            f"{method!r} {'takes no text' if text else 'needs text: --calibrate FILE'}"
            if method in other
            else f"unknown method {method!r}"
        )
        raise ValueError(
            f"{reason}; {'with' if text else 'without'} text there are {', '.join(known)}"
        )
    if text:
        from anybit.stream_calibrated import calibrate_checkpoint

        return calibrate_checkpoint(model, out, plan, CALIBRATED[method](text), overwrite=overwrite)
    if method == "rtn":
        from anybit.stream import quantize_checkpoint

        return quantize_checkpoint(model, out, plan, overwrite=overwrite)
    from anybit.files import check_absent

    check_absent(out, overwrite)
    save(quantize_(load_dense(model), plan, DATA_FREE[method]()), out, overwrite)
    return out


def default_method(plan: Mapping[str, str | None]) -> str:
    """Codebooks are calibrated whole, and layers beside them with GPTQ. Smoothing helps where
    activations are quantized; `liquid` is made for that.
    """
    schemes = [scheme for scheme in plan.values() if scheme]
    if any("codebook" in parse_scheme(scheme)[0].entries() for scheme in schemes):
        return "additive"
    with_activations = any("@" in s or s.startswith("liquid") for s in schemes)
    return "smooth+gptq" if with_activations else "gptq"


def calibration_of(source: str, samples: int, length: int, kv_scales: bool = False) -> Calibration:
    """A file's text, or with "python" that of modules of the standard library."""
    texts: Any = [text for _, text in calibration_text()] if source == "python" else Path(source)
    return Calibration(texts, samples=samples, length=length, kv_scales=kv_scales)


def load_dense(directory: Path) -> nn.Module:
    """A dense model in its own dtype."""
    from transformers import AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is no directory of a model: it has no config.json")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory)
    return model


def plan_from(formats: list[str]) -> dict[str, str | None]:
    """`["int3", "*.down_proj=int4:group=64", "*.q_proj=none"]` -> {pattern: spec or None}.

    Options of a spec contain "=" as well, but only after a ":", which no module name has.
    """
    plan: dict[str, str | None] = {}
    for text in formats:
        pattern, equals, spec = text.partition("=")
        if not equals or ":" in pattern:
            pattern, spec = "*", text
        pattern, spec = pattern.strip(), spec.strip()
        if pattern in plan:
            raise ValueError(f"--format is given twice for {pattern!r}; which one is meant?")
        if not pattern or not spec:
            raise ValueError(f"--format {text!r}: write FORMAT or PATTERN=FORMAT")
        plan[pattern] = None if spec.lower() == "none" else spec
    return plan


def read_plan(path: Path) -> dict[str, str | None]:
    """A plan from a JSON file; ValueError unless it is an object of strings and nulls."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(plan, dict) or not all(
        v is None or isinstance(v, str) for v in plan.values()
    ):
        raise ValueError(f'{path} is not a plan; write {{"*": "int4", "*.down_proj": null}}')
    return plan
