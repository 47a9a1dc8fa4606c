"""Triton kernels for every format that has a `triton_decode`, on NVIDIA GPUs from sm_80 on.

Programs that split a layer's K meet at locks that belong to the layer: it must not multiply on two
streams at the same time.
"""

from functools import cache

import torch
from torch import Tensor

from anybit.dispatch import scheme_name
from anybit.format import Format, Packed
from anybit.kernels import tiles, tuned
from anybit.kernels.tiles import Tile
from anybit.kernels.triton import layout as layouts
from anybit.kernels.triton.layout import Layout, layout_of

MOST_CODES = 1 << 31
OLDEST = (8, 0)  # the first architecture with bf16 matrix units


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    if fmt.triton_decode is None:
        return f"{type(fmt).__name__} has no triton_decode"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; pip install 'anybit[gpu]'"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"needs a GPU of sm_80 or later, not {torch.cuda.get_device_name(device)}"
    if fmt.code_count(shape[1]) * shape[0] >= MOST_CODES:
        return f"its kernels count words in 32 bits, too few for a weight of {shape}"
    return None


def prepare(
    packed: Packed, activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """See `layout.py`."""
    return layouts.prepare(packed, activation)


def release(prepared: list[Tensor]) -> list[Tensor] | None:
    return prepared


def linear(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    activation: str | None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x (..., K) in fp16 or bf16, with any strides -> (..., n); with a scale, of codes."""
    dtype = x.dtype if scale is None else dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"x is {dtype}; the triton backend multiplies float16 and bfloat16: call .half() or "
            ".bfloat16() on the model"
        )
    layout = layout_of(fmt, activation)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    m = len(rows)
    tile = tile_for(layout, activation, m, n, rows.shape[1], x.device)
    if scale is not None:
        rows = rows.to(torch.int8 if layout.unit == 8 else dtype)
        scale = scale.reshape(-1)
    y = multiply(rows, prepared, bias, layout, n, activation, tile, scale, dtype)
    return y.view(*x.shape[:-1], n)


def multiply(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    layout: Layout,
    n: int,
    activation: str | None,
    tile: Tile,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x (M, K), unit stride along K -> (M, n), with the given tile.

    With a scale (M,), x holds codes, in int8 if the layout's unit has 8 bits and else in `dtype`.

    The tile's kernel must suit: dense and psumbook take no activation notation, gemv at most 4
    tokens and no bytes (liquid@int8 and its like).
    """
    from anybit.kernels.triton import activation as activations
    from anybit.kernels.triton import gemm, gemv, psumbook

    m, k = x.shape
    y = x.new_empty(m, n, dtype=dtype or x.dtype)
    if not y.numel():
        return y
    if tile.kernel == "dense":
        w = x.new_empty(n, k)
        gemm.launch_dense(prepared, layout, w)
        return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
    if activation is not None and scale is None:
        x, scale = activations.quantize_tokens(
            x, activation, torch.int8 if layout.unit == 8 else x.dtype
        )
    if tile.kernel == "psumbook":
        psumbook.launch(x, prepared, bias, y, layout, tile)
    elif tile.kernel == "gemv":
        gemv.launch(x, scale, prepared, bias, y, layout, tile)
    else:
        gemm.launch(x, scale, prepared, bias, y, layout, tile)
    return y


@cache
def tile_for(
    layout: Layout, activation: str | None, m: int, n: int, k: int, device: torch.device
) -> Tile:
    """The tile that was tuned on this GPU, else the shipped one."""
    if device.type == "cuda":
        scheme = scheme_name(layout.fmt, activation)
        tile = tuned.tile_for(torch.cuda.get_device_name(device), scheme, m, n, k)
        if tile is not None:
            return tile
    return tiles.choose(family(layout, m, activation), m, n, dense=activation is None)


def family(layout: Layout, m: int, activation: str | None) -> str:
    """The table of `tiles.py` for a layout and M tokens."""
    from anybit.kernels.triton import psumbook

    if any(entry.table is not None for _, entry in layout.grid):
        # A token's look-ups in one book cost as much as decoding for all tokens.
        few = m <= layout.fmt.books and activation is None
        return "psumbook" if few and psumbook.supports(layout) else "tables"
    if layout.granule > 128 * layout.fmt.width:
        return "planes"
    return "groups" if layout.group else "rows"
