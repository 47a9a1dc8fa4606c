"""Triton GEMM, GEMV and dense decoding against the reference, for every registered format."""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit.core.format import Format, Grid, get_format, known_formats, register
from anybit.core.groups import groups_of
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.kernels import between, reference, registry
from anybit.kernels.backend import Activations, LayerSpec, Pairs
from anybit.kernels.triton.tiles import Tile
from anybit.nn import op as ops
from anybit.nn.linear import QuantLinear
from anybit.quantizers.quantize import quantize_tensor
from tests.needs import EVERY_KERNEL, pairs
from tests.specs import columns_of_a_group, weight_of

pytest.importorskip("triton")

from anybit.kernels.triton import activation as activations
from anybit.kernels.triton import backend, lang
from anybit.kernels.triton.layout import layout_of

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
N, K = 40, 160  # neither a multiple of a tile
# The interpreter keeps bf16 in integers and adds those, so bf16 is tested on the GPU alone.
DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
GEMM = Tile("gemm", rows=64, tokens=64, stages=2)
COLUMNS = sorted({*range(0, K, 3), 31, 32, 63, 64, 127, 128, 158})


@register("three_levels")
@dataclass(frozen=True)
class Ternary(Format):
    """A user's own format: W = (code - 1) * scale, one scale a group."""

    group: int = 32
    bits = 2

    def fit(self, w: Tensor) -> Grid:
        return {"scale": groups_of(w, self.group).abs().mean(-1).half()}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        scale = grid["scale"].float().repeat_interleave(self.group, 1)
        return (w / scale).round().clamp(-1, 1).add(1).to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        return codes.float() - 1

    def triton_decode(self, at: Any) -> Any:
        return lang.number(at, 1)


# Every registered name, and what its options change in a kernel.
SCHEMES = [
    *(name for name, _ in known_formats() if name not in ("fp", "codebook")),
    *("int4:group=32", "int4:group=8", "int4:group=32,zero", "int8:zero", "int3:group=80"),
    *("fp:e3m1", "fp:e1m2", "fp:e5m2,group=16", "fp:e2m5", "liquid:group=32", "sparse:group=32"),
    *("codebook:m=2,v=8,b=4", "codebook:m=1,v=4,b=4,group=32", "codebook:m=1,v=1,b=4"),
    *("liquid:group=32@int8", "int4:group=32@int8", "int8@int8", "int1@int8", "sparse@int8"),
    *("int5:zero@int8", "fp6@int8"),
    *("trellis:bits=3,code=pair8", "trellis:bits=1,code=mcg", "trellis:bits=3,code=mul1"),
    *("trellis:bits=5,code=3inst", "trellis@int8", "trellis:bits=4,code=pair8@int8"),
    *("trellis:code=look", "trellis:bits=3,code=look", "trellis:bits=1,code=look@int8"),
    "trellis:bits=4,code=look@int8",
    *(("int4@fp8", "fp8@fp8") if DEVICE == "cuda" else ()),  # the interpreter truncates to fp8
]


CODEBOOKS = [
    "codebook:m=1,v=4,b=5,group=32",
    "codebook:m=2,v=8,b=4",
    "codebook:m=2,v=2,b=3,group=32",
]


def spec_for(scheme: str) -> str:
    """Groups of the defaults do not divide K = 160."""
    fmt, activation = parse_scheme(scheme)
    if fmt.group == 64:
        fmt = get_format(f"{fmt.spec}:group=32")
    return scheme_name(fmt, activation)


@cache
def packed_of(scheme: str, n: int = N, k: int = K) -> tuple[Packed, str | None]:
    fmt, activation = parse_scheme(spec_for(scheme))
    n += -n % fmt.tile[0]
    if columns_of_a_group(fmt.spec) == 256:
        k = 256 * -(-k // 256)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    return weight_of(fmt, w).to(DEVICE), activation


def multiply(
    x: Tensor, packed: Packed, activation: str | None, tile: Tile, bias: Tensor | None = None
) -> Tensor:
    prepared = backend.prepare(packed, activation)
    return backend.multiply(x, prepared, bias, tile)


def expected(x: Tensor, packed: Packed, activation: str | None, bias: Tensor | None = None) -> Any:
    prepared = reference.prepare(packed, activation)
    return reference.linear(x.reshape(-1, x.shape[-1]), prepared, bias)


def bound(x: Tensor, packed: Packed) -> Tensor:
    """Rounding of each product (a scaled weight may be rounded) and of the result."""
    unit = torch.finfo(x.dtype).eps
    w = reference.operand_weight(packed, x.dtype).abs()
    return x.float().abs() @ w.T * unit * 1.1 + 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gemm_reads_weights_exactly(scheme: str, dtype: torch.dtype) -> None:
    packed, activation = packed_of(scheme)
    x = torch.eye(packed.shape[1], dtype=dtype, device=DEVICE)[COLUMNS]
    got, want = multiply(x, packed, activation, GEMM), expected(x, packed, activation)
    if activation is None:
        assert torch.equal(got, want)
    else:  # token and row scales are applied in another order: a unit in the last place
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-7)


