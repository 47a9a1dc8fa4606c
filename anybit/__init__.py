"""anybit: linear layers of language models in any number of bits."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anybit.core import names as _names
from anybit.integrations import hook
from anybit.version import __version__

if TYPE_CHECKING:
    from anybit.checkpoint.save_load import load, save
    from anybit.core.format import Entry, Format, Grid, get_format, register
    from anybit.core.packed import Packed
    from anybit.engine.llm import LLM
    from anybit.engine.sequence import SamplingParams
    from anybit.engine.structured import Structured
    from anybit.integrations.transformers import AnybitConfig
    from anybit.kernels.registry import register_backend
    from anybit.nn.linear import QuantLinear, dequantize, linear
    from anybit.nn.model import dequantize_, set_keep
    from anybit.quantizers.additive import Additive
    from anybit.quantizers.calibration.data import Calibration
    from anybit.quantizers.clip import Clip
    from anybit.quantizers.fold import rotate_
    from anybit.quantizers.gptq import GPTQ
    from anybit.quantizers.hqq import HQQ
    from anybit.quantizers.pv_tuning import pv_tune
    from anybit.quantizers.quantize import fake_quantize_, quantize_, quantize_tensor
    from anybit.quantizers.rotate import Rotate
    from anybit.quantizers.rtn import RTN
    from anybit.quantizers.smooth import Smooth

# Where the public names are. Each is imported at its first use: torch and transformers take
# seconds, and `anybit --help` needs neither.
PUBLIC = {
    "GPTQ": "quantizers.gptq",
    "HQQ": "quantizers.hqq",
    "LLM": "engine.llm",
    "RTN": "quantizers.rtn",
    "Additive": "quantizers.additive",
    "AnybitConfig": "integrations.transformers",
    "Calibration": "quantizers.calibration.data",
    "Clip": "quantizers.clip",
    "Entry": "core.format",
    "Format": "core.format",
    "Grid": "core.format",
    "Packed": "core.packed",
    "QuantLinear": "nn.linear",
    "Rotate": "quantizers.rotate",
    "SamplingParams": "engine.sequence",
    "Smooth": "quantizers.smooth",
    "Structured": "engine.structured",
    "dequantize": "nn.linear",
    "dequantize_": "nn.model",
    "fake_quantize_": "quantizers.quantize",
    "get_format": "core.format",
    "linear": "nn.linear",
    "load": "checkpoint.save_load",
    "pv_tune": "quantizers.pv_tuning",
    "quantize_": "quantizers.quantize",
    "quantize_tensor": "quantizers.quantize",
    "register": "core.format",
    "register_backend": "kernels.registry",
    "rotate_": "quantizers.fold",
    "save": "checkpoint.save_load",
    "set_keep": "nn.model",
}
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
    "Rotate",
    "SamplingParams",
    "Smooth",
    "Structured",
    "__version__",
    "dequantize",
    "dequantize_",
    "fake_quantize_",
    "get_format",
    "linear",
    "load",
    "pv_tune",
    "quantize_",
    "quantize_tensor",
    "register",
    "register_backend",
    "rotate_",
    "save",
    "set_keep",
]


if not TYPE_CHECKING:  # who checks types shall find misspelled names

    def __getattr__(name: str) -> Any:
        if name not in PUBLIC:
            raise AttributeError(f"module 'anybit' has no attribute {name!r}")
        searched = gc.isenabled()
        gc.disable()  # what is imported stays, and a sixth of the time would go to that search
        try:
            value = globals()[name] = getattr(import_module(f"anybit.{PUBLIC[name]}"), name)
        finally:
            if searched:
                gc.enable()
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})


def _formats() -> None:
    """Register anybit's own formats: what looks for one stands below them, and is told here."""
    from anybit import formats  # noqa: F401


_names.builtin = _formats
hook.install()
