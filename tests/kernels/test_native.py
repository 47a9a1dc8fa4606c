"""CPU kernels that LLVM compiles, on every level of instructions that the processor has."""

import io
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.format import FORMATS, Format, Grid, register
from anybit.core.groups import groups_of, store_scale
from anybit.core.packed import Packed
from anybit.kernels import reference
from anybit.kernels.backend import Activations, LayerSpec
from anybit.kernels.native import activations, backend, build, isa, memory, table
from tests.needs import pairs
from tests.pages import place, taken
from tests.specs import SPECS, columns_of_a_group, weight_of

K = 576  # a block and a part of one, in groups of 32, 64 and of the row
EPS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}
CPU = torch.device("cpu")


LEVELS = isa.able()
if not LEVELS:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)
# The same kernels as those of avx2_vnni, where only AVX-512 has its instructions.
VNNI = [
    replace(level, features=(*level.features[:-1], "avx512f", "avx512vl", "avx512vnni"))
    for level in isa.X86
    if level.name == "avx2_vnni" and level not in LEVELS and LEVELS[0].name.startswith("avx512_")
]
EVERY = LEVELS + VNNI


def named(value: object) -> str:
    """Of a parameter, for pytest."""
    return getattr(value, "name", str(value))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile every kernel: what a user's cache holds is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYBIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=EVERY, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> isa.Isa:
    monkeypatch.setattr(backend, "isa", lambda: request.param)
    chosen: isa.Isa = request.param
    return chosen