# Decoded as in the product, with which every format is read above.
DENSE = [s for s in SCHEMES if s == s.partition("@")[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", DENSE if EVERY_KERNEL else DENSE[::3])
def test_dense_is_the_weight(scheme: str, dtype: torch.dtype) -> None:
    packed, _ = packed_of(scheme)
    x = torch.eye(packed.shape[1], dtype=dtype, device=DEVICE)
    got = multiply(x, packed, None, Tile("dense"))
    assert torch.equal(got, expected(x, packed, None))


TILES = [
    (1, Tile("gemm", rows=32, tokens=8, warps=1, stages=2)),
    (7, Tile("gemm", rows=32, tokens=16, split=3, stages=2, cut=2)),
    (17, Tile("gemm", rows=64, tokens=32, split=2, stages=2, cut=4)),
    (33, Tile("gemm", rows=64, tokens=64, stages=3)),
    (70, Tile("gemm", rows=64, tokens=128, split=2, stages=2)),
]


@pytest.mark.parametrize(
    ("tokens", "scheme"), pairs(TILES, ["int4:group=32", "fp6", "int3:group=32", "liquid@int8"])
)
def test_random_activations_bias_and_split_k(scheme: str, tokens: tuple[int, Tile]) -> None:
    m, tile = tokens
    packed, activation = packed_of(scheme, N, 544)
    x = torch.randn(m, 544, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)
    want = expected(x, packed, activation, bias).float()
    got = multiply(x, packed, activation, tile, bias)
    assert ((got.float() - want).abs() <= bound(x, packed)).all()
    assert torch.equal(got, multiply(x, packed, activation, tile, bias))  # the same each time


def test_split_k_leaves_its_locks_free() -> None:
    packed, _ = packed_of("int4:group=32", N, 544)
    prepared = backend.prepare(packed, None)
    x = torch.randn(5, 544, device=DEVICE).half()
    backend.multiply(x, prepared, None, Tile(rows=32, split=4, stages=2))
    assert not prepared.layout[-1].any()


def test_shapes_and_strides() -> None:
    packed, _ = packed_of("int4:group=32")
    prepared = backend.prepare(packed, None)

    def run(x: Tensor) -> Tensor:
        return ops.linear(x, prepared.layout, None, packed.format.spec, N, "triton")

    x = torch.randn(2, 3, K, device=DEVICE).half()
    y = run(x)
    want = expected(x, packed, None).float()
    assert y.shape == (2, 3, N)
    assert ((y.float() - want.view(y.shape)).abs() <= bound(x, packed)).all()
    assert torch.equal(y.view(6, N), run(x.view(6, K)))
    assert torch.equal(run(x.view(6, K).T.contiguous().T), y.view(6, N))  # columns not adjacent
    assert torch.equal(run(x[:, 1]), y[:, 1])  # rows not adjacent
    assert run(x[:0]).shape == (0, 3, N)
    with pytest.raises(TypeError, match="float32"):
        run(x.float())


CHOSEN = ["int4", "int4:group=32", "fp6", "codebook:m=2,v=8,b=4", "liquid@int8", "fp6@int8"]


@pytest.mark.parametrize(("scheme", "m"), pairs(CHOSEN, [1, 3, 12, 40, 90]))
def test_chosen_tiles_fit_every_number_of_tokens(scheme: str, m: int) -> None:
    packed, activation = packed_of(scheme)
    x = torch.randn(m, packed.shape[1], generator=torch.Generator().manual_seed(2))
    x = x.half().to(DEVICE)
    prepared = backend.prepare(packed, activation)
    got = backend.linear(x, prepared, None).float()
    want = expected(x, packed, activation).float()
    assert ((got - want).abs() <= bound(x, packed)).all()


@pytest.mark.parametrize("notation", ["int8", "fp8"] if DEVICE == "cuda" else ["int8"])
def test_quantize_tokens_is_the_reference(notation: str) -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).half().to(DEVICE)
    x[2] = 0
    codes, scale = activations.quantize(x, notation)[:2]
    want, want_scale = reference.quantize_tokens(x, notation)
    assert torch.equal(scale, want_scale[:, 0])
    assert torch.equal(codes.float(), want.float())
    held, _ = activations.quantize(x, notation, torch.float16)[:2]
    assert torch.equal(held.float(), want.float())


def test_fused_norm_and_silu_quantize_what_torch_computes() -> None:
    generator = torch.Generator().manual_seed(5)
    x, up, weight = (
        torch.randn(s, generator=generator).half().to(DEVICE) for s in ((7, 300), (7, 300), (300,))
    )
    for got, plain in (
        (
            activations.quantize(x, "int8", norm=(None, weight, 1e-5), sums=True)[:3],
            torch.nn.functional.rms_norm(x.float(), (300,), None, 1e-5).half() * weight,
        ),
        (
            activations.quantize(up, "int8", gate=x, sums=True)[:3],
            torch.nn.functional.silu(x.float()).half() * up,
        ),
    ):
        codes, scale, total = got
        want, want_scale = reference.quantize_tokens(plain, "int8")
        torch.testing.assert_close(scale, want_scale[:, 0], rtol=2e-3, atol=0)
        assert (codes.int() - want.int()).abs().max() <= 1  # sums differ in their last bits
        assert (codes.int() != want.int()).float().mean() < 0.02
        assert torch.equal(total, codes.int().sum(1).int())


def test_scales_of_tokens_are_correctly_rounded() -> None:
    """By kernels and by the definition, on every device; one in sixteen was not on a GPU."""
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(4)).half()
    want = (x.double().abs().amax(1) / 127).float()
    for quantize in (activations.quantize, reference.quantize_tokens):
        assert torch.equal(quantize(x.to(DEVICE), "int8")[1].flatten().cpu(), want)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("two", [None, 2, 5])
