"""Quantizers by name, and which one suits a plan."""

from collections.abc import Callable, Mapping

from anybit.core.scheme import parse_scheme
from anybit.quantizers.additive import Additive
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.clip import Clip
from anybit.quantizers.gptq import GPTQ
from anybit.quantizers.hqq import HQQ
from anybit.quantizers.rotate import Rotate
from anybit.quantizers.rtn import RTN
from anybit.quantizers.smooth import Smooth
from anybit.quantizers.trained import TrainedGrid

DATA_FREE: dict[str, Callable[[], Quantizer]] = {
    "rtn": RTN,
    "clip": Clip,
    "hqq": HQQ,
    "grid": TrainedGrid,
}
CALIBRATED: dict[str, Callable[[Calibration], Quantizer]] = {
    "gptq": GPTQ,
    "gptq+gradients": lambda data: GPTQ(data, gradients=True),
    "additive": Additive,
    "rotate+gptq": lambda data: Rotate(data, then=GPTQ()),
    "smooth": lambda data: Smooth(data, then=Clip()),
    "smooth+gptq": lambda data: Smooth(data, then=GPTQ()),
}
ELSEWHERE = {  # methods of others, and those here that do the like
    "awq": "smooth",
    "smoothquant": "smooth+gptq",
    "quarot": "rotate+gptq",
    "aqlm": "additive",
    "nearest": "rtn",
}


def default_method(plan: Mapping[str, str | None]) -> str:
    """The calibrated method that suits the formats of a plan.

    Codebooks are calibrated whole, and layers beside them with GPTQ. Smoothing helps where
    activations are quantized, or where the format is made for that.

    Args:
        plan: {pattern: scheme, or None for layers that stay dense}.

    Returns:
        A name of `CALIBRATED`.
    """
    schemes = [parse_scheme(scheme) for scheme in plan.values() if scheme]
    if any(fmt.lookup for fmt, _ in schemes):
        return "additive"
    smooth = any(activation or fmt.made_for for fmt, activation in schemes)
    return "smooth+gptq" if smooth else "gptq"
