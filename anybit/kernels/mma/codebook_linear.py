"""Products of codebook formats by `mma.sync`: which kernel, its workspace, its launch."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.errors import Unsupported
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.cells import ROWS, cut, multiply_decoded
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import NAMES, aligned
from anybit.kernels.cute.products import CodebookLaunch
from anybit.kernels.mma import codebook_tiles
from anybit.kernels.mma.codebook_tiles import CodebookKernel
from anybit.kernels.mma.tiles import Gpu, gpu_of


def kernels_of(layer: LayerSpec, dtype: torch.dtype, gpu: Gpu) -> list[CodebookKernel]:
    """The kernel that a layer may launch; none where it does not fit."""
    kernel = codebook_tiles.kernel_for(cut(layer.format), gpu, NAMES[dtype])
    return [kernel] if kernel else []


def multiply(
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None,
    kernel: CodebookKernel | None = None,
    launch: tuple[int, int] | None = None,
) -> Tensor:
    """One product: x (M, K) -> (M, N).

    Args:
        x: With any strides.
        prepared: By `cells.prepare`.
        bias: (N,), or None.
        kernel: Instead of the rule's.
        launch: CTAs, and how many share K, instead of the rule's.
    """
    m, (n, k) = len(x), prepared.shape
    if not m:
        return x.new_empty(0, n)
    if kernel is None:
        if codebook_tiles.decodes(cut(prepared.format), m):
            return multiply_decoded(x, prepared, bias)
        kernel = chosen(prepared.format, x.dtype, x.device)
    x = aligned(x)
    grid, splits = launch or launch_of(kernel, x.device, (m, n, k))
    tokens = kernel.tile.tokens
    work = -(-m // tokens) * splits * -(-n // ROWS) * ROWS * tokens if splits > 1 else 0
    found = loaded(kernel, x.device.index)
    made = CodebookLaunch(found, m, grid, kernel.overlap, 1, splits, work, counters=grid)
    return products.multiply_codebook(x, prepared, bias, made)


@cache
def chosen(fmt: Format, dtype: torch.dtype, device: torch.device) -> CodebookKernel:
    """The kernel by the rule."""
    gpu = gpu_of(device)
    kernel = codebook_tiles.kernel_for(cut(fmt), gpu, NAMES[dtype])
    if kernel is None:
        raise Unsupported(f"{fmt.spec}: no mma kernel fits this GPU: {gpu}")
    return kernel


@cache
def launch_of(
    kernel: CodebookKernel, device: torch.device, shape: tuple[int, int, int]
) -> tuple[int, int]:
    """CTAs for (M, N, K), and how many share K."""
    return codebook_tiles.grid(kernel.tile, kernel.cells, gpu_of(device), shape)
