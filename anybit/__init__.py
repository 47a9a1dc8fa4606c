"""anybit: linear layers of language models in any number of bits."""

from anybit.format import Entry, Format, Grid, Packed, get_format, register
from anybit.formats import codebook, integer, liquid, minifloat, sparse  # noqa: F401  (registers)
from anybit.linear import QuantLinear, dequantize, linear, quantize_tensor
from anybit.quantize import dequantize_, quantize_
from anybit.quantizers.rtn import RTN

__version__ = "0.1.0"
__all__ = [
    "RTN",
    "Entry",
    "Format",
    "Grid",
    "Packed",
    "QuantLinear",
    "dequantize",
    "dequantize_",
    "get_format",
    "linear",
    "quantize_",
    "quantize_tensor",
    "register",
]
