"""Hopper products of formats whose codes are numbers, and of many experts at once."""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.kernels.backend import COUNTS, Activations, LayerSpec, Prepared
from anybit.kernels.cute.counters import zeros
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.jit import KernelSpec, built, missing_kernels
from anybit.kernels.cute.operands import (
    NAMES,
    cut,
    decoder_for,
    offsets,
    operand_of,
    tokens,
    whole,
)
from anybit.kernels.cute.operands import prepare as prepare  # these three of this family too
from anybit.kernels.cute.operands import prepare_experts as prepare_experts
from anybit.kernels.cute.operands import refuse_format as refuse_format
from anybit.kernels.cute.pack import ROWS, k_tiles
from anybit.kernels.hopper import choices, tiles
from anybit.kernels.hopper.chip import H200, Chip, chip_of
from anybit.kernels.hopper.choices import Choice, Part
from anybit.kernels.hopper.expert_tiles import (
    choose_experts,
    family_few,
    family_grouped,
)
from anybit.kernels.hopper.launch import GemmLauncher
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.mma import linear as mma
from anybit.kernels.mma import tiles as mma_tiles


class Own(NamedTuple):
    """A launch of this family, for all rows of a weight or for some.

    Attributes:
        function: the loaded kernel.
        first: the row where it begins, a multiple of 256.
        rows: what it writes of each token, a multiple of 8.
        skipped: bytes of the weight before that row.
        grid: CTAs.
        overlap: whether it should begin before the kernel before it has ended.
        shared: numbers of the workspace.
    """

    function: GemmLauncher
    first: int
    rows: int
    skipped: int
    grid: int
    overlap: bool
    shared: int


class Way(NamedTuple):
    """How a problem is multiplied.

    Attributes:
        mma: the kernel of `kernels/mma` that does it, and its grid; None: another does.
        copy: the kernel that decodes the weight first; None: nothing does.
        own: this family's launches; none where `mma` or, after a copy, the library multiplies.
    """

    mma: tuple[mma_tiles.Kernel, int] | None = None
    copy: mma_tiles.Kernel | None = None
    own: tuple[Own, ...] = ()


def refuse_kernels(layer: LayerSpec) -> str | None:
    return missing_kernels(kernels_of(layer))


def kernels_of(layer: LayerSpec) -> Iterator[KernelSpec]:
    """All that may multiply a layer."""
    operands = NAMES if layer.dtype is None else [layer.dtype]
    decoders = {decoder(layer.format, operand_of(layer.activation, dtype)) for dtype in operands}
    for d in decoders:
        assert not isinstance(d, str)
        outs = [d.operand] if layer.activation is None else list(NAMES.values())
        yield from (Kernel(d, t, o) for t in tiles.family(d) for o in outs)
        yield from (Kernel(d, t, o, grouped=True) for t in family_grouped(d) for o in outs)
        yield from copy_kernels(d, outs) + small_kernels(d, outs, chip_of(layer.device))
        n, gpu = layer.shape[0], mma_tiles.gpu_of(layer.device)
        for m in (1, mma_tiles.NARROW) if tiles.has_mma(d) else ():
            few = (mma_tiles.kernel_for(d, gpu, m, n, o) for o in outs)
            yield from (kernel for kernel in few if kernel)


def copy_kernels(d: Decoder, outputs: list[str]) -> list[KernelSpec]:
    """What decodes a weight once, where that may be faster, and multiplies bytes."""
    if not tiles.may_copy(d):
        return []
    products = choices.copied_tiles() if d.slot == 8 else []
    return [copy_kernel(d), *(Kernel(choices.BYTES, t, o) for t in products for o in outputs)]


def copy_kernel(d: Decoder) -> mma_tiles.Kernel:
    return mma_tiles.Kernel(d, mma_tiles.DECODE, d.operand, "sm_90")


