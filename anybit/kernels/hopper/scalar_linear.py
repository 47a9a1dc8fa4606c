"""Hopper products of formats whose codes are numbers, and of many experts at once."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.cute.decode import decoder
from anybit.kernels.cute.jit import built, kernel_file, missing_kernels
from anybit.kernels.cute.operands import (
    NAMES,
    cut,
    decoder_for,
    offsets,
    operand_of,
    prepare,
    tokens,
    whole,
)
from anybit.kernels.cute.operands import refuse_format as refuse_format  # of this family too
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.expert_tiles import choose_grouped, family_grouped
from anybit.kernels.hopper.launch import GemmLauncher
from anybit.kernels.hopper.tiles import Kernel, Tile
from anybit.kernels.mma import linear as mma
from anybit.kernels.mma import tiles as mma_tiles

# Whether few tokens go to the kernels of `kernels/mma`, which read the same blobs. With the tiles
# that their rule names, they were 1.13 to 1.6 times as fast as these on three of four weights
# (benchmarks/results/h200_mma.csv); no engine has run on them yet.
NARROW = False


def refuse_kernels(layer: LayerSpec) -> str | None:
    activation = layer.activation
    d = decoder(layer.format, operand_of(activation, torch.bfloat16))
    assert not isinstance(d, str)
    outs = [d.operand] if activation is None else NAMES.values()
    kernels = [Kernel(d, t, o) for t in tiles.family(d) for o in outs]
    kernels += [Kernel(d, t, o, grouped=True) for t in family_grouped(d) for o in outs]
    files = [kernel_file(kernel) for kernel in kernels]
    if narrow(1, n := layer.shape[0], d.operand):
        gpu = mma_tiles.gpu_of(layer.device)
        few = [mma_tiles.kernel_for(d, gpu, m, n, o) for m in (1, mma_tiles.NARROW) for o in outs]
        files += [kernel_file(kernel) for kernel in few if kernel]
    return missing_kernels(files)


def narrow(m: int, n: int, operand: str) -> bool:
    """Whether a product goes to `kernels/mma`: its CTAs must all be resident at once.

    Two of 32 rows and eight warps find room on a multiprocessor. Where they take turns (28672
    rows), a prototype was 4 to 10 % slower than these kernels. On sm_90, `mma.sync` has no products
    of fp8: the assembler converts to fp16, and spills.
    """
    few = m <= mma_tiles.NARROW and -(-n // 32) <= 2 * tiles.MULTIPROCESSORS
    return NARROW and few and operand != "float8_e4m3fn"


def prepare_experts(
    experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
) -> Prepared:
    """The layouts of all experts' weights, one behind the other."""
    if len(experts) > tiles.MOST_EXPERTS:
        raise InvalidInput(f"{len(experts)} experts; the hopper kernels take {tiles.MOST_EXPERTS}")
    kinds = {(e.format, e.shape) for e in experts}
    if len(kinds) != 1:
        raise InvalidInput(f"experts must have one format and shape, not {len(kinds)}")
    parts = [prepare(e, activation, dtype) for e in experts]
    blobs, *rows = zip(*(p.layout for p in parts), strict=True)
    # torch cannot join fp8 tensors; their bytes are the same.
    joined = torch.cat([b.view(torch.uint8) for b in blobs]).view(blobs[0].dtype)
    return parts[0]._replace(layout=(joined, *(torch.cat(r) for r in rows)))


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
    """One launch: x (M, K) as the tensor core takes it -> (M, N) in `dtype`.

    scale (M,) fp32 and sums (M,) int32 belong to quantized activations. tile: instead of the
    table's. overlap: programmatic dependent launch, or not; None leaves it to `tiles.overlaps`.
    starts (experts + 1,) int32, on the device: tokens starts[e] to starts[e + 1] meet the weights
    of expert e; `prepared` is `prepare_experts`'s then, and there is no bias.
    """
    m, (n, k) = len(x), prepared.shape
    device = x.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiply(x, scale, sums, prepared, bias, dtype, tile, overlap, starts)
    if starts is None and tile is None and narrow(m, n, str(x.dtype).removeprefix("torch.")):
        return mma.multiply(x, scale, sums, prepared, bias, dtype)
    wide = whole(n)
    y = torch.empty(m, wide, dtype=dtype, device=x.device)
    if not m:
        return cut(y, n)
    bias = offsets(bias, wide, dtype)
    experts = 0 if starts is None else len(starts) - 1
    function, grid, best = chosen(prepared.format, x.dtype, m, n, k, dtype, device, tile, experts)
    blobs, row_scale, row_zero = prepared.layout
    function.launch(
        x,
        (
            blobs.data_ptr(),
            row_scale.data_ptr(),
            row_zero.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if starts is None else starts.data_ptr(),
        ),
        wide,
        grid,
        best if overlap is None else overlap,
        experts,
    )
    return cut(y, n)


@cache
def chosen(
    fmt: Format,
    x_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: int,
    tile: Tile | None,
    experts: int,
) -> tuple[GemmLauncher, int, bool]:
    """The loaded kernel for a problem, its grid, and whether launches should overlap."""
    d = decoder_for(fmt, x_dtype)
    if tile is None:
        tile = choose_grouped(d, m, n, k, experts) if experts else tiles.choose(d, m, n, k)
    tile = tiles.fitted(tile, d, experts > 0)
    function = loaded(Kernel(d, tile, NAMES[dtype], grouped=experts > 0), device)
    return function, tiles.grid(tile, m, n, experts), tiles.overlaps(tile, d, m, n, experts)


@cache
def loaded(kernel: Kernel, device: int) -> GemmLauncher:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return GemmLauncher(path, device)
