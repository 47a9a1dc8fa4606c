"""The tile of `single.py` for a weight, and its launch: a token that comes in 16 bits."""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.kernels.backend import Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.operands import NAMES, aligned, decoder_for
from anybit.kernels.cute.pack import k_tiles
from anybit.kernels.mma import linear, tiles
from anybit.kernels.mma.tiles import Gpu, Tile

COLUMNS = (4096, 6144, 8192, 12288, 16384, 20480, 24576, 32768)  # for which there are kernels
MOST_LOTS = 16  # pieces of a token that a thread's registers hold


def single(decoder: Decoder, gpu: Gpu, n: int, k: int) -> Tile | None:
    """The rule's tile for a token in int8, which quantizes it too; None where K is too long."""
    few = tiles.narrow(decoder, gpu, 1, n)
    return None if few is None else quantizing(few, decoder, gpu, k)


def quantizing(few: Tile, decoder: Decoder, gpu: Gpu, k: int) -> Tile | None:
    """A narrow tile that quantizes a token of K columns, as often on a multiprocessor; or None."""
    columns = next((c for c in COLUMNS if c >= k_tiles(k) * K_TILE), 0)
    if k % 8 or not columns or columns > MOST_LOTS * 2 * K_TILE * few.warps:
        return None
    tile = replace(few, tokens=1, kind="single", columns=columns)
    # Beside a table, more stages than the rule's let tokens wait behind weights.
    most = few.stages if decoder.table_bytes else 5
    found = tiles.fitted(tile, decoder, gpu, 2, most)
    return found if found and found.ctas == few.ctas else None


def multiply(
    x: Tensor, prepared: Prepared, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """One token x (1, K) in fp16 or bf16, quantized to int8, times a weight -> (1, N)."""
    (n, k), gpu = prepared.shape, tiles.gpu_of(x.device)
    decoder = decoder_for(prepared.format, torch.int8)
    tile = tile or single(decoder, gpu, n, k)
    assert tile is not None
    kernel = tiles.kernel_of(decoder, gpu, tile, NAMES[x.dtype])
    assert kernel is not None
    launch = linear.launch_of(kernel, gpu, x.device, 1, n, k)
    return products.multiply(aligned(x), None, None, prepared.layout, bias, n, x.dtype, [launch])
