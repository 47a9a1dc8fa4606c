"""Hopper products of formats whose codes are numbers, and of many experts at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.kernels import tuned
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import products
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.jit import KernelSpec, missing_kernels
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import (
    NAMES,
    decoder_for,
    offsets,
    operand_of,
    tokens,
    whole,
)
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.cute.products import Launch, on_its_device
from anybit.kernels.hopper import choices, tiles
from anybit.kernels.hopper.chip import Chip, chip_of
from anybit.kernels.hopper.choices import Choice
from anybit.kernels.hopper.expert_tiles import (
    choose_experts,
    family_few,
    family_grouped,
)
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.mma import linear as mma
from anybit.kernels.mma import single_tiles
from anybit.kernels.mma import tiles as mma_tiles


class Way(NamedTuple):
    """How a problem is multiplied.

    Attributes:
        launches: Of this family, or of `kernels/mma`; none where, after a copy, the library
            multiplies.
        copy: The kernel that decodes the weight first; None: nothing does.
    """

    launches: tuple[Launch, ...] = ()
    copy: mma_tiles.Kernel | None = None


def refuse_kernels(layer: LayerSpec) -> str | None:
    return missing_kernels(kernels_of(layer))


def kernels_of(layer: LayerSpec) -> Iterator[KernelSpec]:
    """All that may multiply a layer."""
    operands = NAMES if layer.dtype is None else [layer.dtype]
    decoders = {decoder(layer.format, operand_of(layer.activation, dtype)) for dtype in operands}
    for d in decoders:
        assert not isinstance(d, str)
        yield from kernels_for(d, layer.activation, chip_of(layer.device), [layer.shape[0]])


def kernels_for(
    d: Decoder, activation: str | None, chip: Chip, rows: Iterable[int]
) -> Iterator[KernelSpec]:
    """All kernels of a decoder, for any number of tokens and these numbers of rows."""
    gpu, copied = tiles.gpu_for(chip), tiles.may_copy(d)
    if copied:
        yield copy_kernel(d)
    of_bytes = choices.copied_tiles() if copied and d.slot == 8 else ()  # after a copy in bytes
    few = [*family_few(d, chip)]
    if tiles.has_mma(d):
        narrow = (mma_tiles.choose(d, gpu, m, n) for m in mma_tiles.FEW for n in rows)
        few += [tile for tile in narrow if tile] + [*mma_tiles.family_small(d, gpu)]
    for out in [d.operand] if activation is None else NAMES.values():
        yield from (Kernel(choices.BYTES, tile, out) for tile in of_bytes)
        yield from (Kernel(d, tile, out) for tile in tiles.family(d))
        yield from (Kernel(d, tile, out, grouped=True) for tile in family_grouped(d))
        found = (mma_tiles.kernel_of(d, gpu, tile, out) for tile in few)
        yield from (kernel for kernel in found if kernel)


def quantizing_kernels(layer: LayerSpec) -> Iterator[KernelSpec]:
    """What may multiply one token of a layer in int8, and quantizes it; none that cannot be had."""
    d, chip = decoder_for(layer.format, torch.int8), chip_of(layer.device)
    found = (quantizing_kernel(d, chip, *layer.shape, output) for output in NAMES.values())
    return (kernel for kernel in found if kernel)


def quantizing_kernel(
    d: Decoder, chip: Chip, n: int, k: int, output: str
) -> mma_tiles.Kernel | None:
    """The kernel that does it for a weight (n, k)."""
    gpu = tiles.gpu_for(chip)
    few = mma_tiles.choose(d, gpu, 1, n) if tiles.has_mma(d) else None
    tile = few and single_tiles.quantizing(few, d, gpu, k)
    kernel = tile and mma_tiles.kernel_of(d, gpu, tile, output)
    return kernel if kernel and not missing_kernels([kernel]) else None


def copy_kernel(d: Decoder) -> mma_tiles.Kernel:
    return mma_tiles.Kernel(d, mma_tiles.DECODE, d.operand, "sm_90")


def candidates(x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
    """See `Backend.candidates`."""
    given = tokens(x, prepared)
    d, chip = decoder_for(prepared.format, given[0].dtype), chip_of(x.device)

    def call(way: Choice) -> Callable[[Prepared], Tensor]:
        return lambda weight: on_its_device(multiply)(*given, weight, None, x.dtype, way)

    return {way.name: call(way) for _, way in choices.ways(d, len(x), *prepared.shape, chip)}


def multiply(
    x: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    prepared: Prepared,
    bias: Tensor | None,
    dtype: torch.dtype,
    choice: Choice | None = None,
    starts: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """x (M, K) as the tensor core takes it -> (M, N) in `dtype`.

    Args:
        x: Contiguous.
        scale: (M,) fp32, and `sums` (M,) int32: of quantized activations.
        prepared: By `operands.prepare`.
        bias: (N,), or None.
        dtype: Of y.
        choice: Instead of the rules'.
        starts: (experts + 1,) int32, on the device: tokens starts[e] to starts[e + 1] meet the
            weights of expert e. `prepared` is `operands.prepare_experts`'s then; there is no bias.
        pairs: As in `products.multiply`.
    """
    m, (n, k) = x.shape[0], prepared.shape
    if not m:
        return x.new_empty(0, n, dtype=dtype)
    experts, fmt = 0 if starts is None else len(starts) - 1, prepared.format
    way = chosen(fmt, prepared.activation, x.dtype, m, n, k, dtype, x.device, choice, experts)
    if not way.launches:
        assert way.copy is not None
        return multiply_decoded(x, way.copy, prepared, offsets(bias, n, dtype))
    w, *of_rows = prepared.layout
    if way.copy:
        w = mma.decoded(x, way.copy, prepared)
    layout = w, *of_rows
    return products.multiply(x, scale, sums, layout, bias, n, dtype, way.launches, starts, pairs)


def multiply_decoded(
    x: Tensor,
    kernel: mma_tiles.Kernel,
    prepared: Prepared,
    bias: Tensor | None,
) -> Tensor:
    """The library's products with a decoded weight, or with some of its rows at a time."""
    n, k = prepared.shape
    rows = choices.decoded_rows(k)
    y = x.new_empty(len(x), n)
    blobs, row_scale, row_zero, *table = prepared.layout
    for start in range(0, n, rows):
        end = min(start + rows, n)
        of_rows = (r[start:end] for r in (row_scale, row_zero))
        layout = (blobs[start // ROWS : -(-end // ROWS)], *of_rows, *table)
        part = prepared._replace(shape=(end - start, k), layout=layout)
        w, out = mma.decoded(x, kernel, part).T, y[:, start:end]
        if bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias[start:end], x, w, out=out)
    return y


@tuned.cached
def quantizing(
    fmt: Format, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> Launch | None:
    """The launch for one token in `dtype` that it quantizes to int8; None: it is quantized before.

    `anybit build` does not know K, so its kernel may be missing.
    """
    d, chip = decoder_for(fmt, torch.int8), chip_of(device)
    cell = tuned.cell_of("hopper", fmt, "int8", dtype, n, k)
    if not choices.choose(d, 1, n, k, chip, tuned.winner(cell, 1, device)).few:
        return None
    kernel = quantizing_kernel(d, chip, n, k, NAMES[dtype])
    return mma.launch_of(kernel, tiles.gpu_for(chip), device, 1, n, k) if kernel else None


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
    choice: Choice | None,
    experts: int,
) -> Way:
    """How a problem is multiplied: by the rules, or as told; every launch asks it."""
    d, chip = decoder_for(fmt, x_dtype), chip_of(device)
    gpu, output = tiles.gpu_for(chip), NAMES[dtype]
    if choice is None and experts:
        found = choose_experts(d, m, n, k, experts, chip)
        choice = choices.one(found, n) if isinstance(found, Tile) else Choice(found)
    elif choice is None:
        cell = tuned.cell_of("hopper", fmt, activation, dtype, n, k)
        choice = choices.choose(d, m, n, k, chip, tuned.winner(cell, m, device))
    if choice.few:
        kernel = mma_tiles.kernel_of(d, gpu, choice.few, output)
        assert kernel is not None
        return Way((mma.launch_of(kernel, gpu, device, m, n, k, experts),))
    copy = copy_kernel(d) if choice.copy else None
    if copy:
        d = choices.BYTES
    return Way(launches_of(d, choice, m, k, output, device, experts), copy)


def launches_of(
    d: Decoder, choice: Choice, m: int, k: int, output: str, device: torch.device, experts: int = 0
) -> tuple[Launch, ...]:
    """This family's launches for a choice. Behind one that writes a copy, nothing may overlap."""
    chip, found = chip_of(device), []
    for each, first, rows in choice.parts:
        tile = tiles.fitted(each, d, experts > 0)
        kernel = loaded(Kernel(d, tile, output, grouped=experts > 0), device.index)
        grid = tiles.grid(tile, m, rows, experts, chip)
        early = not (choice.copy or experts) and tiles.overlaps(tile, d, m, rows, chip)
        skipped = first // ROWS * k_tiles(k) * d.blob_bytes
        # Fewer tiles are shared than there are CTAs, and each of a tile's eight warps counts.
        work = tiles.workspace(tile, m, rows, grid)
        found.append(Launch(kernel, grid, early, whole(rows), first, skipped, work, 8 * grid))
    return tuple(found)
