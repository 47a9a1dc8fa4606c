"""Products of the `mma.sync` family: which kernel, its workspace, its launch."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.scheme import scheme_name
from anybit.errors import Unsupported
from anybit.kernels import tuned
from anybit.kernels.backend import Activations, Prepared
from anybit.kernels.cute.counters import zeros
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.jit import built
from anybit.kernels.cute.operands import NAMES, cut, decoder_for, offsets, tokens, whole
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.mma import tiles
from anybit.kernels.mma.launch import MmaLauncher
from anybit.kernels.mma.tiles import Kernel, Tile, gpu_of


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N)."""
    return multiply(*tokens(x, prepared), prepared, bias, x.dtype)


def linear_experts(x: Tensor, starts: Tensor, prepared: Prepared) -> Tensor:
    """x (M, K) in fp16 or bf16, sorted by expert -> (M, N)."""
    return multiply(*tokens(x, prepared), prepared, None, x.dtype, starts=starts)


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
    """
    m, (n, k), device = x.shape[0], prepared.shape, x.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiply(x, scale, sums, prepared, bias, dtype, kernel, grid, starts)
    if not m:
        return torch.empty(0, n, dtype=dtype, device=device)
    experts = 0 if starts is None else len(starts) - 1
    if kernel is None:
        problem = x.dtype, m, n, k, dtype, device
        kernel, count = chosen(prepared.format, prepared.activation, *problem, experts)
        grid = grid or count
    if kernel.tile.kind == "decode":
        return torch.nn.functional.linear(x, decoded(x, kernel, prepared), offsets(bias, n, dtype))
    wide = whole(n)
    y = torch.empty(m, wide, dtype=dtype, device=device)
    bias = offsets(bias, wide, dtype)
    tile, work, counters = kernel.tile, None, None
    grid = grid or tiles.grid(tile, gpu_of(device), m, n, k, experts)
    if tile.kind == "experts" or (tile.kind == "gemm" and grid != tiles.tiles_of(tile, m, n)):
        work = torch.empty(2 * grid * tile.rows * tile.tokens, dtype=torch.float32, device=device)
        counters = zeros(grid, device)
    tensors = (*prepared.layout, scale, sums, bias, y, work, counters, starts)
    loaded(kernel, device.index).launch(x, tensors, wide, grid, kernel.overlap, experts)
    return cut(y, n)


def decoded(x: Tensor, kernel: Kernel, prepared: Prepared) -> Tensor:
    """The weight (N, K of x) in the dtype of x; of int8, blobs of bytes that are operands."""
    n, k = prepared.shape[0], x.shape[1]
    if x.dtype == torch.int8:
        n = len(prepared.layout[0]) * ROWS
        w = torch.empty(n // ROWS, k_tiles(k), ROWS * K_TILE, dtype=torch.uint8, device=x.device)
    else:
        w = torch.empty(n, k, dtype=x.dtype, device=x.device)
    tensors = (*prepared.layout, None, None, None, w, None, None, None)
    grid = tiles.copy_grid(kernel.tile, n, k)
    loaded(kernel, x.device.index).launch(x[:1], tensors, n, grid, False)
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
    decoder, scheme = decoder_for(fmt, x_dtype), scheme_name(fmt, activation)
    gpu, kernel, cell = gpu_of(device), None, tuned_as(scheme, dtype)
    tile = tuned.tile_for(Tile, torch.cuda.get_device_name(device), cell, m, n, k)
    if tile is not None and not experts:
        kernel = tiles.kernel_of(decoder, gpu, tile, NAMES[dtype])
    kernel = kernel or tiles.kernel_for(decoder, gpu, m, n, NAMES[dtype], experts)
    if kernel is None:
        raise Unsupported(f"{scheme}: no mma kernel for {m} tokens fits this GPU: {gpu}")
    return kernel, tiles.grid(kernel.tile, gpu, m, n, k, experts)


def tuned_as(scheme: str, dtype: torch.dtype) -> str:
    """What `tuned.py` calls a scheme: a tile that does for one dtype may spill for another."""
    return f"{scheme} in {NAMES[dtype]}"


@cache
def loaded(kernel: Kernel, device: int) -> MmaLauncher:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return MmaLauncher(path, device)
