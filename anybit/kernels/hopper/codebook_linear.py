"""Hopper products of codebook formats.

Up to 8 tokens are one launch of `codebook.py`, up to 2 mostly one of `psumbook.py`, 9 to 16 one of
`codebook_swapped.py`. More are one of `lookup_gemm.py`, as are 9 to 16 where that is faster; all
read the same layout. For thousands of tokens, or where a table leaves no room for tiles, a Triton
kernel decodes it to a dense weight for the library's product.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.kernels import tuned
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.cells import ROWS, Cells, cut, multiply_decoded, refuse_dense
from anybit.kernels.cute.jit import KernelSpec, missing_kernels
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import NAMES, aligned
from anybit.kernels.cute.products import CodebookLaunch, Launch, on_its_device
from anybit.kernels.hopper import codebook_tiles, scalar_linear
from anybit.kernels.hopper.chip import H200, Chip, chip_of
from anybit.kernels.hopper.choices import one
from anybit.kernels.hopper.codebook_tiles import Plan
from anybit.kernels.hopper.launch import ClusterLauncher
from anybit.kernels.hopper.lookup import LookupDecoder, choose, lookup, ways
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.hopper.tiles import MAX_SHARED


def refuse_shape(layer: LayerSpec) -> str | None:
    cells = cut(layer.format)
    if None in plans(cells, layer.shape):
        k = layer.shape[1]
        return f"{layer.format.spec}: its tables do not fit into shared memory for K={k}"
    return None


def refuse_kernels(layer: LayerSpec) -> str | None:
    if reason := refuse_dense():
        return reason
    cells = cut(layer.format)
    if None in plans(cells, layer.shape, chip_of(layer.device)):
        k = layer.shape[1]
        return f"{layer.format.spec}: K={k} wants more multiprocessors at once than this GPU has"
    return missing_kernels(kernels_of(layer), layer.format.spec)


def kernels_of(layer: LayerSpec) -> list[KernelSpec]:
    """All that may multiply a layer."""
    cells = cut(layer.format)
    here = plans(cells, layer.shape, chip_of(layer.device))
    return [*(plan.kernel for plan in here if plan), *lookup_kernels(cells)]


def plans(cells: Cells, shape: tuple[int, int], chip: Chip = H200) -> list[Plan | None]:
    """Launches for few tokens; None where a table, or on a small chip a cluster, does not fit."""
    return [
        codebook_tiles.choose(cells, m, *shape, name, chip)
        for m in codebook_tiles.TOKENS
        for name in NAMES.values()
    ]


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `Backend.candidates`."""
    d = lookup(prepared.format, x.dtype)
    assert isinstance(d, LookupDecoder)

    def call(way: Plan | Tile) -> Callable[[Prepared], Tensor]:
        return lambda weight: on_its_device(multiply)(x, weight, None, way)

    every = ways(d, len(x), *prepared.shape, chip_of(x.device))
    return {way.name: call(way) for _, way in every}


def multiply(
    x: Tensor, prepared: Prepared, bias: Tensor | None, way: Plan | Tile | None = None
) -> Tensor:
    """x (M, K) -> (M, N); two launches where only 8 tokens' tables fit.

    way: instead of the rules'.
    """
    (n, k), m, dtype = prepared.shape, len(x), x.dtype
    if not m:
        return x.new_empty(0, n, dtype=dtype)
    found = chosen(prepared.format, m, n, k, dtype, x.device, way)
    if found is None:
        return multiply_decoded(x, prepared, bias)
    if isinstance(found, CodebookLaunch):
        return products.multiply_codebook(aligned(x), prepared, bias, found)
    blocks, row_scale, *books = prepared.layout
    layout = blocks, row_scale, row_scale, books[dtype == torch.bfloat16]  # no zero points
    return products.multiply(aligned(x), None, None, layout, bias, n, dtype, found)


@tuned.cached
def chosen(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    way: Plan | Tile | None,
) -> CodebookLaunch | tuple[Launch, ...] | None:
    """How a problem is multiplied, by the rules or as told; None: by a dense weight."""
    d, chip = lookup(fmt, dtype), chip_of(device)
    assert isinstance(d, LookupDecoder)
    if way is None:
        cell = tuned.cell_of("hopper", fmt, None, dtype, n, k)
        way = choose(d, m, n, k, chip, tuned.winner(cell, m, device))
    if isinstance(way, Plan):
        return launch_of(way, n, chip, device)
    if way is None:
        return None
    return scalar_linear.launches_of(d, one(way, n), m, k, NAMES[dtype], device)


def launch_of(plan: Plan, n: int, chip: Chip, device: torch.device) -> CodebookLaunch:
    """The launch of a plan."""
    kernel, cluster = plan.kernel, plan.cluster
    row_tiles, waves = -(-n // ROWS), 1
    found = cast(ClusterLauncher, loaded(kernel, device.index))
    teams = max(1, min(chip.multiprocessors // (cluster * plan.splits), row_tiles))
    while cluster > 1:
        shared = kernel.shared(cluster, -(-row_tiles // (teams * waves)))
        if shared > MAX_SHARED:  # too many sums: fewer tiles for each cluster, one after another
            waves += 1
            continue
        # Where the driver does not tell: clusters do not fill the processor's parts.
        resident = found.most_clusters(cluster, shared)
        resident = resident or chip.multiprocessors * 7 // 8 // cluster
        resident = max(1, resident // plan.splits)
        if resident >= teams:
            break
        teams = resident
    teams = min(teams * waves, row_tiles)
    splits, grid = plan.splits, teams * plan.splits * cluster
    work = row_tiles * splits * ROWS * kernel.tokens if splits > 1 else 0
    shared = kernel.shared(cluster, -(-row_tiles // teams))
    return CodebookLaunch(
        found, kernel.tokens, grid, True, cluster, splits, work, teams * cluster, shared
    )
