"""Hopper products of codebook formats.

Up to 8 tokens are one launch of `codebook.py`, up to 2 mostly one of `psumbook.py`, 9 to 16 one of
`codebook_swapped.py`. More are one of `lookup_gemm.py`, as are 9 to 16 where that is faster; all
read the same layout. For thousands of tokens, or where a table leaves no room for tiles, a Triton
kernel decodes it to a dense weight for the library's product.
"""

from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.errors import InvalidInput
from anybit.kernels.backend import COUNTS, Activations, LayerSpec, Prepared
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
from anybit.kernels.cute.counters import zeros
from anybit.kernels.cute.jit import KernelSpec, built, missing_kernels
from anybit.kernels.cute.operands import NAMES, aligned, cut, offsets, whole
from anybit.kernels.hopper import codebook_tiles, scalar_linear, tiles
from anybit.kernels.hopper.chip import H200, Chip, chip_of
from anybit.kernels.hopper.codebook_tiles import CodebookKernel, Plan
from anybit.kernels.hopper.launch import CodebookLauncher, GemmLauncher
from anybit.kernels.hopper.lookup import LookupDecoder, lookup
from anybit.kernels.hopper.lookup import choose as choose_lookup
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tile import Kernel, Tile
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


def multiply(
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None,
    plan: Plan | None = None,
    overlap: bool = True,
) -> Tensor:
    """x (M <= 16, K), contiguous -> (M, N); one launch, or two where only 8 tokens' tables fit.

    plan: instead of the rule's. overlap: programmatic dependent launch.
    """
    fmt, (n, k), m = prepared.format, prepared.shape, len(x)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    plan, shared = launch_of(fmt, m, n, k, x.dtype, x.device, plan)
    tokens, work, counters = plan.kernel.tokens, None, None
    if plan.splits > 1:
        size = -(-n // ROWS) * plan.splits * ROWS * tokens
        work = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = zeros(plan.teams * plan.cluster, x.device)
    blocks, row_scale, *books = prepared.layout
    book = books[x.dtype == torch.bfloat16]
    for some, to in zip(x.split(tokens), y.split(tokens), strict=True):
        tensors = (blocks, book, row_scale, bias, to, work, counters)
        loaded(plan.kernel, x.device.index).launch(
            some, tensors, n, plan.cluster, plan.splits, plan.teams, shared, overlap
        )
    return y


def multiply_many(
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None,
    tile: Tile | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """One launch: x (M, K), contiguous -> (M, N), of any M. tile: instead of `lookup.choose`'s."""
    (n, k), m = prepared.shape, len(x)
    wide = whole(n)
    y = torch.empty(m, wide, dtype=x.dtype, device=x.device)
    if not m:
        return cut(y, n)
    bias = offsets(bias, wide, x.dtype)
    function, grid, best, sums = launch_of_many(prepared.format, m, n, k, x.dtype, x.device, tile)
    _work, workspace = scalar_linear.meeting_place(sums, grid, x.device)
    blocks, row_scale, *books = prepared.layout
    function.launch(
        x,
        (
            blocks.data_ptr(),
            row_scale.data_ptr(),
            books[x.dtype == torch.bfloat16].data_ptr(),
            0,
            0,
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0,
        ),
        wide,
        grid,
        best if overlap is None else overlap,
        workspace=workspace,
    )
    return cut(y, n)


@lru_cache(COUNTS)
def lookup_tile(
    fmt: Format, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> Tile | None:
    """The tile of a look-up product; None where another way is faster, or the only one."""
    d = lookup(fmt, dtype)
    return choose_lookup(d, m, n, k, chip_of(device)) if isinstance(d, LookupDecoder) else None


@lru_cache(COUNTS)
def launch_of_many(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None,
) -> tuple[GemmLauncher, int, bool, int]:
    """The loaded kernel for a problem, its grid, whether launches should overlap, its workspace."""
    d, chip = lookup(fmt, dtype), chip_of(device)
    assert isinstance(d, LookupDecoder)
    tile = tile or lookup_tile(fmt, m, n, k, dtype, device)
    assert tile is not None
    tile = tiles.fitted(tile, d)
    function = scalar_linear.loaded(Kernel(d, tile, NAMES[dtype]), device.index)
    grid = tiles.grid(tile, m, n, chip=chip)
    early = tiles.overlaps(tile, d, m, n, chip=chip)
    return function, grid, early, tiles.workspace(tile, m, n, grid)


@lru_cache(COUNTS)
def launch_of(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    plan: Plan | None,
) -> tuple[Plan, int]:
    """The plan for a problem with its teams, and bytes of shared memory."""
    chip = chip_of(device)
    if plan is None:
        cells = cells_of(fmt)
        assert isinstance(cells, Cells)
        plan = codebook_tiles.choose(cells, m, n, k, NAMES[dtype], chip)
        if plan is None:
            raise InvalidInput(f"{fmt.spec}: no kernel for K={k} and {m} tokens")
    kernel, cluster = plan.kernel, plan.cluster
    row_tiles, waves = -(-n // ROWS), 1
    teams = plan.teams or max(1, min(chip.multiprocessors // (cluster * plan.splits), row_tiles))
    while plan.teams == 0 and cluster > 1:
        shared = kernel.shared(cluster, -(-row_tiles // (teams * waves)))
        if shared > MAX_SHARED:  # too many sums: fewer tiles for each cluster, one after another
            waves += 1
            continue
        # Where the driver does not tell: clusters do not fill the processor's parts.
        resident = loaded(kernel, device.index).most_clusters(cluster, shared)
        resident = resident or chip.multiprocessors * 7 // 8 // cluster
        resident = max(1, resident // plan.splits)
        if resident >= teams:
            break
        teams = resident
    teams = min(teams * waves, row_tiles)
    return replace(plan, teams=teams), kernel.shared(cluster, -(-row_tiles // teams))


@cache
def loaded(kernel: CodebookKernel, device: int) -> CodebookLauncher:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return CodebookLauncher(path, device)
