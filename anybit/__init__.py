"""anybit: linear layers of language models in any number of bits."""

from typing import Any

from anybit.checkpoint import load, save
from anybit.format import Entry, Format, Grid, Packed, get_format, register
from anybit.formats import codebook, integer, liquid, minifloat, sparse  # noqa: F401  (registers)
from anybit.integrations import hook
from anybit.linear import QuantLinear, dequantize, linear, quantize_tensor
from anybit.quantize import dequantize_, quantize_
from anybit.quantizers.additive import Additive
from anybit.quantizers.clip import Clip
from anybit.quantizers.finetune import pv_tune
from anybit.quantizers.gptq import GPTQ
from anybit.quantizers.hqq import HQQ
from anybit.quantizers.rtn import RTN
from anybit.quantizers.smooth import Smooth
from anybit.quantizers.text import Calibration

__version__ = "0.1.0"
__all__ = [
    "GPTQ",
    "HQQ",
    "LLM",
    "RTN",
    "Additive",
    "AnybitConfig",
    "Calibration",
    "Clip",
    "Entry",
    "Format",
    "Grid",
    "Packed",
    "QuantLinear",
    "SamplingParams",
    "Smooth",
    "dequantize",
    "dequantize_",
    "get_format",
    "linear",
    "load",
    "pv_tune",
    "quantize_",
    "quantize_tensor",
    "register",
    "save",
]


def __getattr__(name: str) -> Any:
    if name == "AnybitConfig":  # its base is in transformers, which takes seconds to import
        from anybit.integrations.transformers import AnybitConfig

        return AnybitConfig
    if name == "LLM":
        from anybit.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from anybit.engine.sequence import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'anybit' has no attribute {name!r}")


hook.install()