def test_several_programs_quantize_a_token_as_one_does(
    monkeypatch: pytest.MonkeyPatch, two: int | None, vector: bool
) -> None:
    """Of a token's second row as well."""
    x, gate = torch.randn(2, 5, 1280, generator=torch.Generator().manual_seed(4)).half().to(DEVICE)
    x[2] = 0
    more = {"gate": gate, "sums": True, "vector": gate[0] if vector else None}
    if two is not None:
        count = torch.tensor([two], dtype=torch.int32, device=DEVICE)
        more["pairs"] = Pairs(count, 5, 5 + two)
    want = activations.quantize(x, "int8", **more)
    monkeypatch.setattr(activations, "WIDEST", 1024)
    for programs in (64, 1):  # 1: one for each token after it was rotated
        monkeypatch.setattr(activations, "PROGRAMS", programs)
        got = activations.quantize(x, "int8", **more)
        for a, b in zip(got[:3], want[:3], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("two", "rows"), [(1, 6), (3, 8), (5, 10), (0, 5), (2, 5)])
def test_second_rows_are_the_definition(two: int, rows: int) -> None:
    """Also where there are too few rows of codes for the last tokens."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).half().to(DEVICE)
    x[1] = 0
    x[2] *= 30
    both = Pairs(torch.tensor([two], dtype=torch.int32, device=DEVICE), 5, rows)
    *got, _ = activations.quantize(x, "int8", sums=True, pairs=both)
    plain = between.TORCH.quantize(x, "int8")
    for own, want, alone in zip(got, between.TORCH.quantize(x, "int8", both), plain, strict=True):
        assert own.shape == want.shape == (rows, *own.shape[1:])
        assert torch.equal(own, want)
        assert torch.equal(own[: 2 * two : 2], alone[:two])
        assert torch.equal(own[2 * two :], alone[two : rows - two])


@pytest.mark.parametrize(
    ("scheme", "tile"),
    pairs(
        ["int8@int8", "int4:group=32@int8", "liquid@int8"], [Tile(rows=32), Tile(rows=32, split=2)]
    ),
    ids=str,
)
def test_outputs_of_both_rows_are_added_up(scheme: str, tile: Tile) -> None:
    """And other tokens' outputs are what they are without."""
    packed, activation = packed_of(scheme)
    x = torch.randn(21, K, generator=torch.Generator().manual_seed(4)).half().to(DEVICE)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    prepared, exact = backend.prepare(packed, activation), reference.prepare(packed, activation)
    plain = backend.multiply(x, prepared, bias, tile)
    for two in (0, 3, 21):
        count = torch.tensor([9, two, 9], dtype=torch.int32, device=DEVICE)[1:2]
        both = Pairs(count, 21, 21 + two)
        codes, scale, sums = between.TORCH.quantize(x, "int8", both)
        y = backend.linear(Activations(codes, scale, sums, x.dtype, pairs=both), prepared, bias)
        unit = layout_of(prepared.format, prepared.activation).unit
        held = codes.to(torch.int8 if unit == 8 else x.dtype)  # as `linear` gives them
        fixed = backend.multiply(held, prepared, bias, tile, scale, x.dtype, count)
        apart = reference.linear(Activations(codes, scale, sums, torch.float32), exact, None)
        want = between.TORCH.join(apart, both, bias)
        for got in (y, fixed):
            assert (got[:21] - want).abs().max() <= want.abs().max() * 2**-10
            assert torch.equal(got[two:21], plain[two:])