def small_kernels(d: Decoder, outputs: list[str], chip: Chip = H200) -> list[KernelSpec]:
    """Of `kernels/mma`: for experts with few tokens, and for 17 to 64 tokens."""
    gpu, every = tiles.gpu_for(chip), [*family_few(d, chip)]
    every += mma_tiles.family_small(d, gpu) if tiles.has_mma(d) else []
    found = [mma_tiles.kernel_of(d, gpu, tile, o) for tile in every for o in outputs]
    return [kernel for kernel in found if kernel]


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) in fp16 or bf16 -> (M, N)."""
    return multiply(*tokens(x, prepared), prepared, bias, x.dtype)


def linear_experts(x: Tensor | Activations, starts: Tensor, prepared: Prepared) -> Tensor:
    """x (M, K) in fp16 or bf16, sorted by expert -> (M, N)."""
    return multiply(*tokens(x, prepared), prepared, None, x.dtype, starts=starts)


def multiply(
    x: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    prepared: Prepared,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    overlap: bool | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """One launch, or two: x (M, K) as the tensor core takes it -> (M, N) in `dtype`.

    scale (M,) fp32 and sums (M,) int32 belong to quantized activations. tile: instead of the
    table's. overlap: programmatic dependent launch, or not; None leaves it to `tiles.overlaps`.
    starts (experts + 1,) int32, on the device: tokens starts[e] to starts[e + 1] meet the weights
    of expert e; `prepared` is `prepare_experts`'s then, and there is no bias.
    """
    m, (n, k), device = x.shape[0], prepared.shape, x.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiply(x, scale, sums, prepared, bias, dtype, tile, overlap, starts)
    if not m:
        return torch.empty(0, n, dtype=dtype, device=device)
    experts = 0 if starts is None else len(starts) - 1
    way = chosen(
        prepared.format, prepared.activation, x.dtype, m, n, k, dtype, device, tile, experts
    )
    if way.mma:
        return mma.multiply(x, scale, sums, prepared, bias, dtype, *way.mma, starts)
    if not way.own:
        assert way.copy is not None
        return multiply_decoded(x, way.copy, prepared, offsets(bias, n, dtype))
    blobs, row_scale, row_zero = prepared.layout
    if way.copy:
        blobs = mma.decoded(x, way.copy, prepared)
    wide = whole(n)
    y = torch.empty(m, wide, dtype=dtype, device=device)
    bias = offsets(bias, wide, dtype)
    for function, first, rows, skipped, grid, best, shared in way.own:
        _work, workspace = meeting_place(shared, grid, device)
        function.launch(
            x,
            (
                blobs.data_ptr() + skipped,
                row_scale.data_ptr() + 4 * first,
                row_zero.data_ptr() + 4 * first,
                0 if scale is None else scale.data_ptr(),
                0 if sums is None else sums.data_ptr(),
                0 if bias is None else bias.data_ptr() + 2 * first,
                y.data_ptr() + 2 * first,
                0 if starts is None else starts.data_ptr(),
            ),
            rows,
            grid,
            best if overlap is None else overlap,
            experts,
            workspace,
            wide,
        )
    return cut(y, n)


def multiply_decoded(
    x: Tensor, kernel: mma_tiles.Kernel, prepared: Prepared, bias: Tensor | None
) -> Tensor:
    """The library's products with a decoded weight, or with some of its rows at a time."""
    n, k = prepared.shape
    rows = choices.decoded_rows(k)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    blobs, *of_rows = prepared.layout
    for start in range(0, n, rows):
        end = min(start + rows, n)
        layout = (blobs[start // ROWS : -(-end // ROWS)], *(r[start:end] for r in of_rows))
        part = prepared._replace(shape=(end - start, k), layout=layout)
        w, out = mma.decoded(x, kernel, part).T, y[:, start:end]
        if bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias[start:end], x, w, out=out)
    return y


def meeting_place(
    numbers: int, grid: int, device: torch.device
) -> tuple[Tensor | None, tuple[int, int]]:
    """Where sums of `shares.py` meet, to be kept for the launch; its address and the counters'.

    Fewer tiles are shared than there are CTAs, and each of a tile's eight warps counts.
    """
    if not numbers:
        return None, (0, 0)
    work = torch.empty(numbers, dtype=torch.float32, device=device)
    return work, (work.data_ptr(), zeros(8 * grid, device))


@lru_cache(COUNTS)
def chosen(
    fmt: Format,
    activation: str | None,
    x_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None,
    experts: int,
) -> Way:
    """How a problem is multiplied: by the rules, or with a tile; every launch asks it."""
    d, chip = decoder_for(fmt, x_dtype), chip_of(device)
    gpu, output = tiles.gpu_for(chip), NAMES[dtype]
    if tile:
        choice = Choice(parts=(Part(tile, 0, n),))
    elif experts:
        found = choose_experts(d, m, n, k, experts, chip)
        choice = Choice(parts=(Part(found, 0, n),)) if isinstance(found, Tile) else Choice(found)
    else:
        choice = choices.choose(d, m, n, k, chip)
    if choice.few:
        kernel = mma_tiles.kernel_of(d, gpu, choice.few, output)
        assert kernel is not None
        return Way((kernel, mma_tiles.grid(choice.few, gpu, m, n, k, experts)))
    copy = copy_kernel(d) if choice.copy else None
    if copy:
        d = choices.BYTES
    return Way(copy=copy, own=own_launches(d, choice, m, k, output, device, experts))


def own_launches(
    d: Decoder, choice: Choice, m: int, k: int, output: str, device: torch.device, experts: int
) -> tuple[Own, ...]:
    """This family's launches for a choice. Behind one that writes a copy, nothing may overlap."""
    chip, found = chip_of(device), []
    for each, first, rows in choice.parts:
        tile = tiles.fitted(each, d, experts > 0)
        function = loaded(Kernel(d, tile, output, grouped=experts > 0), device.index)
        grid = tiles.grid(tile, m, rows, experts, chip)
        shared = tiles.workspace(tile, m, rows, grid)
        early = not choice.copy and tiles.overlaps(tile, d, m, rows, experts, chip)
        skipped = first // ROWS * k_tiles(k) * d.blob_bytes
        found.append(Own(function, first, whole(rows), skipped, grid, early, shared))
    return tuple(found)


@cache
def loaded(kernel: Kernel, device: int) -> GemmLauncher:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return GemmLauncher(path, device)
