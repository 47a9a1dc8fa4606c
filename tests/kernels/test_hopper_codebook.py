"""The Hopper codebook kernels, compiled and run on the CPU by a PTX machine; their layout."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.core.packed import Packed
from anybit.formats.codebook import Codebook
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import cells, cubin, jit
from anybit.kernels.cute.cells import CELL, ROWS, VECTORS, Cells, cut, dense, pack
from anybit.kernels.hopper import build, codebook_linear
from anybit.kernels.hopper.backend import BACKEND as backend
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.codebook_tiles import (
    CodebookKernel,
    candidates,
    choose,
    family,
)
from anybit.kernels.hopper.lookup import LookupDecoder
from anybit.kernels.hopper.tile import Kernel
from anybit.kernels.hopper.tiles import MAX_SHARED, RESERVED, SHARED_OF_SM
from anybit.kernels.reference import operand_weight
from tests.needs import EVERY_KERNEL, pairs
from tests.ptx.machine import Machine
from tests.ptx.state import InUse, Parameter

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")  # of the dense decoding alone
HALF, BRAIN = torch.float16, torch.bfloat16
VARIANTS = [(4, 1), (8, 2), (8, 1), (16, 3), (8, 4)]  # v, m; b = 8
NAMES = {HALF: "float16", BRAIN: "bfloat16"}


def codebook(v: int, m: int, group: int = 128) -> Codebook:
    return Codebook(m=m, v=v, group=group)


def random_packed(fmt: Codebook, n: int, k: int, book: Tensor | None = None) -> Packed:
    codes = torch.randint(0, 2**fmt.b, (n, fmt.code_count(k)), dtype=torch.uint8)
    groups = k // fmt.group if fmt.group else 1
    book = torch.randn(fmt.m, 2**fmt.b, fmt.v) if book is None else book
    grid = {"scale": (torch.rand(n, groups) * 0.05 + 0.01).half(), "codebook": book.half()}
    return Packed.from_codes(fmt, (n, k), codes, grid)


# The layout.


def unpack(blocks: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: codes (rows padded, codes of a row) and scales (rows, groups) fp16."""
    tiles, count, _ = blocks.shape
    size = CELL * cells.m
    codes = blocks[..., :size].reshape(tiles, count, cells.m, VECTORS, 8, 2)
    codes = codes.permute(0, 5, 4, 1, 3, 2).reshape(tiles * ROWS, -1)
    scale = blocks[..., size:].contiguous().view(torch.float16)
    scale = scale.view(tiles, count, cells.groups, 8, 2).permute(0, 4, 3, 1, 2)
    return codes, scale.reshape(tiles * ROWS, -1)


