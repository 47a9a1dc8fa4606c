"""The self-test of a codebook kernel: a small weight of whole numbers, whose products are exact."""

import math

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute.cells import ROWS, prepare
from anybit.kernels.mma import codebook_linear
from anybit.kernels.mma.codebook_tiles import CodebookKernel

LARGEST = 8  # of a centroid's numbers: sums of four, times a power of two, are bf16 numbers


def wrong(layer: LayerSpec, kernel: CodebookKernel) -> str | None:
    """What is wrong, or None.

    One-hot tokens read every weight back; small integers add up, in one token more than a CTA has.
    """
    assert layer.dtype is not None
    cells, tile = kernel.cells, kernel.tile
    step = math.lcm(cells.columns, layer.format.group or 1)
    n, k = 3 * ROWS + 8, -(-cells.columns * (tile.warps + 3) // step) * step
    packed = weight(layer, (n, k))
    prepared = prepare(packed.to(layer.device), None)
    exact = packed.dequantize().double()
    random = torch.Generator().manual_seed(1)
    integers = torch.randint(-3, 4, (tile.tokens + 1, k), generator=random)
    least = -(-(k // cells.columns) // (tile.warps * tile.blocks))
    for what, x in (("weights", torch.eye(k)), ("sums", integers)):
        given = x.to(layer.device, layer.dtype)
        want = (x.double() @ exact.T).to(layer.dtype)
        slices = -(-len(x) // tile.tokens)
        for splits, teams in ((least, 1), (least, 2), (least + 1, 1)) * 2:
            launch = slices * splits * teams, splits
            y = codebook_linear.multiply(given, prepared, None, kernel, launch)
            if count := int((y.cpu() != want).sum()):
                return f"{count} of {want.numel()} {what} are wrong"
    return None


def weight(layer: LayerSpec, shape: tuple[int, int]) -> Packed:
    """Random codes, centroids of whole numbers, scales that are powers of two."""
    fmt, (n, k) = layer.format, shape
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**fmt.bits, (n, fmt.code_count(k)), generator=random)
    grid: dict[str, Tensor] = {}
    for name, entry in fmt.entries().items():
        if entry.table:
            numbers = torch.randint(-LARGEST, LARGEST + 1, entry.table, generator=random)
            grid[name] = numbers.half()
        else:
            groups = k // fmt.group if fmt.group else 1
            grid[name] = torch.exp2(torch.randint(-1, 2, (n, groups), generator=random)).half()
    return Packed.from_codes(fmt, shape, codes.to(torch.uint8), grid)
