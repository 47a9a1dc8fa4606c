"""Kernels of the `mma.sync` family as compiled, on the CPU: what their tests launch."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.kernels.cute import operands
from anybit.kernels.cute.jit import Compiled, KernelSpec
from anybit.kernels.hopper import build
from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import Gpu, Kernel, Tile
from anybit.kernels.reference import quantize_tokens
from tests.ptx.machine import Machine
from tests.ptx.state import InUse
from tests.specs import weight_of

KB = 1024
GPUS = {
    "A100": Gpu((8, 0), 108, 163 * KB, 164 * KB),
    "RTX 3090": Gpu((8, 6), 82, 99 * KB, 100 * KB),
    "RTX 4090": Gpu((8, 9), 128, 99 * KB, 100 * KB),
    "RTX 5090": Gpu((12, 0), 170, 99 * KB, 100 * KB),
    "H200": Gpu((9, 0), 132, 227 * KB, 228 * KB),
    "B200": Gpu((10, 0), 148, 227 * KB, 228 * KB),
}
Tokens = tuple[Tensor, Tensor | None, Tensor | None]  # codes, scale, sums


@cache
def built(scheme: str) -> frozenset[KernelSpec]:
    """Hopper's kernels of a scheme, which takes a second to ask for."""
    return frozenset(build.kernels_of(scheme))


@cache
def generated(kernel: KernelSpec, *constants: int) -> Compiled:
    """A kernel as compiled, which takes a second. constants: what tests change in its modules."""
    return kernel.generate()


def kernel_of(
    scheme: str, dtype: torch.dtype, tile: Tile, architecture: str = "sm_80", overlap: bool = False
) -> Kernel:
    fmt, activation = parse_scheme(scheme)
    operand = getattr(torch, operands.operand_of(activation, dtype))
    decoder = operands.decoder_for(fmt, operand)
    return Kernel(decoder, tile, operands.NAMES[dtype], architecture, overlap)


class Emulated:
    """A compiled kernel in the PTX machine."""

    def __init__(self, scheme: str, dtype: torch.dtype, kernel: Kernel):
        self.fmt, self.activation = parse_scheme(scheme)
        self.dtype, self.kernel = dtype, kernel
        made = generated(kernel)
        assert made.shared == tiles.shared_bytes(kernel.tile, kernel.decoder)
        self.ptx, self.shared = made.ptx, made.shared
        self.machine = Machine(self.ptx)

    def weight(self, n: int, k: int) -> Packed:
        return weight_of(self.fmt, torch.randn(n, k) * 0.02)

    def layout(self, packed: Packed) -> list[Tensor]:
        return operands.layout(packed, self.kernel.activation)

    def tokens(self, m: int, k: int) -> Tokens:
        x = torch.randn(m, k).to(self.dtype)
        if self.activation is None:
            return x, None, None
        codes, scale = quantize_tokens(x, self.activation)
        return codes, scale.flatten(), codes.float().sum(1).int()

    def run(
        self,
        x: Tokens,
        layout: list[Tensor],
        n: int,
        bias: Tensor | None = None,
        grid: int = 0,
        seed: int = 0,
        starts: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """y (M, N). grid: CTAs; 0: one a tile. starts: of the tokens of each expert.

        pairs: `Pairs.count`.
        """
        codes, scale, sums = x
        m, k = codes.shape
        tile = self.kernel.tile
        grid = grid or tiles.tiles_of(tile, m, n)
        y = torch.full((m, n), torch.nan, dtype=self.dtype)
        work = torch.full((2 * grid * tile.rows * tile.tokens,), torch.nan)
        counters = torch.zeros(grid, dtype=torch.int32)
        arguments = [
            self.used(codes),
            *(array(t) for t in [*layout, None][:4]),
            *(self.used(t) for t in (scale, sums, bias, y)),
            *(array(t) for t in (work, counters, starts)),
            self.used(pairs),
            *(m, n, k, 0 if starts is None else len(starts) - 1),
        ]
        self.machine.launch(arguments, grid, tile.threads, self.shared, seed=seed)
        assert not counters.any()
        return y

    def decode(self, layout: list[Tensor], shape: tuple[int, int]) -> Tensor:
        """W (N, K); or, in bytes, the blobs of all rows that the layout has."""
        n, k = shape
        y = torch.full(shape, torch.nan, dtype=self.dtype)
        if self.activation == "int8":
            n = len(layout[0]) * 128
            y = torch.zeros(*layout[0].shape[:2], 128 * 128, dtype=torch.uint8)
        grid = tiles.copy_grid(self.kernel.tile, n, k)
        given = (array(t) for t in [*layout, None][:4])
        arguments = [0, *given, 0, 0, 0, array(y), 0, 0, 0, 0, 1, n, k, 0]
        self.machine.launch(arguments, grid, self.kernel.tile.threads, self.shared)
        return y

    def used(self, tensor: Tensor | None) -> np.ndarray | InUse | int:
        """Memory that the previous kernel may still use where launches overlap."""
        found = array(tensor)
        return InUse(found) if self.kernel.overlap and isinstance(found, np.ndarray) else found


def array(tensor: Tensor | None) -> np.ndarray | int:
    """The memory of a tensor, which the machine writes to; 0 for none."""
    return 0 if tensor is None else tensor.view(torch.uint8).numpy()
