"""Codebook kernels for `mma.sync`: which there are; as compiled, in a PTX machine on the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.core.packed import Packed
from anybit.formats.codebook import Codebook
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import jit, products
from anybit.kernels.cute.cells import cut, pack, prepare
from anybit.kernels.mma import codebook_linear, codebook_selftest, selftest
from anybit.kernels.mma import codebook_tiles as tiles
from anybit.kernels.mma.codebook_tiles import CodebookKernel, CodebookTile
from anybit.kernels.mma.tiles import RESERVED, Gpu
from anybit.kernels.reference import operand_weight
from tests.kernels.mma import GPUS, array
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine
from tests.ptx.parse import PtxError
from tests.ptx.state import InUse

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
HALF, BRAIN = torch.float16, torch.bfloat16
NAMES = {HALF: "float16", BRAIN: "bfloat16"}
VARIANTS = [(4, 1), (8, 2), (8, 1), (16, 3), (8, 4), (16, 1)]  # v, m; b = 8


def random_packed(fmt: Codebook, n: int, k: int) -> Packed:
    codes = torch.randint(0, 256, (n, fmt.code_count(k)), dtype=torch.uint8)
    groups = k // fmt.group if fmt.group else 1
    book = torch.randn(fmt.m, 256, fmt.v).half()
    grid = {"scale": (torch.rand(n, groups) * 0.05 + 0.01).half(), "codebook": book}
    return Packed.from_codes(fmt, (n, k), codes, grid)


@dataclass
class Case:
    v: int
    m: int
    group: int
    dtype: torch.dtype
    tile: CodebookTile  # tokens, warps, blocks, copies, stages
    shape: tuple[int, int, int]  # M, N, K
    teams: int = 1
    splits: int = 1
    architecture: str = "sm_80"
    overlap: bool = False

    @property
    def format(self) -> Codebook:
        return Codebook(m=self.m, v=self.v, group=self.group)

    @property
    def kernel(self) -> CodebookKernel:
        name = NAMES[self.dtype]
        return CodebookKernel(cut(self.format), self.tile, name, self.architecture, self.overlap)


CASES = [
    Case(4, 1, 128, HALF, CodebookTile(8, 4, 2, 16, 3), (5, 40, 896), teams=2),
    Case(4, 1, 0, BRAIN, CodebookTile(16, 8, 1, 8, 2), (17, 24, 616), splits=2),
    Case(8, 2, 128, BRAIN, CodebookTile(8, 8, 1, 8, 2), (7, 16, 1280), splits=2),
    Case(16, 3, 128, HALF, CodebookTile(8, 4, 1, 2, 2), (1, 24, 1024)),
    Case(8, 1, 1024, HALF, CodebookTile(8, 4, 1, 4, 2), (9, 24, 1024), 1, 1, "sm_90", True),
    Case(4, 1, 4, BRAIN, CodebookTile(16, 8, 1, 16, 2), (11, 24, 472)),
    Case(16, 3, 32, HALF, CodebookTile(8, 4, 1, 4, 2), (3, 24, 1056)),
    Case(8, 2, 8, HALF, CodebookTile(8, 4, 1, 8, 2), (5, 24, 776)),
]


def every() -> Iterator[Case]:
    """The rule's tile of each kind of codebook and GPU, with tails of M, N and K."""
    for gpu, (v, m), group in product(GPUS.values(), VARIANTS, (0, 16, 128)):
        fmt = Codebook(m=m, v=v, group=group)
        kernel = tiles.kernel_for(cut(fmt), gpu, "bfloat16")
        assert kernel is not None
        tile = kernel.tile
        k = 32 * v * (tile.warps * tile.blocks - 3) - (0 if group else 8 * v)
        shape = tile.tokens + 1, 56, k
        yield Case(v, m, group, BRAIN, tile, shape, 2, 2, kernel.architecture, kernel.overlap)


if EVERY_KERNEL:
    CASES += list(every())


@cache
def compiled(kernel: CodebookKernel) -> jit.Compiled:
    made = kernel.generate()
    assert made.shared == tiles.shared_bytes(kernel.tile, kernel.cells)
    return made


