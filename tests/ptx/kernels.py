"""Four compiled kernels, small problems for them, and their results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.cute import operands
from anybit.kernels.hopper.tile import Tile
from tests.kernels import test_hopper_codebook as codebook
from tests.kernels.test_hopper_emulated import Emulated, packed_weight
from tests.ptx.machine import Machine


@dataclass
class Case:
    """A kernel's PTX, and what to do with it or with a mutant: (PTX, seed) -> outputs."""

    ptx: str
    run: Callable[[str, int], Tensor]


@cache
def gemm() -> Case:
    """Two CTAs that share a tile's K range; a ring of two stages, used twice."""
    torch.manual_seed(0)
    n, k = 128, 1024
    emulated = Emulated("liquid@int8", torch.float16, Tile(16, ctas=2, split=2, stages=2))
    prepared = operands.layout(packed_weight("liquid@int8", n, k), "int8")
    return _emulated(emulated, prepared, (16, n, k), 2)


@cache
def alone() -> Case:
    """A CTA that shares its tile with no other, so that only its own barriers order its warps."""
    torch.manual_seed(0)
    n, k = 128, 512
    emulated = Emulated("int4@int8", torch.float16, Tile(8, stages=4))
    prepared = operands.layout(packed_weight("int4@int8", n, k), "int8")
    return _emulated(emulated, prepared, (8, n, k), 1)


def _emulated(
    emulated: Emulated, prepared: list[Tensor], shape: tuple[int, int, int], grid: int
) -> Case:
    m, n, k = shape
    x = emulated.tokens(m, k)

    def run(ptx: str, seed: int) -> Tensor:
        emulated.machine = Machine(ptx)
        return emulated.run(x, prepared, n, grid, seed=seed)

    return Case(emulated.ptx, run)


@cache
def lookups() -> Case:
    """A codebook's centroids in shared memory; five row tiles, eight tokens."""
    return _codebook(codebook.Case(4, 1, 128, 8, torch.float16, (5, 72, 512), 2, 1))


@cache
def psumbook() -> Case:
    """Inner products with a codebook's centroids; one token."""
    return _codebook(codebook.Case(8, 1, 1024, 1, torch.float16, (1, 40, 1024), 2, 1))


def _codebook(case: codebook.Case) -> Case:
    torch.manual_seed(0)
    m, n, k = case.shape
    kernel = codebook.kernel_for(case)
    packed = codebook.random_packed(codebook.codebook(case.v, case.m, case.group), n, k)
    x = torch.randn(m, k).to(case.dtype)

    def run(ptx: str, seed: int) -> Tensor:
        return codebook.emulate(kernel, packed, x, None, case.cluster, case.teams, seed, ptx)

    return Case(codebook.compiled(kernel)[0], run)