@pytest.mark.parametrize("spec", ["int4:group=64", "fp6", "int4:group=64@int8"])
def test_layers_move_between_processors(
    spec: str, level: isa.Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle holds no layout of the processor that wrote it."""
    spec, _, activation = spec.partition("@")
    x = torch.randn(2, K)
    layer = anybit.QuantLinear(packed(spec), None, activation or None)
    want = x @ layer.dequantize().T
    for there in LEVELS:
        with monkeypatch.context() as patch:
            patch.setattr(backend, "isa", lambda there=there: there)
            file = io.BytesIO()
            torch.save(layer.prepare(), file)
        read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert (read(x) - want).norm() < (0.02 if activation else 1e-5) * want.norm()


def packed(spec: str, n: int = 32, k: int = K) -> Packed:
    fmt = anybit.get_format(spec)
    n += -n % fmt.tile[0]
    k = {128: 640, 256: 768}.get(columns_of_a_group(spec), k // 64 * 64)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
    return weight_of(fmt, w)


def tokens(m: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(x: Tensor, weight: Packed, activation: str | None, bias: Tensor | None = None) -> None:
    """The product is the reference's within the rounding of its numbers and fp32 sums."""
    prepared = backend.prepare(weight, activation)
    y = backend.linear(x, prepared, bias)
    dtype = x.dtype
    assert y.dtype == dtype
    assert y.shape == (len(x), weight.shape[0])
    numbers = reference.quantized_activation(x, activation).double()
    decoded = weight.dequantize().double()
    expected = numbers @ decoded.T + (0 if bias is None else bias.double())
    size = numbers.abs() @ decoded.abs().T
    # A weight is rounded to the dtype up to twice, the result once; sums are those of fp32.
    bound = EPS[dtype] * (2 * size + 2 * expected.abs()) + 2.0**-20 * size + 1e-30
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("spec", ["fp8", "fp6", "fp:e5m2", "int4"])
def test_tables_are_read_without_wide_look_ups(
    spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "isa", lambda: LEVELS[-1])
    weight = packed(spec, 13)
    expected = reference.operand_weight(weight, dtype).T.to(dtype)[500:530]
    got = backend.linear(torch.eye(K, dtype=dtype)[500:530], backend.prepare(weight, None), None)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("spec", ["int8:group=32", "int8:zero", "int4:group=64,zero", "int7"])
def test_whole_numbers_times_tokens_in_fixed_point(level: isa.Isa, spec: str) -> None:
    """Tokens lose less than 2**-15 of their largest number, whatever its size."""
    weight = packed(spec, 19)
    decoded, prepared = weight.dequantize().double(), backend.prepare(weight, None)
    x = tokens(4, weight.shape[1], torch.bfloat16)
    x[0, 7], x[1], x[2] = 1000, x[1] * 2.0**-120, x[2] * 2.0**100
    x[3, 9], x[3, 70] = 255 / 32, -255 / 32  # whose codes take one bit less, to fit two bytes
    for rows in (x[:1], x[1:4]):
        y, numbers = backend.linear(rows, prepared, None).double(), rows.double()
        size = numbers.abs() @ decoded.abs().T
        lost = 2.0**-15 * numbers.abs().amax(1, keepdim=True) * decoded.abs().sum(1)
        bound = EPS[torch.bfloat16] * 4 * size + lost
        assert ((y - numbers @ decoded.T).abs() <= bound).all()
    assert not backend.linear(x[:2] * 0, prepared, None).any()
    x[0, 500], x[1, 3] = torch.inf, torch.nan  # the engine refuses such logits
    assert not backend.linear(x[:2], prepared, None).isfinite().any()


SMALL = ("int4:group=16", "int3:group=24,zero", "fp6:group=4", "int8:group=96")
LOOKED_UP = tuple(f"trellis:bits={bits},code=look" for bits in (1, 2, 3, 4))
TABLES = [s for s in SPECS + SMALL if not anybit.get_format(s).window]
TABLES += LOOKED_UP


@pytest.mark.parametrize(("spec", "dtype"), pairs(TABLES, list(EPS)), ids=str)
def test_one_hot_activations_read_the_weights_back(spec: str, dtype: torch.dtype) -> None:
    weight = packed(spec, 13)
    prepared = backend.prepare(weight, None)
    level = isa.isa()
    assert level is not None
    # Sums of vectors stay fp32 where there are no bf16 products to round them for.
    vectors = weight.format.lookup is not None and weight.format.width * weight.format.books > 1
    exact = vectors and dtype == torch.bfloat16 and not level.bf16
    decoded = reference.operand_weight(weight, torch.float32 if exact else dtype)
    expected = decoded.T.to(dtype)
    # Where rows have a factor, the kernels multiply by it last, and the definition before.
    twice = dtype == torch.float32 and weight.format.row_factor(weight.grid) is not None

    def same(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=2.0**-22, atol=0) if twice else torch.equal(a, b)

    eye = torch.eye(weight.shape[1], dtype=dtype)
    for few in (1, 3):
        at = slice(510, 510 + few)
        assert same(backend.linear(eye[at], prepared, None), expected[at])
    assert same(backend.linear(eye, prepared, None), expected)


PRODUCTS = [
    "int3", "int4:group=32", "int4:group=128,zero", "int5:zero", "int7", "int8", "fp6", "fp8",
    "liquid", "sparse", "codebook:m=3,v=16,b=4,group=32", *SMALL, *LOOKED_UP, "iq1_m", "q4_k",
    "iq2_xs", "iq3_s",
]  # fmt: skip


@pytest.mark.parametrize(("spec", "level"), pairs(PRODUCTS, EVERY), indirect=["level"], ids=named)
def test_products_on_every_level(level: isa.Isa, spec: str) -> None:
    weight = packed(spec, 19)
    k = weight.shape[1]
    for m in [(1, 5), (2, 11), (3, 4)][PRODUCTS.index(spec) % 3]:
        dtype = list(EPS)[m % 3]
        check(tokens(m, k, dtype), weight, None, tokens(1, weight.shape[0])[0])


INT8 = ["int2", "int4", "int8", "liquid", "liquid:group=16", *LOOKED_UP[1:3]]


@pytest.mark.parametrize(("spec", "level"), pairs(INT8, EVERY), indirect=["level"], ids=named)
def test_int8_products_are_those_of_integers(level: isa.Isa, spec: str) -> None:
    weight = packed(spec, 37)
    prepared = backend.prepare(weight, "int8")
    whole = weight.values().to(torch.int64)
    for m in (1, 2, 3, 4, 5, 9):
        x = tokens(m, weight.shape[1])
        x[0] = x[0].sign()  # the largest codes there are
        codes, scale = reference.quantize_tokens(x, "int8")
        product = (codes.to(torch.int64) @ whole.T).float()
        expected = product * scale * weight.grid["scale"].float().T
        given = Activations(codes, scale[:, 0], codes.sum(1, dtype=torch.int32), torch.float32)
        assert torch.equal(backend.linear(given, prepared, None), expected)
        assert torch.equal(backend.linear(x, prepared, None), expected)


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_quantizing_activations(level: isa.Isa, dtype: torch.dtype) -> None:
    x = tokens(70, 1003, dtype)
    x[1], x[2, 5], x[3, 1002] = 0, 300, -7
    x[4] = torch.arange(1003) % 255 - 127  # the scale is 1, and ties are to even
    x[5] = x[4] / 2
    for some in (x[:, 1:], x[:0], torch.stack((x, -x), 1).flatten(0, 1)[::2]):
        codes, scale = reference.quantize_tokens(some, "int8") if len(some) else (some, some[:, :1])
        got = activations.quantize(some, level)
        assert torch.equal(got[0], codes.to(torch.int8))
        assert torch.equal(got[1], scale[:, 0].float())
    x[0, 1] = torch.nan
    assert activations.quantize(x, level)[1][0].isnan()


@pytest.mark.parametrize("spec", ["fp6", "int4:group=64", "int1", "liquid"])
@pytest.mark.parametrize("activation", ["int8", "fp8"])
def test_quantized_activations(spec: str, activation: str) -> None:
    weight = packed(spec)
    for m in (1, 6):
        check(tokens(m, weight.shape[1], torch.bfloat16), weight, activation, tokens(1, 32)[0])


@pytest.mark.parametrize("k", [1, 31, 100, 512, 1000])
@pytest.mark.parametrize(("n", "spec"), [(1, "int5"), (5, "int5:zero"), (50, "int5")])
def test_sizes(n: int, k: int, spec: str) -> None:
    weight = anybit.quantize_tensor(tokens(n, k, seed=0), spec)
    for m in (0, 1, 2, 7):
        check(tokens(m, k, torch.bfloat16), weight, None)


@pytest.mark.parametrize("activation", [None, "int8", "fp8"])
def test_double_activations_are_summed_as_floats(activation: str | None) -> None:
    layer = anybit.QuantLinear(packed("int4:group=64"), tokens(1, 32)[0], activation)
    assert layer.backend == "native"
    for m in (0, 1, 6):
        x = tokens(m, K)
        assert torch.equal(layer(x.double()), layer(x).double())
    x = tokens(3, K, torch.float64).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.dequantize(torch.float64).sum(0).expand(3, K))


