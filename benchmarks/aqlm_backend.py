"""AQLM's CUDA kernels as a backend: `python benchmarks/engine.py --first aqlm_backend ...`.

So AQLM runs end to end with everything else of the engine, CUDA graphs included. Its package
(Apache-2.0) must be importable; the kernels are compiled when it is imported. As in the package,
more than `MOST_TOKENS` tokens meet a weight that is decoded in every product.
"""

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.backend import Activations, LayerSpec, Prepared

MOST_TOKENS = 6  # of its kernels that do not decode the whole weight
KERNELS = {(2, 8): "code2x8_matmat", (1, 16): "code1x16_matmat"}  # by codebooks and bits of a code


def refuse(layer: LayerSpec) -> str | None:
    fmt = layer.format
    kind = (fmt.books, fmt.bits) if fmt.lookup and fmt.width == 8 and not fmt.group else None
    if kind not in KERNELS or layer.activation or layer.dtype is None:
        return f"{fmt.spec}: AQLM has kernels for 2x8 and 1x16 codebooks with a scale a row"
    return None


def decodes(activation: str | None) -> bool:
    return False


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """The layout is codes (N, K / 8, books), codebooks (books, 2^b, 1, 8), scales (N, 1, 1, 1)."""
    import aqlm.inference_kernels.cuda_kernel  # noqa: F401 - defines the operators

    fmt, (n, k) = packed.format, packed.shape
    kind = torch.int8 if fmt.bits == 8 else torch.int16
    codes = packed.codes().to(kind).view(n, k // 8, fmt.books)  # wraps, as AQLM stores them
    book, scale = (packed.grid[name].to(dtype) for name in (fmt.lookup or "", "scale"))
    layout = codes, book[:, :, None].contiguous(), scale.view(n, 1, 1, 1)
    return Prepared(fmt, packed.shape, activation, layout, dtype)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    assert isinstance(x, Tensor)
    name = KERNELS[prepared.format.books, prepared.format.bits]
    if len(x) > MOST_TOKENS:
        name += "_dequant"
    y: Tensor = getattr(torch.ops.aqlm, name)(x.contiguous(), *prepared.layout, bias)
    return y
