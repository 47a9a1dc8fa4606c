"""Triton kernels for every format that has a `triton_decode`, on NVIDIA GPUs from sm_80 on.

Programs that split a layer's K meet at locks that belong to the layer: it must not multiply on two
streams at the same time.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels import tuned
from anybit.kernels.backend import (
    Activations,
    LayerSpec,
    Needs,
    NoRoom,
    Prepared,
    check_half,
    refuse_dtype,
)
from anybit.kernels.triton import layout as layouts
from anybit.kernels.triton import tiles
from anybit.kernels.triton.layout import Layout, layout_of
from anybit.kernels.triton.tiles import Tile

MOST_CODES = 1 << 31
OLDEST = (8, 0)  # the first architecture with bf16 tensor cores
joins = True  # see `Backend.linear`


def refuse(layer: LayerSpec) -> str | None:
    fmt, shape, device = layer.format, layer.shape, layer.device
    if reason := refuse_dtype(layer.dtype):
        return reason
    if fmt.triton_decode is None:
        return f"{type(fmt).__name__} has no triton_decode"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; pip install 'anybit[gpu]'"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"needs a GPU of sm_80 or later, not {torch.cuda.get_device_name(device)}"
    if fmt.width & (fmt.width - 1):
        return f"vectors of {fmt.width} weights make tiles of columns that are no power of two"
    if fmt.code_count(shape[1]) * shape[0] >= MOST_CODES:
        return f"its kernels count words in 32 bits, too few for a weight of {shape}"
    return None


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """See `layout.py`."""
    layout = tuple(layouts.prepare(packed, activation))
    return Prepared(packed.format, packed.shape, activation, layout)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N)."""
    check_half(x, "triton")
    layout = layout_of(prepared.format, prepared.activation)
    scale = pairs = None
    if isinstance(x, Activations):
        rows, scale = x.codes.to(torch.int8 if layout.unit == 8 else x.dtype), x.scale
        pairs = x.paired
    else:
        rows = x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    of_layer = layout, prepared.activation, x.dtype, len(rows), *prepared.shape
    return multiply(rows, prepared, bias, tile_for(*of_layer, rows.device), scale, x.dtype, pairs)


def needs(layer: LayerSpec, most: int, experts: bool = False) -> Needs:
    """See `Backend.needs`. Triton makes kernels of their own for 1 and for multiples of 16."""
    from anybit.kernels.triton import gemm

    (n, k), dtype = layer.shape, layer.dtype
    assert dtype is not None
    layout = layout_of(layer.format, layer.activation)
    x_dtype = torch.int8 if layer.activation and layout.unit == 8 else dtype
    found: dict[object, int] = {}
    for m in range(1, most + 1):
        tile = tile_for(layout, layer.activation, dtype, m, n, k, layer.device)
        what: object = tile.kernel
        if tile.kernel != "dense":
            plan = gemm.planned(layout, tile, x_dtype, layer.device, m, n, k)
            numbers = (m, plan.pieces, plan.grid[1])
            what = str(plan.constants), *((number == 1, number % 16 == 0) for number in numbers)
        found.setdefault(what, m)
    return Needs(tokens=[*found.values()])


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `Backend.candidates`."""
    from triton.runtime.errors import OutOfResources

    layout, dense = layout_of(prepared.format, prepared.activation), prepared.activation is None

    def run(tile: Tile, weight: Prepared) -> Tensor:
        try:
            return multiply(x, weight, None, tile)
        except OutOfResources as error:
            raise NoRoom(str(error)) from None

    every = tiles.tried(family(layout), len(x), prepared.shape[0], dense)
    return {str(tile): partial(run, tile) for tile in every}


def multiply(
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None,
    tile: Tile,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """x (M, K), unit stride along K -> (M, N), with the given tile.

    With a scale (M,), x holds codes, in int8 if the layout's unit has 8 bits and else in `dtype`.
    pairs: `Pairs.count` of these.

    The tile's kernel must suit: dense takes no activation notation.
    """
    from anybit.kernels.triton import activation as activations
    from anybit.kernels.triton import gemm

    n, k = prepared.shape
    layout = layout_of(prepared.format, prepared.activation)
    tensors = list(prepared.layout)
    y = x.new_empty(len(x), n, dtype=dtype or x.dtype)
    if not y.numel():
        return y
    if tile.kernel == "dense":
        w = x.new_empty(n, k)
        gemm.launch_dense(tensors, layout, w)
        return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
    if prepared.activation is not None and scale is None:
        held = torch.int8 if layout.unit == 8 else x.dtype
        x, scale, *_ = activations.quantize(x, prepared.activation, held)
    gemm.launch(x, scale, tensors, bias, y, layout, tile, pairs)
    return y


@tuned.cached
def tile_for(
    layout: Layout,
    activation: str | None,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    device: torch.device,
) -> Tile:
    """The tile that was tuned on this GPU, else the shipped one. dtype: of y."""
    dense = activation is None
    cell = tuned.cell_of("triton", layout.fmt, activation, dtype, n, k)
    found = tuned.winner(cell, m, device)
    if found and found.near(m):
        every = tiles.tried(family(layout), found.most, n, dense)
        if tile := next((each for each in every if str(each) == found.launch), None):
            return tile
    return tiles.choose(family(layout), m, n, dense)


def family(layout: Layout) -> str:
    """The table of `tiles.py` for a layout."""
    if layout.fmt.window or any(entry.table is not None for _, entry in layout.grid):
        return "tables"
    if layout.granule > 128 * layout.fmt.width:
        return "planes"
    return "groups" if layout.group else "rows"
