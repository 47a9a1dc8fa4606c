"""The formats that tests iterate over: every registered name, and options that change layout."""

import torch
from torch import Tensor

import anybit
from anybit.core.format import Format, known_formats
from anybit.core.packed import Packed

OPTIONS = (
    "int1:group=32",
    "int2:group=64,zero",
    "int3:group=32",
    "int4:group=64",
    "int4:group=128,zero",
    "int5:zero",
    "int8:group=64",
    "fp:e1m1",
    "fp:e2m0",
    "fp:e2m3,group=64",
    "fp:e3m3",
    "fp:e5m2",
    "fp:e4m3,group=32",
    "mxfp4:group=128",
    "mxfp6:e3m2",
    "mxfp8:e5m2",
    "nvfp4:group=64",
    "nvfp4:divide",
    "liquid:group=32",
    "sparse:group=64",
    "codebook:m=1,v=4",
    "codebook:m=3,v=16,b=4,group=32",
    "codebook:m=1,v=1,b=4,group=64",
    "q4_1:group=64",
    "q8_1:group=128",
    "trellis:bits=3,code=mcg",
    "trellis:bits=4,code=pair8",
    "trellis:code=look",
)
NAMES = tuple(name for name, _ in known_formats() if name != "fp")
SPECS = NAMES + OPTIONS
SCALAR = tuple(
    s for s, f in zip(SPECS, map(anybit.get_format, SPECS), strict=True)
    if f.width == 1 and not f.window and "codebook" not in s
)  # fmt: skip


def columns_of_a_group(spec: str) -> int:
    """Columns that a weight must have a multiple of."""
    return max(entry.group for entry in anybit.get_format(spec).entries().values()) or 1


def weight_of(fmt: Format, w: Tensor) -> Packed:
    """A weight for kernels: W rounded, or random codes of a trellis, whose search takes seconds."""
    if not fmt.window:
        return anybit.quantize_tensor(w, fmt)
    n, k = w.shape
    codes = torch.randint(1 << fmt.bits, (n, k // fmt.width), dtype=torch.uint8)
    return Packed.from_codes(fmt, (n, k), codes, fmt.fit(w))