def test_more_tokens_than_one_part() -> None:
    check(tokens(backend.MANY + 3, 64, torch.bfloat16), packed("int4", 20, 64), None)


def test_strides_and_threads() -> None:
    weight = packed("int4:group=64,zero", 200)
    prepared = backend.prepare(weight, None)
    wide = tokens(weight.shape[1], 24, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for m in (1, 4, 9):
            columns = wide[:, :m]
            whole = columns.T.contiguous()
            spread = torch.stack((whole, -whole), 1).flatten(0, 1)[::2]
            results = []
            for threads in (1, 2, 3, 64):
                torch.set_num_threads(threads)
                results += [backend.linear(x, prepared, None) for x in (columns.T, whole, spread)]
            assert all(torch.equal(result, results[0]) for result in results)
    finally:
        torch.set_num_threads(before)


def test_scales_beyond_fp16() -> None:
    weight = anybit.quantize_tensor(tokens(8, 128) * 1e-7, "int4:group=64")
    assert weight.grid["scale"].dtype == torch.bfloat16
    check(tokens(2, 128), weight, None)


@dataclass(frozen=True)
class Stranger(Format):
    """Numbers that no arithmetic gives, in units of a scale."""

    group: int = 0
    bits = 3

    def fit(self, w: Tensor) -> Grid:
        return {"scale": store_scale(groups_of(w, self.group).abs().amax(-1))}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        return (torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) * 8).to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        return torch.tensor([0.0, 1, -1, 0.125, 0.75, -0.5, 3, -0.0625])[codes.int()]


