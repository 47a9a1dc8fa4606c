"""Hopper products of codebook formats.

Up to 8 tokens are one launch of `codebook.py`, up to 2 mostly one of `psumbook.py`, 9 to 16 one of
`codebook_swapped.py`. More are one of `lookup_gemm.py`, as are 9 to 16 where that is faster; all
read the same layout. For thousands of tokens, or where a table leaves no room for tiles, a Triton
kernel decodes it to a dense weight for the library's product.
"""

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.errors import InvalidInput
from anybit.kernels.backend import COUNTS, Activations, LayerSpec, Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.cells import (
    ROWS,
    Cells,
    cells_of,
    multiply_decoded,
    refuse,
    refuse_dense,
)
from anybit.kernels.cute.cells import (
    prepare as prepare,
)
from anybit.kernels.cute.jit import KernelSpec, missing_kernels
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import NAMES, aligned
from anybit.kernels.cute.products import CodebookLaunch, Launch, on_its_device
from anybit.kernels.hopper import codebook_tiles, scalar_linear
from anybit.kernels.hopper.chip import H200, Chip, chip_of
from anybit.kernels.hopper.choices import Choice, Part
from anybit.kernels.hopper.codebook_tiles import Plan
from anybit.kernels.hopper.launch import ClusterLauncher
from anybit.kernels.hopper.lookup import LookupDecoder, lookup
from anybit.kernels.hopper.lookup import choose as choose_lookup
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.hopper.tiles import MAX_SHARED

MOST_TOKENS = codebook_tiles.TOKENS[-1]  # of one launch


def refuse_format(layer: LayerSpec) -> str | None:
    if reason := refuse(layer):
        return reason
    cells = cells_of(layer.format)
    assert isinstance(cells, Cells)
    if None in plans(cells, layer.shape):
        k = layer.shape[1]
        return f"{layer.format.spec}: its tables do not fit into shared memory for K={k}"
    return None


def refuse_kernels(layer: LayerSpec) -> str | None:
    if reason := refuse_dense():
        return reason
    cells = cells_of(layer.format)
    assert isinstance(cells, Cells)
    here = plans(cells, layer.shape, chip_of(layer.device))
    if None in here:
        k = layer.shape[1]
        return f"{layer.format.spec}: K={k} wants more multiprocessors at once than this GPU has"
    kernels: list[KernelSpec] = [plan.kernel for plan in here if plan]
    kernels += lookup_kernels(cells)
    return missing_kernels(kernels, layer.format.spec)


def plans(cells: Cells, shape: tuple[int, int], chip: Chip = H200) -> list[Plan | None]:
    """Launches for few tokens; None where a table, or on a small chip a cluster, does not fit."""
    return [
        codebook_tiles.choose(cells, m, *shape, name, chip)
        for m in codebook_tiles.TOKENS
        for name in NAMES.values()
    ]


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N); there are no quantized activations here."""
    assert isinstance(x, Tensor)
    if lookup_tile(prepared.format, len(x), *prepared.shape, x.dtype, x.device) is not None:
        return multiply_many(aligned(x), prepared, bias)
    if len(x) <= MOST_TOKENS:
        return multiply(aligned(x), prepared, bias)
    return multiply_decoded(x, prepared, bias)


@on_its_device
def multiply(
    x: Tensor, prepared: Prepared, bias: Tensor | None, plan: Plan | None = None
) -> Tensor:
    """x (M <= 16, K), contiguous -> (M, N); one launch, or two where only 8 tokens' tables fit.

    plan: instead of the rule's.
    """
    (n, k), m = prepared.shape, len(x)
    if not m:
        return torch.empty(0, n, dtype=x.dtype, device=x.device)
    launch = launch_of(prepared.format, m, n, k, x.dtype, x.device, plan)
    return products.multiply_codebook(x, prepared, bias, launch)


@on_its_device
def multiply_many(
    x: Tensor, prepared: Prepared, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """One launch: x (M, K), contiguous -> (M, N), of any M. tile: instead of `lookup.choose`'s."""
    (n, k), m = prepared.shape, len(x)
    if not m:
        return torch.empty(0, n, dtype=x.dtype, device=x.device)
    launches = launches_of_many(prepared.format, m, n, k, x.dtype, x.device, tile)
    blocks, row_scale, *books = prepared.layout
    layout = blocks, row_scale, books[x.dtype == torch.bfloat16]
    return products.multiply(x, None, None, layout, bias, n, x.dtype, launches)


@lru_cache(COUNTS)
def lookup_tile(
    fmt: Format, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> Tile | None:
    """The tile of a look-up product; None where another way is faster, or the only one."""
    d = lookup(fmt, dtype)
    return choose_lookup(d, m, n, k, chip_of(device)) if isinstance(d, LookupDecoder) else None


@lru_cache(COUNTS)
def launches_of_many(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None,
) -> tuple[Launch, ...]:
    """The launch for a problem."""
    d = lookup(fmt, dtype)
    assert isinstance(d, LookupDecoder)
    tile = tile or lookup_tile(fmt, m, n, k, dtype, device)
    assert tile is not None
    choice = Choice(parts=(Part(tile, 0, n),))
    return scalar_linear.launches_of(d, choice, m, k, NAMES[dtype], device)


@lru_cache(COUNTS)
def launch_of(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    plan: Plan | None,
) -> CodebookLaunch:
    """The launch of a plan, the rule's or another."""
    chip = chip_of(device)
    if plan is None:
        cells = cells_of(fmt)
        assert isinstance(cells, Cells)
        plan = codebook_tiles.choose(cells, m, n, k, NAMES[dtype], chip)
        if plan is None:
            raise InvalidInput(f"{fmt.spec}: no kernel for K={k} and {m} tokens")
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
