"""Codebooks and many tokens on Hopper: look-ups in the main loop, emulated on the CPU."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.cute import cubin, jit
from anybit.kernels.cute.cells import pack
from anybit.kernels.hopper import build, tiles
from anybit.kernels.hopper.codebook_tiles import Plan
from anybit.kernels.hopper.lookup import LookupDecoder, WideTile, lookup
from anybit.kernels.hopper.lookup import choose as choose_lookup
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.hopper.tiles import RESERVED, SHARED_OF_SM
from anybit.kernels.reference import operand_weight
from tests.kernels.test_hopper_codebook import (
    BRAIN,
    HALF,
    VARIANTS,
    array,
    codebook,
    error,
    in_use,
    needs_dsl,
    random_packed,
)
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine
from tests.ptx.state import Parameter, TensorMap

LOOKUPS = [
    (4, 1, 32, BRAIN, Tile(64, split=2), (17, 128, 384), 2),
    (16, 3, 128, BRAIN, Tile(32), (7, 128, 384), 1),
    (4, 1, 4, BRAIN, Tile(32), (9, 128, 260), 1),  # fine groups: of one vector
    (8, 1, 24, HALF, Tile(32), (9, 128, 528), 1),  # of three, which are scaled one by one
    (8, 2, 64, HALF, Tile(32, stages=4, columns=64, stream_k=True), (20, 296, 384), 2),
]
if EVERY_KERNEL:
    LOOKUPS += [
        (8, 2, 64, BRAIN, Tile(32), (18, 128, 320), 1),
        (4, 1, 128, HALF, Tile(32, split=3), (9, 392, 384), 1),
        (8, 2, 128, HALF, Tile(32, stream_k=True), (20, 296, 512), 2),
        (16, 3, 32, HALF, Tile(32), (9, 128, 544), 1),
        (4, 1, 128, HALF, Tile(32, stages=5, columns=64), (40, 136, 384), 2),
        (8, 2, 64, BRAIN, Tile(32, stages=4, columns=64, stream_k=True), (20, 296, 640), 2),
        (4, 1, 128, HALF, Tile(32), (40, 264, 256), 2),
        (8, 2, 128, HALF, Tile(64), (20, 136, 512), 1),
        (8, 1, 0, HALF, Tile(64, split=4), (70, 128, 456), 1),
        (8, 4, 512, HALF, Tile(32, split=2), (19, 128, 512), 1),
    ]


@cache
def lookup_program(d: LookupDecoder, tile: Tile) -> jit.Compiled:
    kernel = Kernel(d, tile, d.operand)
    made = kernel.generate()
    assert jit.checked(kernel, made)  # also that no product waits for the one before it
    return made


def emulate_lookups(
    packed: Packed, x: Tensor, bias: Tensor | None, tile: Tile, seed: int = 0, grid: int = 0
) -> Tensor:
    (m, k), n = x.shape, packed.shape[0]
    d = lookup(packed.format, x.dtype)
    assert isinstance(d, LookupDecoder)
    tile = tiles.fitted(tile, d)
    ptx, made, shared = lookup_program(d, tile)
    assert cubin.resources(made)[1] == 0  # no spills
    blocks, row_scale, book = pack(packed)
    y = torch.full((m, n), torch.nan, dtype=x.dtype)
    grid = grid or (2 if tile.stream_k else tiles.grid(tile, m, n))
    work = torch.full((tiles.workspace(tile, m, n, grid),), torch.nan)
    counters = torch.zeros(8 * grid, dtype=torch.int32)
    arguments: list[Parameter] = [
        TensorMap(x.view(torch.uint8).numpy().reshape(m, 2 * k), tile.tokens, 2, in_use=True), 0,
        array(blocks), array(row_scale), 0, array(book.to(x.dtype)), 0, 0, array(bias), in_use(y),
        0, in_use(work), in_use(counters), 0, m, n, n, k, 1, 1,
    ]  # fmt: skip
    Machine(ptx).launch(arguments, grid, tile.threads, shared, tile.split, seed)
    assert not y.isnan().any(), "outputs that nobody wrote"
    assert not counters.any()
    return y


@needs_dsl
@pytest.mark.parametrize(("v", "m", "group", "dtype", "tile", "shape", "seeds"), LOOKUPS)
def test_lookups_of_many_tokens(
    v: int,
    m: int,
    group: int,
    dtype: torch.dtype,
    tile: Tile,
    shape: tuple[int, int, int],
    seeds: int,
) -> None:
    tokens, n, k = shape
    torch.manual_seed(n + k)
    packed = random_packed(codebook(v, m, group), n, k)
    x, bias = torch.randn(tokens, k).to(dtype), torch.randn(n).to(dtype)
    y = emulate_lookups(packed, x, bias, tile)
    want = x.double() @ operand_weight(packed, dtype).double().T + bias.double()
    # y is rounded, and weights with their scales; in bf16 also scales, and centroids one by one.
    assert error(y, want) < (7e-4 if dtype == HALF else 6e-3)
    for seed in range(1, seeds):
        assert torch.equal(emulate_lookups(packed, x, bias, tile, seed), y)
    if seeds > 1 and tile.split == 1:  # fewer CTAs than tiles: each does several
        alone = emulate_lookups(packed, x, bias, tile, grid=1)
        assert error(alone, y.double()) < 4e-4 if tile.stream_k else torch.equal(alone, y)


SHARES: list[tuple[int, int, Tile]] = [
    (4, 1, WideTile(192, columns=64)),
    *[(8, 2, Tile(256, columns=64)), (16, 3, WideTile(192, columns=64))] * EVERY_KERNEL,
    *[(8, 1, WideTile(192))] * EVERY_KERNEL,
]


@needs_dsl
@pytest.mark.parametrize(("v", "m", "tile"), SHARES)
def test_lookups_in_equal_shares(v: int, m: int, tile: Tile) -> None:
    """Three CTAs for two tiles: one has parts of both, and sums meet in the workspace.

    Two K tiles, as so many tokens leave, call what comes next into the L2, nothing behind it.
    """
    torch.manual_seed(0)
    packed, x = random_packed(codebook(v, m), 256, 1024), torch.randn(20, 1024).half()
    y = emulate_lookups(packed, x, None, replace(tile, stream_k=True), grid=3)
    assert error(y, x.double() @ operand_weight(packed, HALF).double().T) < 7e-4


@needs_dsl
@pytest.mark.parametrize(("v", "m"), [(4, 1), *[(8, 2), (16, 1)] * EVERY_KERNEL])
def test_one_hot_tokens_look_centroids_up(v: int, m: int) -> None:
    """Every column: a sum of centroids, rounded once."""
    torch.manual_seed(0)
    k = 32 * v
    fmt = codebook(v, m, 0)
    packed = random_packed(fmt, 128, k)
    packed.grid["scale"].fill_(1)
    _, row_scale, book = pack(packed)
    want = fmt.values(packed.codes(), {"codebook": book.half()}).half() * row_scale[:128, None]
    y = emulate_lookups(packed, torch.eye(k).half(), None, Tile(64))
    assert torch.equal(y, want.T.half())


@pytest.mark.parametrize(("v", "m"), VARIANTS)
def test_lookups_fit(v: int, m: int) -> None:
    kernels = [k for k in build.kernels_of(codebook(v, m).spec) if isinstance(k, Kernel)]
    for dtype in (HALF, BRAIN):
        d = lookup(codebook(v, m), dtype)
        assert isinstance(d, LookupDecoder)
        for tile in (kernel.tile for kernel in kernels if kernel.decoder == d):
            ring = tile.slots * d.blob_bytes + tile.stages * tile.tokens * 2 * tile.columns
            assert d.table_bytes + ring < SHARED_OF_SM // tile.ctas - RESERVED
        problems = product((512, 4096, 28672), (512, 4096, 14336), (17, 32, 64, 200, 1000))
        for n, k, tokens in problems:
            found = choose_lookup(d, tokens, n, k)
            assert isinstance(found, Tile)
            assert Kernel(d, found, d.operand) in kernels
            assert found.split <= k // 128


def test_many_tokens_are_looked_up_as_long_as_that_is_faster_than_a_decoded_copy() -> None:
    whole, fine = lookup(codebook(4, 1), HALF), lookup(codebook(4, 1, 8), HALF)
    assert isinstance(whole, LookupDecoder)
    assert isinstance(fine, LookupDecoder)
    found = choose_lookup(whole, 8192, 28672, 4096)
    assert isinstance(found, Tile)
    assert found.tokens >= 128
    few = choose_lookup(whole, 8, 28672, 4096)
    assert isinstance(few, Plan)  # few tokens have kernels of their own
    assert choose_lookup(whole, 16384, 28672, 4096) is None
    assert choose_lookup(fine, 4096, 28672, 4096) is None  # it has no tiles of 256 tokens