@pytest.fixture
def stranger() -> Iterator[type[Format]]:
    yield register("stranger")(Stranger)
    del FORMATS["stranger"]


@pytest.mark.parametrize("spec", ["stranger", "stranger:group=64"])
def test_a_format_of_a_stranger(stranger: type[Format], spec: str) -> None:
    fmt = anybit.get_format(spec)
    assert backend.refuse(LayerSpec(fmt, None, (32, K), CPU)) is None
    weight = packed(spec)
    for m in (1, 5):
        check(tokens(m, K, torch.bfloat16), weight, None)


SCALED = ["int4:group=64", "int4:group=64,zero", "fp8:group=32"]


@pytest.mark.parametrize(("spec", "level"), pairs(SCALED, EVERY, 2), indirect=["level"], ids=named)
def test_scales_that_fp16_does_not_hold(level: isa.Isa, spec: str) -> None:
    """Groups have fp32 scales then, as other tools' checkpoints do."""
    plain = packed(spec, 19)
    random = torch.Generator().manual_seed(3)
    factor = 1 + torch.rand(plain.grid["scale"].shape, generator=random)
    grid = plain.grid | {"scale": plain.grid["scale"].float() * factor}
    weight = Packed.from_codes(plain.format, plain.shape, plain.codes(), grid)
    found = table.probe(weight).scale
    assert found is not None
    assert found.dtype == torch.float32
    for m in (1, 3, 11):
        check(tokens(m, K, list(EPS)[m % 3]), weight, None)


