"""Few tokens times a weight in 16 bits as it comes, for layers that are not quantized.

Reading the weight is all the time it takes, and the library leaves some of it: its kernels wait for
the previous one before they read anything, and have too few bytes on their way.

Gate and up of an MLP are one weight; `gated` makes SiLU(gate) * up of their products at once.
"""

from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from anybit.kernels.backend import COUNTS, HALVES, refuse_vendor
from anybit.kernels.choice import cycles
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.driver import Launcher
from anybit.kernels.cute.jit import missing_kernels
from anybit.kernels.cute.launch import loaded
from anybit.kernels.cute.operands import NAMES, aligned, cut, offsets, whole
from anybit.kernels.cute.products import on_its_device
from anybit.kernels.hopper.chip import Chip, chip_of
from anybit.kernels.hopper.tiles import gpu_for
from anybit.kernels.mma import tiles, work
from anybit.kernels.mma.tiles import NARROW, Kernel, Tile


class Whole(Decoder):
    """Of weights in 16 bits as they come, which are operands."""

    cost, instructions = 1.0, 0


PLAIN = {name: Whole(name, tuple(range(16))) for name in NAMES.values()}


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` multiplies x (M, K) and weight (N, K), and fast."""
    few = x.ndim == 2 and 0 < len(x) <= NARROW
    halves = few and x.dtype in HALVES and weight.dtype == x.dtype
    lies = halves and weight.is_contiguous() and not weight.shape[1] % 8
    return lies and weight.numel() > 0 and not weight.data_ptr() % 16 and runs_on(weight.device)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device, and can be had."""
    if refuse_vendor() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return missing_kernels(kernels(chip_of(device))) is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """x (M, K) and weight (N, K) that suit -> (M, N). tile: instead of the choice's."""
    return multiply(aligned(x), weight, bias, tile, 1)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """SiLU(gate) * up (M, N / 2) of what `linear` gives: of its first half and of the other."""
    return multiply(aligned(x), weight, bias, tile, 2)


@on_its_device
def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None, parts: int
) -> Tensor:
    """x (M, K), in whole rows of 16 bytes, times a weight of 1 part, or of 2: gate and up."""
    (m, k), rows = x.shape, len(weight) // parts
    launcher, grid = chosen(x.dtype, m, len(weight), k, x.device, tile, parts)
    n = whole(rows)
    y = x.new_empty(m, n)
    bias = offsets(bias, n if parts == 1 else 2 * rows, x.dtype)
    values = {"x": x, "w": weight, "bias": bias, "y": y, "m": m, "n": n, "k": k, "rows": rows}
    launcher.launch(values, grid, True)
    return cut(y, rows)


@lru_cache(COUNTS)
def chosen(
    dtype: torch.dtype, m: int, n: int, k: int, device: torch.device, tile: Tile | None, parts: int
) -> tuple[Launcher, int]:
    """What is launched for a problem, and its grid; every product asks it."""
    chip = chip_of(device)
    tile = replace(tile or choose(m, n, k, chip), kind="plain" if parts == 1 else "gated")
    return loaded(kernel_of(NAMES[dtype], tile, chip), device.index), tiles.tiles_of(tile, m, n)


def kernels(chip: Chip) -> list[Kernel]:
    """All that may be launched."""
    every = [tile for m in (1, NARROW) for tile in family(m, chip)]
    every += [replace(tile, kind="gated") for tile in every]
    return [kernel_of(name, tile, chip) for name in NAMES.values() for tile in every]


def kernel_of(name: str, tile: Tile, chip: Chip) -> Kernel:
    found = tiles.kernel_of(PLAIN[name], gpu_for(chip), tile, name)
    assert found is not None
    return found


def choose(m: int, n: int, k: int, chip: Chip) -> Tile:
    """The tile of the least time."""
    d, gpu = PLAIN["bfloat16"], gpu_for(chip)

    def time(tile: Tile) -> float:
        return cycles(work.of_narrow(tile, d, gpu, m, n, k), chip.read)

    return min(family(m, chip), key=time)


@cache
def family(m: int, chip: Chip) -> list[Tile]:
    """Tiles for M tokens. Two stages are slower, where three fit: a warp waits for each K tile."""
    tokens, shapes = 8 if m <= 8 else 16, [(2, 4, 1), (1, 4, 2), (1, 4, 3), (1, 8, 1)]
    shapes += [(4, 4, 1)] if m <= 8 else []
    every = [Tile(tokens, s, w, ctas=c, kind="plain") for s, w, c in shapes]
    found = (tiles.fitted(tile, PLAIN["bfloat16"], gpu_for(chip), 2, 5) for tile in every)
    return [tile for tile in found if tile]
