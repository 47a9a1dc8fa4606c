"""The backend of codebook formats on H100 and H200 (sm_90a).

Up to 16 tokens are one launch of `psumbook.py` or `codebook.py`, more are one of `lookup_gemm.py`;
all read the same layout. For thousands of tokens, or where a table leaves no room for tiles, a
Triton kernel decodes it to a dense weight for the library's product.
"""

from functools import cache

import torch
from torch import Tensor

from anybit.format import Format, Packed
from anybit.kernels.hopper import backend as gemm
from anybit.kernels.hopper import build, codebook_tiles, tiles
from anybit.kernels.hopper.backend import NAMES, aligned
from anybit.kernels.hopper.build import built, missing_kernels
from anybit.kernels.hopper.cells import ROWS, Cells, CodebookKernel, cells_of, pack
from anybit.kernels.hopper.codebook_build import kernel_file
from anybit.kernels.hopper.codebook_load import Function
from anybit.kernels.hopper.lookup import LookupDecoder, lookup
from anybit.kernels.hopper.lookup import choose as choose_lookup
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tiles import MAX_SHARED, MULTIPROCESSORS, Kernel, Tile

MOST_TOKENS = 16  # of one launch


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    n, k = shape
    cells = cells_of(fmt)
    if isinstance(cells, str):
        return cells
    if activation is not None:
        return f"codebooks are multiplied by fp16 and bf16 activations, not by {activation}"
    if k % cells.columns:
        return f"{fmt.spec}: K must be a multiple of {cells.columns}, not {k}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs an H100 or H200 (sm_90a), not {torch.cuda.get_device_name(device)}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton decodes its weights for many tokens; pip install 'anybit[gpu]'"
    plans = [
        codebook_tiles.choose(cells, m, n, k, name)
        for m in (1, 2, 8, 16)
        for name in NAMES.values()
    ]
    if None in plans:
        return f"{fmt.spec}: its tables do not fit into shared memory for K={k}"
    files = [kernel_file(plan[0]) for plan in plans if plan]
    files += [build.kernel_file(kernel) for kernel in lookup_kernels(cells)]
    return missing_kernels(files, fmt.spec)


def prepare(
    packed: Packed, activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """[blocks, row scale fp32, codebook fp16, codebook bf16]; see `cells.pack`."""
    blocks, row_scale, book = pack(packed)
    return [blocks, row_scale, book.half(), book.bfloat16()]


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
    """x (..., K) in fp16 or bf16 -> (..., n); there are no quantized activations here."""
    if x.dtype not in NAMES:
        raise TypeError(
            f"x is {x.dtype}; the codebook backend multiplies float16 and bfloat16: call .half() "
            "or .bfloat16() on the model"
        )
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    if len(rows) <= MOST_TOKENS:
        y = multiply(aligned(rows), prepared, bias, fmt, n)
    elif lookup_tile(fmt, len(rows), n, k, x.dtype) is not None:
        y = multiply_many(aligned(rows), prepared, bias, fmt, n)
    else:
        y = torch.nn.functional.linear(
            rows, dense(prepared, fmt, n, k, x.dtype), None if bias is None else bias.to(x.dtype)
        )
    return y.view(*x.shape[:-1], n)


def dense(prepared: list[Tensor], fmt: Format, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """The weight (n, k)."""
    from anybit.kernels.triton.cells import decode

    cells = cells_of(fmt)
    assert isinstance(cells, Cells)
    book = prepared[2 + (dtype == torch.bfloat16)]
    return decode(prepared[0], prepared[1], book, (n, k), cells.groups)


def multiply(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    plan: tuple[CodebookKernel, int, int] | None = None,
    overlap: bool = True,
) -> Tensor:
    """One launch: x (M <= 16, K), contiguous -> (M, n).

    plan: kernel, CTAs of a cluster, clusters; chosen by `launch_of` if None. overlap: programmatic
    dependent launch.
    """
    m, k = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    function, cluster, teams, shared = launch_of(fmt, m, n, k, x.dtype, x.device.index, plan)
    blocks, row_scale, *books = prepared[:4]
    function.launch(
        x,
        (
            blocks.data_ptr(),
            books[x.dtype == torch.bfloat16].data_ptr(),
            row_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
        ),
        n,
        cluster,
        teams,
        shared,
        overlap,
    )
    return y


def multiply_many(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    tile: Tile | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """One launch: x (M, K), contiguous -> (M, n), of any M. tile: instead of `lookup.choose`'s."""
    m, k = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    kernel = lookup_kernel(fmt, x.dtype, tile or lookup_tile(fmt, m, n, k, x.dtype))
    blocks, row_scale, *books = prepared[:4]
    gemm.loaded(kernel, x.device.index).launch(
        x,
        (
            blocks.data_ptr(),
            row_scale.data_ptr(),
            books[x.dtype == torch.bfloat16].data_ptr(),  # where other kernels have zero points
            0,
            0,
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0,
        ),
        n,
        tiles.grid(kernel.tile, m, n),
        tiles.overlaps(kernel.tile, kernel.decoder, m, n) if overlap is None else overlap,
    )
    return y


@cache
def lookup_tile(fmt: Format, m: int, n: int, k: int, dtype: torch.dtype) -> Tile | None:
    """The tile of a look-up product; None where the table leaves no room."""
    d = lookup(fmt, dtype)
    return choose_lookup(d, m, n, k) if isinstance(d, LookupDecoder) else None


@cache
def lookup_kernel(fmt: Format, dtype: torch.dtype, tile: Tile) -> Kernel:
    d = lookup(fmt, dtype)
    assert isinstance(d, LookupDecoder)
    return Kernel(d, tiles.fitted(tile, d), NAMES[dtype])


@cache
def launch_of(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: int,
    plan: tuple[CodebookKernel, int, int] | None,
) -> tuple[Function, int, int, int]:
    """The loaded kernel for a problem, CTAs of a cluster, clusters, bytes of shared memory."""
    if plan is None:
        cells = cells_of(fmt)
        assert isinstance(cells, Cells)
        found = codebook_tiles.choose(cells, m, n, k, NAMES[dtype])
        if found is None:
            raise ValueError(f"{fmt.spec}: no kernel for K={k} and {m} tokens")
        plan = (*found, 0)
    kernel, cluster, teams = plan
    function = loaded(kernel, device)
    row_tiles = -(-n // ROWS)
    waves = 1
    teams = teams or min(MULTIPROCESSORS // cluster, row_tiles)
    while plan[2] == 0 and cluster > 1:
        shared = kernel.shared(cluster, -(-row_tiles // (teams * waves)))
        if shared > MAX_SHARED:  # too many sums: fewer tiles for each cluster, one after another
            waves += 1
            continue
        resident = function.most_clusters(cluster, shared)
        if resident >= teams:
            break
        teams = resident
    teams *= waves
    teams = min(teams, row_tiles)
    return function, cluster, teams, kernel.shared(cluster, -(-row_tiles // teams))


@cache
def loaded(kernel: CodebookKernel, device: int) -> Function:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return Function(path, device)


def read_floor(fmt: Format, n: int, k: int) -> int:
    """Bytes of packed weights that a product must read."""
    cells = cells_of(fmt)
    assert isinstance(cells, Cells)
    return -(-n // ROWS) * (k // cells.columns) * cells.block_bytes