def emulate(
    case: Case, packed: Packed, x: Tensor, bias: Tensor | None = None, seed: int = 0, ptx: str = ""
) -> Tensor:
    kernel, tile = case.kernel, case.tile
    (m, k), n = x.shape, packed.shape[0]
    blocks, row_scale, book = pack(packed)
    y = torch.full((m, n), torch.nan, dtype=x.dtype)
    slices = -(-m // tile.tokens)
    work = torch.full((slices * case.splits * -(-n // 16) * 16 * tile.tokens,), torch.nan)
    counters = torch.zeros(slices * case.teams, dtype=torch.int32)
    used = (lambda t: InUse(array(t))) if kernel.overlap else array
    arguments = [
        used(x), array(blocks), array(book.to(x.dtype)), array(row_scale),
        0 if bias is None else used(bias), used(y), array(work), array(counters),
        m, n, k, 1, case.splits, 0,
    ]  # fmt: skip
    made = compiled(kernel)
    machine = Machine(ptx or made.ptx)
    grid = slices * case.teams * case.splits
    machine.launch(arguments, grid, tile.threads, made.shared, seed=seed)
    assert not y.isnan().any(), "outputs that nobody wrote"
    assert not counters.any()
    return y


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case) -> None:
    m, n, k = case.shape
    torch.manual_seed(n + k)
    packed = random_packed(case.format, n, k)
    x, bias = torch.randn(m, k).to(case.dtype), torch.randn(n).to(case.dtype)
    y = emulate(case, packed, x, bias)
    want = x.double() @ operand_weight(packed, case.dtype).double().T + bias.double()
    error = float((y.double() - want).norm() / want.norm())
    # y is rounded; in bf16 the reference also rounds centroids before they are added.
    assert error < (5e-4 if case.dtype == HALF else 6e-3)
    if case.v == 4:  # whatever the order of events
        assert torch.equal(emulate(case, packed, x, bias, seed=1), y)


@needs_dsl
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_one_hot_tokens_read_weights_back(case: Case) -> None:
    """Sums of centroids times a power of two, rounded once."""
    torch.manual_seed(0)
    case = replace(case, group=0, dtype=HALF, splits=1, teams=1)
    k = case.tile.warps * case.tile.blocks * 32 * case.v
    packed = random_packed(case.format, 16, k)
    packed.grid["scale"].fill_(1)
    x = torch.eye(k, dtype=HALF)[torch.randperm(k)[: case.tile.tokens]]
    _, row_scale, book = pack(packed)
    values = case.format.values(packed.codes(), {"codebook": book.half()}) * row_scale[:16, None]
    assert torch.equal(emulate(case, packed, x), (x.float() @ values.T).half())


MUTANTS = {  # what is broken
    "the loop does not wait for its stage": ("wait_group 1;", "wait_group 2;"),
    "lanes do not meet before they refill": ("bar.warp.sync", "// bar.warp.sync"),
    "sums are added before they meet": ("bar.sync", "// bar.sync"),
    "counters are left": ("st.global.b32 [%rd", "// st.global.b32 [%rd"),
}


@needs_dsl
@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_do_not_pass(what: str) -> None:
    old, new = MUTANTS[what]
    case = Case(4, 1, 0, HALF, CodebookTile(8, 4, 1, 16, 3), (5, 72, 512), 1, 2)
    torch.manual_seed(0)
    packed, x = random_packed(case.format, 72, 512), torch.randn(5, 512).half()
    text = compiled(case.kernel).ptx
    assert old in text
    with pytest.raises((PtxError, AssertionError)):
        emulate(case, packed, x, ptx=text.replace(old, new))


# Which kernels there are.


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
@pytest.mark.parametrize(("v", "m"), VARIANTS)
def test_every_problem_has_a_kernel_that_fits(gpu: Gpu, v: int, m: int) -> None:
    for group in (0, v, 4 * v, 8 * v, 32 * v, 1024):
        cells = cut(Codebook(m=m, v=v, group=group))
        kernel = tiles.kernel_for(cells, gpu, "float16")
        assert kernel is not None
        tile = kernel.tile
        size = tiles.shared_bytes(tile, cells)
        assert size <= gpu.shared
        assert tile.ctas * (size + RESERVED) <= gpu.shared_of_sm
        assert tile.stages >= 2
        assert tile.threads >= 16 * tile.tokens  # a thread for every output
        for shape in product((1, 5, 16, 17, 100), (8, 512, 4096, 28672), (512, 4096, 14336)):
            grid, splits = tiles.grid(tile, cells, gpu, shape)
            slices = -(-shape[0] // tile.tokens)
            assert grid % (slices * splits) == 0
            blocks = shape[2] // cells.columns
            assert -(-blocks // (splits * tile.warps)) <= tile.blocks


def test_few_rows_and_long_columns_are_shared() -> None:
    cells, gpu = cut(Codebook(m=1, v=4, group=128)), GPUS["A100"]
    tile = tiles.choose(cells, gpu)
    assert tile is not None
    assert tiles.grid(tile, cells, gpu, (1, 28672, 4096)) == (108, 1)
    for shape in ((1, 4096, 28672), (16, 512, 14336)):
        grid, splits = tiles.grid(tile, cells, gpu, shape)
        assert splits > 1
        assert 0.75 * 108 <= grid <= 2 * 108


# The self-test, and launches.


class Exact:
    """Stands for a kernel: the definition, or something wrong."""

    def __init__(self, wrong: str):
        self.wrong, self.weight = wrong, torch.empty(0)

    def prepare(self, packed: Packed, activation: None) -> None:
        self.weight = packed.dequantize().double()

    def __call__(self, x: Tensor, prepared: None, bias: None, kernel, launch) -> Tensor:
        y = x.double() @ self.weight.T
        if self.wrong == "weights" or (self.wrong == "sums" and x.abs().sum(1).max() > 1):
            y[1] *= 1.1
        if self.wrong == "splits":
            y *= launch[1]
        return y.to(x.dtype)


@pytest.mark.parametrize(
    "spec", ["codebook:m=1,v=4", "codebook:m=4,v=8,group=1024", "codebook:m=1,v=4,b=6,group=96"]
)
@pytest.mark.parametrize("wrong", ["", "weights", "sums", "splits"])
def test_the_self_test_finds_what_is_wrong(
    spec: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerSpec(get_format(spec), None, (4096, 4096), torch.device("cpu"), BRAIN)
    kernel = codebook_linear.kernels_of(layer, BRAIN, GPUS["RTX 4090"])[0]
    exact = Exact(wrong)
    monkeypatch.setattr(codebook_selftest, "prepare", exact.prepare)
    monkeypatch.setattr(codebook_linear, "multiply", exact)
    found = selftest.verdict(layer, kernel)
    assert found == "right" if not wrong else "are wrong" in found


def test_whole_numbers_are_exact_in_both_dtypes() -> None:
    """What the self-test relies on: its weight is a bf16 number, and so are the table's rows."""
    for spec in ("codebook:m=4,v=8,group=128", "codebook:m=1,v=16"):
        layer = LayerSpec(get_format(spec), None, (8, 8), torch.device("cpu"), BRAIN)
        packed = codebook_selftest.weight(layer, (24, 512))
        assert torch.equal(packed.dequantize().bfloat16().float(), packed.dequantize())
        _, row_scale, book = pack(packed)
        assert torch.equal(book.bfloat16().float(), book)
        assert torch.equal(torch.frexp(row_scale[:24])[0], torch.full((24,), 0.5))


def test_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor in its place; a workspace only where CTAs share K; a bias in y's dtype."""
    seen: list[dict[str, Any]] = []

    def launch(values, grid, overlap):
        seen.append({**values, "grid": grid, "overlap": overlap})

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(codebook_linear, "gpu_of", lambda device: GPUS["A100"])
    monkeypatch.setattr(products, "zeros", lambda words, device: words)
    monkeypatch.setattr(
        codebook_linear, "loaded", lambda kernel, device: SimpleNamespace(launch=launch)
    )
    packed = random_packed(Codebook(m=1, v=4, group=128), 64, 14336)
    prepared = prepare(packed, None)
    bias = torch.zeros(64)
    y = codebook_linear.multiply(torch.zeros(19, 14336, dtype=BRAIN), prepared, bias)
    codebook_linear.multiply(torch.zeros(1, 14336).half(), prepared, None, launch=(4, 1))
    assert y.shape == (19, 64)
    first, second = seen
    assert first["splits"] > 1
    assert first["grid"] % (2 * first["splits"]) == 0  # two slices of 16 tokens
    assert first["work"].numel() == 2 * first["splits"] * 64 * 16
    assert first["counters"] == first["grid"]
    assert first["bias"].dtype == first["book"].dtype == y.dtype == BRAIN
    assert second["book"].dtype == HALF
    assert (second["work"], second["counters"], second["bias"]) == (None, 0, None)
    assert (second["grid"], second["splits"], second["overlap"]) == (4, 1, False)


# Compiling.

FEW = [("RTX 4090", 4, 1), ("A100", 8, 2)]
EVERY = [(name, v, m) for name in GPUS for v, m in VARIANTS]


@needs_dsl
@pytest.mark.parametrize(("name", "v", "m"), EVERY if EVERY_KERNEL else FEW)
def test_kernels_compile_without_spills(name: str, v: int, m: int) -> None:
    for group in (0, v, 2 * v, 8 * v, 128) if EVERY_KERNEL else (128,):
        for dtype in ("float16", "bfloat16") if EVERY_KERNEL else ("bfloat16",):
            cells = cut(Codebook(m=m, v=v, group=group))
            kernel = tiles.kernel_for(cells, GPUS[name], dtype)
            assert kernel is not None
            jit.checked(kernel, kernel.generate())
