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
from anybit.kernels.hopper import copies, tiles
from anybit.kernels.hopper.chip import H200, Chip, chip_of
from anybit.kernels.hopper.expert_tiles import (
    choose_few,
    choose_grouped,
    family_few,
    family_grouped,
)
from anybit.kernels.hopper.launch import GemmLauncher
from anybit.kernels.hopper.tile import Kernel, Tile, slow
from anybit.kernels.hopper.waves import Part, parts
from anybit.kernels.mma import linear as mma
from anybit.kernels.mma import tiles as mma_tiles

LONG = 20  # K tiles of two CTAs a multiprocessor with equal shares that bring them near the memory


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
        (n, k), chip = layer.shape, chip_of(layer.device)
        gpu = mma_tiles.gpu_of(layer.device)
        for m in (1, mma_tiles.NARROW):
            if narrow(m, n, k, d, chip):
                few = (mma_tiles.kernel_for(d, gpu, m, n, o) for o in outs)
                yield from (kernel for kernel in few if kernel)


def copy_kernels(d: Decoder, outputs: list[str]) -> list[KernelSpec]:
    """What decodes a weight once, where `copies.copies` may ask for it, and multiplies bytes."""
    if not tiles.may_copy(d):
        return []
    products = copies.copied_tiles() if d.slot == 8 else []
    return [copy_kernel(d), *(Kernel(copies.BYTES, t, o) for t in products for o in outputs)]


def copy_kernel(d: Decoder) -> mma_tiles.Kernel:
    return mma_tiles.Kernel(d, mma_tiles.DECODE, d.operand, "sm_90")


def small_kernels(d: Decoder, outputs: list[str], chip: Chip = H200) -> list[KernelSpec]:
    """Of `kernels/mma`: for experts with few tokens, and for 17 to 64 tokens of small weights."""
    gpu, every = tiles.gpu_for(chip), [*family_few(d, chip)]
    every += mma_tiles.family_small(d, gpu) if tiles.has_mma(d) else []
    found = [mma_tiles.kernel_of(d, gpu, tile, o) for tile in every for o in outputs]
    return [kernel for kernel in found if kernel]


def narrow(m: int, n: int, k: int, d: Decoder, chip: Chip = H200) -> bool:
    """Whether a product goes to `kernels/mma`, which read the same blobs: if all CTAs fit at once.

    They are 1.05 to 1.6 times as fast as these kernels then (benchmarks/results/h200_mma.csv), but
    slower where they take turns, unless `slow` (a trellis of 28672 rows took 29 us there and 35
    here) or these need a second wave for few tiles (int4 and fp6 of 34816 and 37888 rows: 1.15 to
    1.27 times as fast there). There tokens are read for every 32 rows: from 9 of 16 bits on,
    columns so long that each CTA here has `LONG` K tiles of equal shares are faster here. On sm_90,
    `mma.sync` has no products of fp8: the assembler converts to fp16, and spills.
    """
    if m > mma_tiles.NARROW or d.operand == "float8_e4m3fn" or d.sums:
        return False
    if slow(d):
        return True
    units = -(-n // ROWS) * k_tiles(k)
    if m > 8 and d.slot == 16 and units >= LONG * 2 * chip.multiprocessors:
        return False
    gpu = tiles.gpu_for(chip)
    tile = mma_tiles.narrow(d, gpu, m, n)
    if tile is None or mma_tiles.resident(tile, gpu, n):
        return tile is not None
    waves = -(-n // ROWS) / (2 * chip.multiprocessors)  # of these kernels
    return m <= 8 and d.slot == 16 and 1 < waves <= 1.2


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
    rows = copies.decoded_rows(k)
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
    problem = x_dtype, m, n, k, dtype, device
    if tile:
        return Way(own=own_launches(fmt, *problem, tile, experts))
    if not experts and narrow(m, n, k, d, chip):
        return Way(mma.chosen(fmt, activation, *problem, 0))
    if few := few_kernel(d, m, n, k, dtype, chip, experts):
        return Way(few)
    copy = copy_kernel(d) if not experts and copies.copies(d, m, n, k, chip) else None
    if copy and d.slot == 16:
        return Way(copy=copy)
    return Way(copy=copy, own=own_launches(fmt, *problem, None, experts, copy is not None))


def few_kernel(
    d: Decoder, m: int, n: int, k: int, dtype: torch.dtype, chip: Chip, experts: int
) -> tuple[mma_tiles.Kernel, int] | None:
    """The kernel of `kernels/mma` and its grid, where that is faster.

    For few tokens of experts, and for 17 to 64 tokens of a small weight.
    """
    gpu, tile = tiles.gpu_for(chip), None
    if experts:
        tile = choose_few(d, m, n, k, experts, chip)
    elif mma_tiles.NARROW < m <= mma_tiles.SMALL and tiles.has_mma(d):
        tile = mma_tiles.small(d, gpu, m, n, k)
    kernel = mma_tiles.kernel_of(d, gpu, tile, NAMES[dtype]) if tile else None
    return (kernel, mma_tiles.grid(kernel.tile, gpu, m, n, k, experts)) if kernel else None


def own_launches(
    fmt: Format,
    x_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None,
    experts: int,
    decoded: bool = False,
) -> tuple[Own, ...]:
    """This family's launches for a problem, or one with a tile instead of the rule's.

    decoded: the weight is a copy in bytes, which the kernel before writes: nothing may overlap.
    """
    d, chip = copies.BYTES if decoded else decoder_for(fmt, x_dtype), chip_of(device)
    if decoded:
        tile = copies.choose_copied(m, n, k, chip)
    if tile is None and experts:
        tile = choose_grouped(d, m, n, k, experts, chip)
    found = []
    for each, first, rows in [Part(tile, 0, n)] if tile else parts(d, m, n, k, chip):
        tile = tiles.fitted(each, d, experts > 0)
        function = loaded(Kernel(d, tile, NAMES[dtype], grouped=experts > 0), device.index)
        grid = tiles.grid(tile, m, rows, experts, chip)
        shared = tiles.workspace(tile, m, rows, grid)
        early = not decoded and tiles.overlaps(tile, d, m, rows, experts, chip)
        skipped = first // ROWS * k_tiles(k) * d.blob_bytes
        found.append(Own(function, first, whole(rows), skipped, grid, early, shared))
    return tuple(found)


@cache
def loaded(kernel: Kernel, device: int) -> GemmLauncher:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return GemmLauncher(path, device)
