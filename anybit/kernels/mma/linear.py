"""Products of the `mma.sync` family: which kernel, its workspace, its launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.errors import Unsupported
from anybit.kernels import tuned
from anybit.kernels.backend import Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.jit import missing_kernels
from anybit.kernels.cute.launch import ProductArguments, loaded
from anybit.kernels.cute.operands import NAMES, decoder_for, offsets, tokens, whole
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.cute.products import Launch, on_its_device
from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import Gpu, Kernel, Tile, gpu_of


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `Backend.candidates`."""
    given, gpu = tokens(x, prepared), gpu_of(x.device)
    decoder = decoder_for(prepared.format, given[0].dtype)

    def call(tile: Tile) -> Callable[[Prepared], Tensor]:
        kernel = tiles.kernel_of(decoder, gpu, tile, NAMES[x.dtype])
        return lambda weight: on_its_device(multiply)(*given, weight, None, x.dtype, kernel)

    every = tiles.tried(decoder, gpu, len(x), prepared.shape[0])
    return {tile.name: call(tile) for tile in every}


def multiply(
    x: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    prepared: Prepared,
    bias: Tensor | None,
    dtype: torch.dtype,
    kernel: Kernel | None = None,
    grid: int = 0,
    starts: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """One product: x (M, K) as the tensor core takes it -> (M, N) in `dtype`.

    Args:
        x: Contiguous.
        scale: (M,) fp32, and `sums` (M,) int32: of quantized activations.
        prepared: By `operands.prepare`.
        bias: (N,), or None.
        dtype: Of y.
        kernel: Instead of the rule's.
        grid: CTAs, instead of the rule's; 0: the rule's.
        starts: (experts + 1,) int32, on the device: tokens starts[e] to starts[e + 1] meet the
            weights of expert e. `prepared` is `operands.prepare_experts`'s then.
        pairs: As in `products.multiply`.
    """
    m, (n, k), device = x.shape[0], prepared.shape, x.device
    if not m:
        return torch.empty(0, n, dtype=dtype, device=device)
    experts = 0 if starts is None else len(starts) - 1
    if kernel is None:
        problem = x.dtype, m, n, k, dtype, device
        kernel, count = chosen(prepared.format, prepared.activation, *problem, experts)
        grid = grid or count
    if kernel.tile.kind == "decode":
        return torch.nn.functional.linear(x, decoded(x, kernel, prepared), offsets(bias, n, dtype))
    launch = launch_of(kernel, gpu_of(device), device, m, n, k, experts, grid)
    layout, launches = prepared.layout, [launch]
    return products.multiply(x, scale, sums, layout, bias, n, dtype, launches, starts, pairs)


def launch_of(
    kernel: Kernel,
    gpu: Gpu,
    device: torch.device,
    m: int,
    n: int,
    k: int,
    experts: int = 0,
    grid: int = 0,
) -> Launch:
    """The launch of a kernel. grid: instead of the rule's; 0: the rule's."""
    tile, work = kernel.tile, 0
    grid = grid or tiles.grid(tile, gpu, m, n, k, experts)
    if tile.kind == "experts" or (tile.kind == "gemm" and grid != tiles.tiles_of(tile, m, n)):
        work = 2 * grid * tile.rows * tile.tokens
    found = loaded(kernel, device.index)
    return Launch(found, grid, kernel.overlap, whole(n), work=work, counters=grid)


def decoded(x: Tensor, kernel: Kernel, prepared: Prepared) -> Tensor:
    """The weight (N, K of x) in the dtype of x; of int8, blobs of bytes that are operands."""
    n, k = prepared.shape[0], x.shape[1]
    if x.dtype == torch.int8:
        n = len(prepared.layout[0]) * ROWS
        w = x.new_empty(n // ROWS, k_tiles(k), ROWS * K_TILE, dtype=torch.uint8)
    else:
        w = x.new_empty(n, k)
    values: dict[str, Tensor | int] = dict.fromkeys(ProductArguments._fields, 0)
    values |= zip(("w", "row_scale", "row_zero", "table"), prepared.layout, strict=False)
    values |= {"x": x, "y": w, "m": 1, "n": n, "k": k}
    loaded(kernel, x.device.index).launch(values, tiles.copy_grid(kernel.tile, n, k), False)
    return w


@tuned.cached
def chosen(
    fmt: Format,
    activation: str | None,
    x_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    experts: int,
) -> tuple[Kernel, int]:
    """The kernel for a problem, as tuned or by the rule, and its grid."""
    decoder, gpu, kernel = decoder_for(fmt, x_dtype), gpu_of(device), None
    cell = tuned.cell_of("mma", fmt, activation, dtype, n, k)
    found = None if experts else tuned.winner(cell, m, device)
    if found and found.near(m):
        every = tiles.tried(decoder, gpu, found.most, n)
        if tile := next((each for each in every if each.name == found.launch), None):
            kernel = tiles.kernel_of(decoder, gpu, tile, NAMES[dtype])
    if kernel is None or missing_kernels([kernel]):  # `anybit build` makes those of the rule
        kernel = tiles.kernel_for(decoder, gpu, m, n, NAMES[dtype], experts)
    if kernel is None:
        raise Unsupported(f"{cell.scheme}: no mma kernel for {m} tokens fits this GPU: {gpu}")
    return kernel, tiles.grid(kernel.tile, gpu, m, n, k, experts)