def test_tokens_whose_values_are_not_adjacent() -> None:
    generator = torch.Generator().manual_seed(6)
    x, other = (torch.randn(300, 5, generator=generator).half().to(DEVICE).T for _ in range(2))
    weight = torch.randn(300, generator=generator).half().to(DEVICE)
    for run in (
        lambda x, other: activations.quantize(x, "int8"),
        lambda x, other: activations.quantize(other, "int8", gate=x),
        lambda x, other: activations.add_norm(x, other, weight, 1e-5),
        lambda x, other: (activations.silu_mul(x, other),),
    ):
        for got, want in zip(run(x, other), run(x.contiguous(), other.contiguous()), strict=True):
            assert torch.equal(got, want)


def test_a_bias_of_another_dtype() -> None:
    packed, _ = packed_of("int4:group=32")
    x, bias = (torch.randn(s, device=DEVICE).half() for s in ((3, K), (N,)))
    for tile in (GEMM, Tile("dense")):
        want = multiply(x, packed, None, tile, bias)
        assert torch.equal(multiply(x, packed, None, tile, bias.float()), want)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compile_and_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: value for name, value in registry.BACKENDS.items() if name != "hopper"}
    monkeypatch.setattr(registry, "BACKENDS", others)
    w = torch.randn(512, 1024)
    for scheme in ("int4:group=128", "liquid@int8", "fp6"):
        fmt, activation = parse_scheme(scheme)
        layer = QuantLinear(quantize_tensor(w, fmt).to(DEVICE), activation=activation)
        assert layer.backend == "triton"
        x = torch.randn(3, 1024, device=DEVICE).half()
        want = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("v", [3, 6])
def test_vectors_that_are_no_power_of_two_are_refused(v: int) -> None:
    """Triton has no tiles of so many columns; on a GPU, compiling would fail."""
    packed = quantize_tensor(torch.randn(16, 20 * v, device=DEVICE), f"codebook:m=1,v={v},b=4")
    why = backend.refuse(LayerSpec.of(packed, None, torch.float16))
    assert why == f"vectors of {v} weights make tiles of columns that are no power of two"


def test_tiles_shrink_to_what_the_compiler_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and conversions take shared memory that nobody counts beforehand."""
    from triton.runtime.errors import OutOfResources

    from anybit.kernels.triton import gemm

    real, tried = gemm.gemm, []

    class Compiler:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                tried.append(constants["STAGES"])
                if constants["STAGES"] > enough:
                    raise OutOfResources(250_000, 232_448, "shared memory")
                real[grid](*args, **constants)

            return launch

    monkeypatch.setattr(gemm, "gemm", Compiler())
    monkeypatch.setattr(gemm, "TAKEN", {})
    monkeypatch.setattr(gemm, "shared_memory", lambda device: 232_448)
    weight, x = torch.randn(N, K), torch.randn(3, K, device=DEVICE, dtype=torch.float16)
    packed = quantize_tensor(weight, "int8:zero").to(DEVICE)
    prepared = backend.prepare(packed, None)
    want = reference.linear(x, reference.prepare(packed, None), None)
    tile, enough = Tile("gemm", rows=64, tokens=16, stages=4), 2
    for _ in range(2):  # which is known then
        gemm.planned.cache_clear()
        y = backend.multiply(x, prepared, None, tile)
        torch.testing.assert_close(y, want, rtol=2e-3, atol=2e-2)
    assert tried[0] == 4
    assert [stages for stages in tried if stages <= enough] == [2, 2]
    enough = 0
    gemm.planned.cache_clear()
    with pytest.raises(OutOfResources):
        backend.multiply(x, prepared, None, tile)
    gemm.planned.cache_clear()