@pytest.mark.parametrize(("v", "m"), VARIANTS)
@pytest.mark.parametrize("group", [0, 128, 1024])
def test_layout_reads_back(v: int, m: int, group: int) -> None:
    torch.manual_seed(v + m)
    n, k = 40, 1024
    fmt = codebook(v, m, group)
    packed = random_packed(fmt, n, k)
    cells = cut(fmt)
    blocks, row_scale, book = pack(packed)
    assert blocks.shape == (16, k // cells.columns, cells.block_bytes)  # 256 rows
    assert not blocks[3:].any()
    assert row_scale.shape == (256,)
    codes, scale = unpack(blocks, cells)
    assert torch.equal(codes[:n], packed.codes())
    # Powers of two apart, nothing is rounded: book and row scale give back the same weight.
    assert book.abs().sum(-1).max() <= 1
    values = fmt.values(codes[:n], {"codebook": book}).view(n, scale.shape[1], -1)
    weight = values * scale[:n, :, None].float() * row_scale[:n, None, None]
    torch.testing.assert_close(weight.view(n, k), packed.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("group", "groups"), [(4, 32), (12, 32), (24, 16), (96, 4), (384, 1)])
def test_scales_are_repeated_where_groups_end_inside_blocks(group: int, groups: int) -> None:
    torch.manual_seed(group)
    fmt = Codebook(m=1, v=4, b=5, group=group)
    packed = random_packed(fmt, 16, 384)
    cells = cut(fmt)
    assert cells.groups == groups
    blocks, row_scale, book = pack(packed)
    codes, scale = unpack(blocks, cells)
    values = fmt.values(codes[:16], {"codebook": book}).view(16, scale.shape[1], -1)
    weight = values * scale[:16, :, None].float() * row_scale[:16, None, None]
    assert book.shape == (1, 256, 4)  # centroids that are not there are zeros
    torch.testing.assert_close(weight.view(16, -1), packed.dequantize(), rtol=1e-6, atol=0)


def test_scales_beyond_fp16_keep_their_digits() -> None:
    fmt = codebook(4, 1)
    packed = random_packed(fmt, 16, 256)
    packed.grid["scale"] = (packed.grid["scale"].float() * 2.0**30).bfloat16()
    blocks, row_scale, _ = pack(packed)
    scale, row_scale = unpack(blocks, cut(fmt))[1][:16], row_scale[:16]
    reach = row_scale / torch.exp2(packed.grid["scale"].float().amax(1).log2().ceil())
    assert torch.equal(scale.float() * (row_scale / reach)[:, None], packed.grid["scale"].float())


def test_a_row_whose_scales_are_zero_is_zero() -> None:
    fmt = codebook(4, 1)
    packed = random_packed(fmt, 16, 256)
    packed.grid["scale"][3] = 0
    packed = packed.to(DEVICE)
    weight = dense(backend.prepare(packed, None), HALF)
    assert not weight[3].any()
    assert error(weight, packed.dequantize().double()) < 4e-4


@pytest.mark.parametrize(("v", "m"), VARIANTS if EVERY_KERNEL else VARIANTS[::2])
@pytest.mark.parametrize("dtype", [HALF, BRAIN] if EVERY_KERNEL else [BRAIN])
def test_thousands_of_tokens_meet_a_dense_weight(
    v: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codebook_linear, "chip_of", lambda device: H200)
    problem = codebook(v, m), 16384, 4096, 4096, dtype, torch.device(DEVICE), None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert codebook_linear.chosen.__wrapped__(*problem) is None
    monkeypatch.setattr(codebook_linear, "chosen", lambda *problem: None)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    torch.manual_seed(v)
    fmt = codebook(v, m)
    packed = random_packed(fmt, 264, 384).to(DEVICE)  # of the last blocks, a part
    prepared = backend.prepare(packed, None)
    weight = dense(prepared, dtype)
    assert weight.dtype == dtype
    assert error(weight, packed.dequantize().double()) < (4e-4 if dtype == HALF else 4e-3)
    x, bias = (torch.randn(*size).to(DEVICE, dtype) for size in ((75, 384), (264,)))
    want = x.double() @ weight.double().T
    y = backend.linear(x, prepared, None)
    assert error(y, want) < (1e-3 if dtype == HALF else 5e-3)
    monkeypatch.setattr(cells, "CHUNK_BYTES", 1)  # 256 rows at a time
    y = backend.linear(x, prepared, bias)
    assert error(y, want + bias.double()) < (1e-3 if dtype == HALF else 5e-3)
    with pytest.raises(TypeError, match=r"torch.float32; the hopper backend"):
        backend.linear(x.float(), prepared, bias)


# Products.


@dataclass
class Case:
    v: int
    m: int
    group: int
    tokens: int
    dtype: torch.dtype
    shape: tuple[int, int, int]  # M, N, K
    cluster: int
    teams: int
    chunks: int = 1
    splits: int = 1
    warps: int = 0  # at least


CASES = [
    Case(8, 2, 128, 2, BRAIN, (2, 40, 640), 2, 1),
    Case(4, 1, 0, 16, BRAIN, (13, 40, 600), 2, 1),  # the last block is not full, as in others
    Case(16, 3, 32, 8, HALF, (3, 24, 416), 1, 1),
    Case(8, 2, 8, 8, BRAIN, (8, 24, 520), 2, 1),
    Case(16, 1, 128, 16, HALF, (11, 24, 896), 1, 1),
    Case(8, 1, 32, 1, HALF, (1, 24, 480), 1, 1),
    Case(4, 1, 4, 2, BRAIN, (2, 40, 332), 2, 1),
    Case(4, 1, 128, 1, HALF, (1, 40, 1920), 2, 1, splits=2),  # clusters share K
    Case(4, 1, 128, 16, HALF, (13, 101, 640), 1, 2, warps=16),
]
if EVERY_KERNEL:
    CASES += [
        Case(4, 1, 64, 1, HALF, (1, 40, 960), 2, 1),
        Case(8, 2, 128, 1, HALF, (1, 24, 768), 2, 1),
        Case(4, 1, 128, 8, HALF, (5, 101, 1408), 1, 2),
        Case(16, 3, 128, 8, BRAIN, (4, 24, 384), 1, 1),
        Case(4, 1, 16, 16, HALF, (9, 24, 400), 1, 1),
        Case(4, 1, 128, 16, HALF, (13, 101, 1408), 1, 2, warps=16),
        Case(8, 2, 64, 16, BRAIN, (16, 40, 576), 2, 1),
        Case(16, 3, 32, 1, HALF, (1, 24, 992), 2, 1),
        Case(4, 1, 4, 2, BRAIN, (2, 40, 652), 2, 1),
        Case(8, 2, 128, 2, HALF, (2, 40, 1024), 1, 1, splits=2),
        Case(4, 1, 0, 1, BRAIN, (1, 150, 896), 1, 2, chunks=2),
        Case(8, 2, 128, 1, HALF, (1, 24, 8192), 16, 1),
        Case(8, 1, 1024, 2, HALF, (2, 24, 1024), 2, 1),
        Case(16, 3, 0, 1, HALF, (1, 24, 976), 2, 1),
        Case(8, 4, 128, 1, HALF, (1, 24, 512), 1, 1),
        Case(8, 2, 128, 8, HALF, (8, 72, 768), 2, 1, chunks=2),
        Case(8, 2, 128, 16, HALF, (16, 24, 512), 1, 1),
        Case(8, 1, 0, 8, HALF, (3, 24, 512), 1, 1),
        Case(8, 4, 128, 8, HALF, (8, 24, 512), 1, 1),
    ]


@cache
def compiled(kernel: CodebookKernel) -> jit.Compiled:
    return kernel.generate()


def array(tensor: Tensor | None) -> np.ndarray | int:
    return 0 if tensor is None else tensor.view(torch.uint8).numpy()


def in_use(tensor: Tensor) -> InUse:
    """Memory that the previous kernel may still use."""
    return InUse(tensor.view(torch.uint8).numpy())


def emulate(
    kernel: CodebookKernel,
    packed: Packed,
    x: Tensor,
    bias: Tensor | None,
    cluster: int,
    teams: int,
    seed: int = 0,
    ptx: str = "",
    splits: int = 1,
) -> Tensor:
    (m, k), n = x.shape, packed.shape[0]
    blocks, row_scale, book = pack(packed)
    y = torch.full((m, n), torch.nan, dtype=x.dtype)
    tiles = -(-n // 16)
    work = torch.full((tiles * splits * 16 * kernel.tokens,), torch.nan)
    counters = torch.zeros(teams * cluster, dtype=torch.int32)
    arguments: list[Parameter] = [
        in_use(x), array(blocks), array(book.to(x.dtype)), array(row_scale), array(bias),
        in_use(y), in_use(work), in_use(counters), m, n, k, cluster, splits, seed % 2,
    ]  # fmt: skip
    shared = kernel.shared(cluster, -(-tiles // teams))
    machine = Machine(ptx or compiled(kernel)[0])
    machine.launch(arguments, cluster * splits * teams, kernel.threads, shared, cluster, seed)
    assert not y.isnan().any(), "outputs that nobody wrote"
    assert not counters.any()
    return y


def kernel_for(case: Case) -> CodebookKernel:
    cells = cut(codebook(case.v, case.m, case.group))
    found = candidates(cells, case.tokens, NAMES[case.dtype])
    return next(k for k in found if k.chunks >= case.chunks and k.warps >= case.warps)


def error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case) -> None:
    m, n, k = case.shape
    torch.manual_seed(n + k)
    fmt, kernel = codebook(case.v, case.m, case.group), kernel_for(case)
    assert cubin.resources(compiled(kernel).cubin)[1] == 0  # no spills
    packed = random_packed(fmt, n, k)
    x, bias = torch.randn(m, k).to(case.dtype), torch.randn(n).to(case.dtype)
    y = emulate(kernel, packed, x, bias, case.cluster, case.teams, splits=case.splits)
    want = x.double() @ operand_weight(packed, case.dtype).double().T + bias.double()
    # y is rounded, inner products in a Psumbook, and in bf16 the centroids before they are added.
    assert error(y, want) < (7e-4 if case.dtype == HALF else 6e-3)
    if case.v * case.m == 4:  # whatever the order of events, and however tiles are shared out
        again = emulate(kernel, packed, x, bias, case.cluster, 1, seed=1, splits=case.splits)
        assert torch.equal(again, y)


@needs_dsl
@pytest.mark.parametrize(("tokens", "vectors"), pairs([1, 8, 16], [(4, 1), (8, 1), (8, 2)]))
def test_one_hot_tokens_read_centroids_back(tokens: int, vectors: tuple[int, int]) -> None:
    """Every vector of a cell, and each of its places: exact but for the output's rounding."""
    v, m = vectors
    torch.manual_seed(0)
    case = Case(v, m, 0, tokens, HALF, (tokens, 16, 256), 1, 1)
    fmt, kernel = codebook(v, m, 0), kernel_for(case)
    packed = random_packed(fmt, 16, 256)
    packed.grid["scale"].fill_(1)
    _, row_scale, book = pack(packed)
    want = fmt.values(packed.codes(), {"codebook": book.half()}) * row_scale[:1]
    columns = torch.arange(0, 256, 1 if tokens > 1 else 37)[: 64 * tokens]
    for part in columns.split(tokens):
        x = torch.zeros(tokens, 256, dtype=HALF)
        x[torch.arange(len(part)), part] = 1
        y = emulate(kernel, packed, x, None, 1, 1)[: len(part)]
        assert torch.equal(y, want[:, part].T.half())
        if tokens >= 8 and part[-1] > 60:
            break


@needs_dsl
def test_outliers_do_not_overflow() -> None:
    """Activations near fp16's end: a Psumbook holds sums of at most their size."""
    torch.manual_seed(0)
    case = Case(8, 2, 128, 1, HALF, (1, 24, 768), 2, 1)
    kernel, fmt = kernel_for(case), codebook(8, 2)
    packed = random_packed(fmt, 24, 768)
    x = torch.randn(1, 768).half()
    x[0, ::8] = 65504.0 * (torch.rand(96) < 0.5).float().mul(2).sub(1).half()
    packed.grid["scale"].mul_(0.01)
    y = emulate(kernel, packed, x, None, 2, 1)
    assert error(y, x.double() @ packed.dequantize().double().T) < 1e-3


def digits(values: list[float], v: int) -> Tensor:
    """(1, len(values)**v = 256, v): every vector of these values, as a codebook."""
    return torch.cartesian_prod(*[torch.tensor(values)] * v)[None]


@needs_dsl
@pytest.mark.parametrize(
    ("v", "values"), [(8, [-1.0, 1.0]), (8, [0.0, 1.0]), (4, [-1.0, 0.0, 1.0, 2.0])]
)
def test_uniform_and_binary_weights_are_codebooks(v: int, values: list[float]) -> None:
    """CodeGEMM, section 3: {-1, 1}^v, {0, 1}^v, and int2 as vectors of 4; exact."""
    torch.manual_seed(v)
    fmt = codebook(v, 1, 0)
    packed = random_packed(fmt, 24, 512, digits(values, v))
    packed.grid["scale"].fill_(1)
    weight = packed.dequantize()
    assert set(weight.unique().tolist()) == set(values)
    for tokens in (1, 8):
        case = Case(v, 1, 0, tokens, HALF, (tokens, 24, 512), 1, 1)
        x = torch.randint(-3, 4, (tokens, 512)).half()
        y = emulate(kernel_for(case), packed, x, None, 1, 1)
        assert torch.equal(y.double(), x.double() @ weight.double().T)


# Which kernels there are.


@pytest.mark.parametrize(("v", "m"), VARIANTS)
def test_choices_are_in_the_family_and_fit(v: int, m: int) -> None:
    cells = cut(codebook(v, m))
    kernels = family(cells)
    for kernel in kernels:
        assert kernel.shared() <= MAX_SHARED
        if kernel.ctas == 2:
            assert kernel.shared() <= SHARED_OF_SM // 2 - RESERVED
    problems = product((512, 4096, 28672, 128256), (512, 4096, 8192, 14336, 28672), (1, 2, 5, 16))
    for n, k, tokens in problems:
        found = choose(cells, tokens, n, k, "float16")
        assert found is not None
        kernel, cluster = found.kernel, found.cluster
        assert kernel in kernels
        # Three tables leave no room for sums of 16 tokens where K is long.
        assert kernel.tokens >= (8 if (v, tokens) == (16, 16) else tokens)
        assert cluster * found.splits * kernel.reach >= k
        assert cluster <= 16
        assert kernel.shared(cluster) <= MAX_SHARED


def test_clusters_share_long_columns() -> None:
    for v, m in VARIANTS:
        for k in (16640, 28672, 53248):
            plan = choose(cut(codebook(v, m)), 1, 8192, k, "float16")
            assert plan is not None
            assert plan.kernel.psumbook
            assert plan.splits > 1
            assert 66 <= plan.cluster * plan.splits * (132 // (plan.cluster * plan.splits)) <= 132


@pytest.mark.parametrize("told", [0, 1, 5, 1000])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (272, 14336), (8192, 28672), (64, 8192)])
def test_every_number_of_clusters_is_launched(
    n: int, k: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver does not tell how many find room."""
    monkeypatch.setattr(codebook_linear, "chip_of", lambda device: H200)
    launcher = SimpleNamespace(most_clusters=lambda cluster, shared: told)
    monkeypatch.setattr(codebook_linear, "loaded", lambda kernel, device: launcher)
    for m in (1, 2, 16):
        plan = choose(cut(codebook(8, 2)), m, n, k, "float16")
        assert plan is not None
        found = codebook_linear.launch_of(plan, n, H200, torch.device("cuda", 0))
        assert (found.cluster, found.splits) == (plan.cluster, plan.splits)
        tiles_of, teams = -(-n // ROWS), found.grid // (plan.cluster * plan.splits)
        assert 1 <= teams <= tiles_of
        assert found.shared == plan.kernel.shared(plan.cluster, -(-tiles_of // teams))
        assert found.shared <= MAX_SHARED
        if told != 1000 and plan.cluster > 1 and plan.kernel.tokens > 2:
            assert found.grid <= 132


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA GPU")
    monkeypatch.setattr(codebook_linear, "chip_of", lambda device: H200)

    def refuse(spec: str, activation: str | None = None, k: int = 4096) -> str:
        device = torch.device("cuda", 0)
        layer = LayerSpec(get_format(spec), activation, (64, k), device)
        return backend.refuse(layer) or ""

    of_numbers = LayerSpec(get_format("int4"), None, (64, 4096), torch.device("cuda"))
    assert "not looked up in a table" in cells.refuse(of_numbers)
    assert "2^16 centroids does not fit" in refuse("codebook:m=1,v=8,b=16")
    assert "4, 8 or 16 weights here, not of 2" in refuse("codebook:m=1,v=2")
    for taken in ("m=1,v=4,b=4", "m=3,v=16,group=32", "m=1,v=8,group=8", "m=2,v=8,group=24"):
        assert refuse(f"codebook:{taken}", k=4800) == ""
    assert "not by int8" in refuse("codebook", "int8")
    assert refuse("codebook", None, 4240) == ""
    assert "do not fit" in refuse("codebook:m=9,v=4")
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    assert refuse("codebook") == ""
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    assert "carry the folder" in refuse("codebook")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0))
    assert "needs an H100 or H200" in refuse("codebook")


def test_the_builder_knows_codebooks() -> None:
    kernels = build.kernels_of("codebook:m=1,v=4,group=128")
    few = family(Cells(1, 4, 1))
    assert kernels[: len(few)] == few
    many = [kernel for kernel in kernels[len(few) :] if isinstance(kernel, Kernel)]
    assert len(many) == len(kernels) - len(few)
    assert all(isinstance(kernel.decoder, LookupDecoder) for kernel in many)
    fine = build.kernels_of("codebook:m=3,v=16,group=32")
    assert family(Cells(3, 16, 16))[0] in fine
    with pytest.raises(ValueError, match="centroids does not fit"):
        build.kernels_of("codebook:m=1,v=8,b=16")