def test_what_is_no_table_is_left_to_others(
    stranger: type[Format], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Root(Stranger):
        def values(self, codes: Tensor, grid: Grid) -> Tensor:
            return (codes.float() + 1) ** (1 + (grid["scale"].float() > 0.5)).repeat_interleave(
                codes.shape[1] // grid["scale"].shape[1], 1
            )

    fmt = Root(group=64)
    w = tokens(16, K)
    grid = {"scale": torch.rand(16, K // 64).half()}
    weight = Packed.from_codes(fmt, (16, K), fmt.encode(w, grid), grid)
    with pytest.raises(table.NoTable, match="more than a factor and a shift"):
        table.probe(weight)
    monkeypatch.setitem(FORMATS, "stranger", Root)
    for decoded in (False, True):  # multiplied all the same
        prepared = backend.prepare(weight, None, torch.float32, decoded)
        x = tokens(2, K)
        assert torch.allclose(backend.linear(x, prepared, None), x @ weight.dequantize().T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_points_between_levels(dtype: torch.dtype) -> None:
    weight = packed("int4:group=64,zero")
    zero = (weight.grid["zero"].float() + torch.rand(32, K // 64)).to(dtype)
    weight = Packed(weight.format, weight.shape, weight.planes, weight.grid | {"zero": zero})
    assert table.probe(weight).form == "scaled"
    check(tokens(3, K), weight, None)


@pytest.mark.parametrize(("spec", "k", "why"), [
    ("int4:group=7", 7 * 64, "groups of 7 columns"),
    ("codebook:m=1,v=6,b=4", 768, "vectors of 6"),
    ("int4:group=4", 1 << 17, "more than 16384 groups of 4"),
])  # fmt: skip
def test_refusals(spec: str, k: int, why: str) -> None:
    assert why in backend.refuse(LayerSpec(anybit.get_format(spec), None, (32, k), CPU))


def test_other_processors_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    why = backend.refuse(LayerSpec(anybit.get_format("int4"), None, (32, 64), CPU))
    assert why is not None
    assert "this process has 64 bits on riscv64" in why


@pytest.mark.parametrize(("machine", "system", "most"), [
    ("ARM64", "win32", sys.maxsize), ("arm64", "freebsd14", sys.maxsize),
    ("aarch64", "linux", 2**31 - 1),
])  # fmt: skip
def test_systems_without_kernels(
    machine: str, system: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("sys.maxsize", most)
    assert isa.levels() == ()
    assert isa.able() == []
    why = backend.refuse(LayerSpec(anybit.get_format("int4"), None, (32, 64), CPU))
    assert why is not None
    assert f"bits on {machine}, {system}" in why


def test_kept_code_is_that_of_one_system(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    before = build._place("", LEVELS[0])
    monkeypatch.setattr(binding, "get_default_triple", lambda: "arm64-apple-darwin24")
    assert build._place("", LEVELS[0]) != before


def test_kernels_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    isa.isa.cache_clear()
    try:
        monkeypatch.setenv("ANYBIT_CPU_ISA", "none")
        assert isa.isa() is None
        why = backend.refuse(LayerSpec(anybit.get_format("int4"), None, (32, 64), CPU))
        assert why == "ANYBIT_CPU_ISA=none turns it off"
    finally:
        isa.isa.cache_clear()


@pytest.mark.parametrize(("names", "limit", "expected"), [
    ([], "AVX2_VNNI", "avx2_vnni"), (["avx2"], "AVX2_VNNI", "avx2"),
    (["avx2_vnni", "avx2"], "AVX512_CORE_VNNI", "avx2_vnni"), (["avx2"], "SSE41", None),
])  # fmt: skip
def test_limits_of_onednn(
    names: list[str], limit: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """names: levels of the processor; none: all of x86."""
    able = [level for level in isa.X86 if not names or level.name in names]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "able", lambda: able)
    monkeypatch.delenv("ANYBIT_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    found = isa.isa.__wrapped__()
    assert (found and found.name) == expected


def test_layers_choose_it() -> None:
    layer = anybit.QuantLinear(packed("int4:group=64"))
    assert layer.backend == "native"
    assert layer(tokens(3, K).view(1, 3, K)).shape == (1, 3, 32)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    isa.isa.cache_clear()
    try:
        for level in LEVELS:
            monkeypatch.setenv("ANYBIT_CPU_ISA", level.name)
            assert isa.isa() is level
            isa.isa.cache_clear()
        monkeypatch.setenv("ANYBIT_CPU_ISA", "avx3")
        known = "avx512_bf16, avx512_vnni" if not LEVELS[0].arm else "neon_bf16, neon_dot"
        with pytest.raises(ValueError, match=f"ANYBIT_CPU_ISA=avx3: known are {known}"):
            isa.isa()
        monkeypatch.delenv("ANYBIT_CPU_ISA")
        for limit, allowed in (("AVX2", "avx2"), ("SSE41", None)):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            found = isa.isa()
            if LEVELS[0].arm:  # limits of x86
                assert found is LEVELS[0]
            else:
                assert (found and found.name) == allowed
            isa.isa.cache_clear()
    finally:
        isa.isa.cache_clear()


def test_a_broken_file_in_the_cache_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    text = "define void @f(ptr %a) {\n  store i64 7, ptr %a\n  ret void\n}\n"
    build.load(text, "f", LEVELS[-1])
    (path,) = tmp_path.rglob("*.o")
    path.write_bytes(path.read_bytes()[:100])
    build.load(text, "f", LEVELS[-1])
    assert build._kept(path)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "file"))
    build.load("define void @g(ptr %a) {\n  ret void\n}\n", "g", LEVELS[-1])
    assert "ANYBIT_CACHE" in caplog.text


def test_weights_that_lie_side_by_side_are_tensors_of_their_own() -> None:
    with torch.inference_mode():
        first = memory.empty(3, 100).fill_(1)
    second = memory.empty(100).fill_(2)  # which parts of an inference tensor would refuse
    assert second.untyped_storage().nbytes() == 100
    assert int(first.sum()) == 300


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is not shared there")
def test_a_weight_that_ends_gives_its_memory_back_beside_others() -> None:
    weights = [memory.empty(1 << 20).fill_(i) for i in range(24)]
    places = [place(w) for w in weights]
    assert sum(taken(*at) for at in places) >= 24 << 20
    weights = weights[3:20:8]
    assert sum(taken(*at) for at in places) < 6 << 20
    assert [(int(w.min()), int(w.max())) for w in weights] == [(3, 3), (11, 11), (19, 19)]
