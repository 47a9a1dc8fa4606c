"""Each format against its definition: an independent oracle where one exists."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import anybit
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.formats.codebook import Codebook, as_codebook
from anybit.formats.liquid import Liquid
from anybit.formats.minifloat import Minifloat
from tests.needs import pairs
from tests.specs import SCALAR, SPECS

FLOATS = {
    "fp:e3m2": ml_dtypes.float6_e3m2fn,
    "fp:e2m3": ml_dtypes.float6_e2m3fn,
    "fp:e2m1": ml_dtypes.float4_e2m1fn,
    "fp:e4m3": ml_dtypes.float8_e4m3fn,
    "fp:e5m2": ml_dtypes.float8_e5m2,
}


def weight(n=64, k=256, dtype=torch.float32):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k), dtype=dtype) * 0.02


def minifloat(spec: str) -> Minifloat:
    fmt = anybit.get_format(spec)
    assert isinstance(fmt, Minifloat)
    return fmt


# Every format.


@pytest.mark.parametrize("spec", SPECS)
def test_spec_strings_and_formats_are_inverse(spec):
    fmt = anybit.get_format(spec)
    assert anybit.get_format(fmt.spec) == fmt
    assert anybit.get_format(fmt.spec).spec == fmt.spec


@pytest.mark.parametrize("spec", SPECS)
def test_packing_loses_nothing(spec):
    fmt, w = anybit.get_format(spec), weight()
    grid = fmt.fit(w)
    codes = fmt.encode(w, grid)
    packed = Packed.from_codes(fmt, tuple(w.shape), codes, grid)
    assert torch.equal(packed.codes(), codes)
    assert torch.equal(packed.dequantize(), fmt.decode(codes, grid))
    again = Packed.from_tensors(fmt, tuple(w.shape), packed.tensors())
    assert torch.equal(again.dequantize(), packed.dequantize())


@pytest.mark.parametrize("spec", [s for s in SPECS if anybit.get_format(s).books == 1])
def test_decoded_weights_encode_to_themselves(spec):
    """A quantized weight is a fixed point: re-encoding it with its own grid changes nothing."""
    packed = anybit.quantize_tensor(weight(), spec)
    w = packed.dequantize()
    again = packed.format.encode(w, packed.grid)
    assert torch.equal(packed.format.decode(again, packed.grid), w)


@pytest.mark.parametrize("spec", SCALAR)
def test_scalar_codes_are_the_nearest(spec):
    fmt, w = anybit.get_format(spec), weight(8, 256)
    grid = fmt.fit(w)
    chosen = (fmt.decode(fmt.encode(w, grid), grid) - w).abs()
    best = torch.full_like(w, math.inf)
    for code in range(2**fmt.bits):
        decoded = fmt.decode(torch.full(w.shape, code, dtype=torch.uint8), grid)
        best = torch.minimum(best, (decoded - w).abs())
    assert ((chosen - best) <= 1e-6 * w.abs().amax()).all()


@pytest.mark.parametrize("spec", SPECS)
def test_bits_per_weight_counts_what_is_stored(spec):
    packed = anybit.quantize_tensor(weight(64, 512), spec)
    assert packed.format.bits_per_weight((64, 512)) == packed.nbytes() * 8 / (64 * 512)


@pytest.mark.parametrize("spec", SPECS)
def test_slices_of_a_packed_weight_are_slices_of_the_weight(spec):
    unit = anybit.get_format(spec).tile[0]
    packed = anybit.quantize_tensor(weight(8 * unit, 1024), spec)
    w = packed.dequantize()
    part = slice(2 * unit, 7 * unit)
    assert torch.equal(packed.rows(part).dequantize(), w[part])
    assert torch.equal(packed.columns(slice(512, 1024)).dequantize(), w[:, 512:])


def test_a_slice_through_a_group_is_refused():
    packed = anybit.quantize_tensor(weight(8, 512), "int4:group=128")
    with pytest.raises(ValueError, match=r"64 to 512 of K=512 split a group .* multiples of 128"):
        packed.columns(slice(64, 512))


@pytest.mark.parametrize(("spec", "stop"), [("sparse", 65), ("trellis:code=pair8", 65),
                                            ("codebook:m=1,v=4,b=4", 129)])  # fmt: skip
def test_a_slice_through_a_vector_is_refused(spec, stop):
    packed = anybit.quantize_tensor(weight(16, 256), spec)
    for end in (stop, 1):
        with pytest.raises(InvalidInput, match=f"columns 0 to {end} of K=256 split a group"):
            packed.columns(slice(0, end))


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_stay_zeros(spec):
    """int1 and iq4_nl have no code for them: their scales are 0 then."""
    assert not anybit.quantize_tensor(torch.zeros(16, 256), spec).dequantize().any()


@pytest.mark.parametrize(("spec", "factor"), pairs(SPECS, [1e-9, 1e9]))
def test_extreme_weights_stay_finite(spec, factor):
    w = weight(16, 256) * factor
    got = anybit.quantize_tensor(w, spec).dequantize()
    assert torch.isfinite(got).all()
    assert (got - w).norm() < w.norm()


@pytest.mark.parametrize("spec", SPECS)
def test_a_bf16_weight_gives_the_codes_of_its_fp32_copy(spec):
    w = weight(dtype=torch.bfloat16)
    a, b = anybit.quantize_tensor(w, spec), anybit.quantize_tensor(w.float(), spec)
    assert all(torch.equal(x, y) for x, y in zip(a.planes, b.planes, strict=True))


def test_rtn_in_row_chunks_equals_rtn_at_once(monkeypatch):
    w = weight(64, 256)
    whole = anybit.quantize_tensor(w, "int4:group=64,zero")
    monkeypatch.setattr("anybit.quantizers.rtn.CHUNK", 7 * 256)
    parts = anybit.quantize_tensor(w, "int4:group=64,zero")
    assert torch.equal(parts.dequantize(), whole.dequantize())


# Minifloat.


@pytest.mark.parametrize("spec", FLOATS)
def test_minifloat_equals_ml_dtypes_for_every_fp16(spec):
    fmt = minifloat(spec)
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = half[torch.isfinite(half)].float()
    codes = fmt.from_float(x.clone())
    oracle = x.numpy().astype(FLOATS[spec])
    value = torch.from_numpy(oracle.astype(np.float32))
    inside = torch.isfinite(value)
    assert inside.sum() > 48000
    assert torch.equal(codes[inside], torch.from_numpy(oracle.view(np.uint8).copy())[inside])
    assert torch.equal(fmt.to_float(codes)[inside], value[inside])
    # Where the oracle overflows to NaN or inf, we stay at the largest number.
    assert (fmt.to_float(codes)[~inside].abs() == fmt.largest).all()


@pytest.mark.parametrize("spec", [*FLOATS, "fp:e1m1", "fp:e2m0"])
def test_numbers_are_rounded_without_codes_as_with_them(spec):
    fmt = minifloat(spec)
    half = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = half[torch.isfinite(half)].float()
    assert torch.equal(fmt.round_(x.clone()), fmt.to_float(fmt.from_float(x)))


@pytest.mark.parametrize(
    ("spec", "largest"), [("fp6", 28), ("fp:e2m3", 7.5), ("fp4", 6), ("fp8", 448)]
)
def test_minifloat_reaches(spec, largest):
    assert minifloat(spec).largest == largest


@pytest.mark.parametrize("bits", range(3, 9))
def test_every_minifloat_decodes_every_code_by_the_textbook(bits):
    for x in range(1, min(5, bits - 1) + 1):
        fmt, y = Minifloat(x, bits - 1 - x), bits - 1 - x
        codes = torch.arange(2**bits, dtype=torch.uint8)
        expected = []
        for code in range(2**bits):
            sign, e, m = code >> (bits - 1), (code >> y) & (2**x - 1), code & (2**y - 1)
            bias = 2 ** (x - 1) - 1
            value = 2.0 ** (e - bias) * (1 + m / 2**y) if e else 2.0 ** (1 - bias) * (m / 2**y)
            expected.append(-value if sign else value)
        assert fmt.values(codes[None], {})[0].tolist() == expected
        kept = (codes & (2 ** (bits - 1) - 1)) <= fmt.largest_code
        back = fmt.from_float(fmt.to_float(codes))
        assert torch.equal(back[kept], codes[kept])


@pytest.mark.parametrize("bits", range(3, 9))
def test_bias_shift(bits):
    """Bits moved into fp16, times 2**(15 - bias) in the scale, are the definition (subnormals too).

    ZeroQuant(4+2), "Bias shift": no exponent arithmetic at run time; 2**12 for e3m2.
    """
    for x in range(1, min(5, bits - 1) + 1):
        fmt = Minifloat(x, bits - 1 - x)
        codes = torch.arange(2**bits, dtype=torch.int32)
        sign = (codes >> (bits - 1)) << 15
        rest = (codes & (2 ** (bits - 1) - 1)) << (10 - fmt.mantissa)
        half = (sign | rest).to(torch.int16).view(torch.float16)
        kept = (codes & (2 ** (bits - 1) - 1)) <= fmt.largest_code
        assert torch.equal((half.float() * fmt.shift)[kept], fmt.to_float(codes)[kept])
    assert minifloat("fp6").shift == 2.0**12


# LiquidQuant.


def test_liquid_arithmetic_never_overflows():
    """Equations 9 to 12 for every range of a group, fitted, and weights that left it (GPTQ)."""
    ranges = torch.tensor([(a, b) for a in range(-119, 120) for b in range(a, 120)])
    assert len(ranges) == 28_680
    low, high = ranges[:, :1], ranges[:, 1:]
    for between in (torch.linspace(0, 1, 64), torch.arange(64) % 2, torch.arange(64) == 5):
        w = (low + (high - low) * between).reshape(1, -1)
        grid = Liquid().fit(w)
        assert grid["scale"].item() == 1
        step, offset = (grid[name].int().T for name in ("step", "offset"))
        assert 1 <= int(step.min()) <= int(step.max()) <= 16
        for moved in (w, torch.full_like(w, 300), torch.full_like(w, -300)):
            total = Liquid().encode(moved, grid).view(-1, 64).int() * step + offset
            assert 0 <= int(total.min()) <= int(total.max()) <= 255
            xor = (total.to(torch.uint8) ^ 0x80).view(torch.int8)
            assert torch.equal(xor.int(), total - 128)


def test_liquid_example_of_the_paper():
    w = torch.zeros(1, 64)
    w[0, 0], w[0, 1] = 119, -104  # section 4: s = 15, and 15 * 15 - 104 = 121
    grid = {"scale": torch.ones(1, 1), "step": torch.tensor([[15]])}
    grid["offset"] = torch.tensor([[128 - 104]])
    assert Liquid().values(Liquid().encode(w, grid), grid)[0, :2].tolist() == [121, -104]


@pytest.mark.parametrize("outlier", [0.0, 20.0])
def test_liquid_fits_better_than_equation_7(outlier):
    """Nor is the smallest step better that cuts nothing."""
    w = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    w[:, 5] += outlier
    fmt = Liquid()
    grid = fmt.fit(w)
    x = (w / grid["scale"].float()).round().view(64, -1, 64)
    low, span = x.amin(-1), x.amax(-1) - x.amin(-1)

    def error(grid):
        return (fmt.decode(fmt.encode(w, grid), grid) - w).square().sum()

    for step in ((span / 15).round(), (span / 15.5).ceil()):
        other = {"step": step.clamp(1).to(torch.uint8), "offset": (low + 128).to(torch.uint8)}
        assert error(grid) < 0.95 * error(grid | other)


def test_liquid_decodes_four_codes_with_one_multiply_add_and_one_xor():
    """No carry crosses a byte: 32-bit arithmetic on four codes equals four 8-bit ones."""
    random = torch.Generator().manual_seed(0)
    for s in range(1, 17):
        low = torch.randint(-119, 120 - 15 * s + 8, (4000,), generator=random).clamp(-119, 119)
        q = torch.randint(0, 16, (4000, 4), generator=random)
        q = torch.minimum(q, ((127 - low) // s)[:, None])
        at = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24])
        word = (q * at).sum(1)
        offset = (low + 128) * 0x01010101
        got = (word * s + offset) ^ 0x80808080
        assert (got < 2**32).all()
        expected = (((q * s + low[:, None]) & 255) * at).sum(1)
        assert torch.equal(got, expected)


# Sparse and codebook.


def test_sparse_keeps_the_larger_of_each_pair():
    w = weight(16, 128)
    got = anybit.quantize_tensor(w, "sparse").dequantize()
    pairs, kept = w.view(16, -1, 2), got.view(16, -1, 2)
    assert ((kept != 0).sum(-1) <= 1).all()
    larger = pairs.abs().argmax(-1, keepdim=True)
    assert (kept.gather(-1, 1 - larger) == 0).all()
    scale = w.abs().amax(1) / 63
    error = (kept.gather(-1, larger) - pairs.gather(-1, larger)).abs().squeeze(-1)
    assert (error <= 0.501 * scale[:, None]).all()


def test_codebook_bits_are_equation_1():
    shape = (4096, 4096)
    for v, m, b, g in [(4, 1, 8, 0), (16, 3, 8, 32), (8, 2, 8, 128), (8, 1, 8, 16)]:
        fmt = Codebook(m=m, v=v, b=b, group=g)
        norm = 16 / (g or shape[1])
        book = 16 * m * 2**b * v / (shape[0] * shape[1])
        assert fmt.bits_per_weight(shape) == pytest.approx(b * m / v + norm + book, rel=1e-12)
    # "The combinations (4, 1, 8, -1) and (16, 3, 8, 32) have almost the same bits, about 2."
    assert Codebook(m=1, v=4).bits_per_weight(shape) == pytest.approx(2, abs=0.02)
    assert Codebook(m=3, v=16, group=32).bits_per_weight(shape) == pytest.approx(2, abs=0.02)


def test_codebook_finds_planted_centroids():
    random = torch.Generator().manual_seed(1)
    planted = torch.randn(16, 4, generator=random)
    w = planted[torch.randint(16, (4096,), generator=random)].reshape(64, -1)
    got = anybit.quantize_tensor(w, "codebook:m=1,v=4,b=8").dequantize()
    assert (got - w).norm() < 0.02 * w.norm()


@pytest.mark.parametrize(("fine", "coarse"), [("m=2,v=8", "m=1,v=8"), ("m=1,v=4", "m=1,v=8")])
def test_more_codes_mean_less_error(fine, coarse):
    w = weight(256, 256)
    error = [
        (anybit.quantize_tensor(w, f"codebook:{o}").dequantize() - w).norm() for o in (fine, coarse)
    ]
    assert error[0] < error[1] * 0.9


@pytest.mark.parametrize("spec", ["int1", "int2:group=64", "int3", "int4:group=16", "int8"])
def test_uniform_and_binary_weights_are_codebooks(spec):
    """CodeGEMM, related work: vectors of all values of uniform and binary codes; exact."""
    packed = anybit.quantize_tensor(weight(16, 256), spec)
    converted = as_codebook(packed)
    fmt = converted.format
    assert torch.equal(converted.dequantize(), packed.dequantize())
    assert fmt.bits * fmt.code_count(256) <= 8 * 256
    assert fmt.bits_per_weight((1 << 20, 1 << 10)) == pytest.approx(
        packed.format.bits_per_weight((1 << 20, 1 << 10)), abs=1e-3
    )
    assert anybit.get_format(fmt.spec) == fmt
    # The spec quantizes to the same weights, but for those midway between two values.
    direct = anybit.quantize_tensor(weight(16, 256), fmt.spec)
    assert torch.equal(direct.grid["scale"], packed.grid["scale"])
    assert torch.equal(direct.dequantize(), packed.dequantize())


def test_what_one_codebook_cannot_hold_is_refused():
    w = weight(4, 96)
    for spec, message in [("int4:group=32,zero", "without zero points"), ("fp4", "only integers")]:
        with pytest.raises(InvalidInput, match=message):
            as_codebook(anybit.quantize_tensor(w, spec))
    with pytest.raises(InvalidInput, match="group=12 is not a multiple of v=8"):
        as_codebook(anybit.quantize_tensor(w, "int1:group=12"))
    with pytest.raises(InvalidInput, match="K=92 is not a multiple of vectors of 8"):
        as_codebook(anybit.quantize_tensor(w[:, :92], "int1"))


# Bad input.


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int44", "unknown format 'int44'.*did you mean int4.*known: .*codebook.*int4.*liquid"),
        (
            "int4:grup=64",
            "unknown option 'grup' in format 'int4'; known options: group, zero, order, rotate; "
            "did you mean group",
        ),
        ("int4:group=big", "must be a whole number, not 'big'"),
        ("int4:group", "option 'group' of format 'int4' needs a value"),
        ("int4:group=64,group=32", "repeated option 'group'"),
        ("fp", "write 'fp' with its bits: fp:e3m2"),
        ("fp:e6m1", "a minifloat has 3 to 8 bits and an exponent of 1 to 5"),
        ("codebook:m=0", "m and v are at least 1"),
        ("codebook:v=8,group=12", "group=12 is not a multiple of v=8"),
        ("codebook:uniform=2", "one codebook of b=16 bits, at most 8; found m=2"),
        ("codebook:m=1,v=4,uniform=1", "one codebook of b=4 bits, at most 8; found m=1 and b=8"),
        ("int4:group=-64", "group=-64"),
        ("int4:bits=3", "unknown option 'bits' in format 'int4'"),
    ],
)
def test_bad_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        anybit.get_format(spec)


@pytest.mark.parametrize(
    ("spec", "k", "message"),
    [
        ("int4:group=128", 1000, r"K=1000 is not a multiple of group=128.*use group=0 \(a scale"),
        ("int4:group=128", 576, "use group=64, or keep"),
        ("int4:group=100", 256, "use group=64 or group=128, or keep"),
        ("int4:group=4096", 4304, "use group=16, or keep"),
        ("sparse", 33, "K=33 is not a multiple of vectors of 2"),
        ("codebook:m=1,v=8", 100, "K=100 is not a multiple of vectors of 8"),
    ],
)
def test_shapes_that_do_not_fit_are_explained(spec, k, message):
    with pytest.raises(ValueError, match=message):
        anybit.quantize_tensor(torch.randn(4, k), spec)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(bad):
    w = weight(4, 64)
    w[2, 3] = bad
    with pytest.raises(ValueError, match=r"1 values are NaN or inf, the first at \(2, 3\)"):
        anybit.quantize_tensor(w, "int4")


@pytest.mark.parametrize("spec", ["codebook:m=1,v=4", "trellis"])
def test_weights_too_large_to_be_squared_are_refused(spec):
    w = weight(16, 256)
    w[2, 3] = -1e25
    with pytest.raises(InvalidInput, match="a scale overflows float32"):
        anybit.quantize_tensor(w, spec)
    w[2, 3] = -1e15
    assert anybit.quantize_tensor(w, spec).dequantize().isfinite().all()


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'int4' is already registered by"):
        anybit.register("int4")(type("Other", (anybit.Format,), {}))


@pytest.mark.parametrize("spec", SPECS)
def test_what_a_format_says_of_its_values_is_true(spec):
    packed = anybit.quantize_tensor(weight(), spec)
    fmt, grid, codes, values = packed.format, packed.grid, packed.codes(), packed.values()
    assert (fmt.zero_point is None) == ("zero" not in spec)
    assert (fmt.lookup is None) == (not spec.startswith("codebook"))
    if fmt.zero_point is not None:
        z = grid[fmt.zero_point].float()
        assert z.shape == grid["scale"].shape
        assert torch.equal(values, (codes.view(*z.shape, -1) - z[..., None]).view(codes.shape))
    if fmt.lookup is not None:
        table = grid[fmt.lookup].float()
        assert table.shape == (fmt.books, 2**fmt.bits, fmt.width)
        at = codes.view(len(codes), -1, fmt.books).long()
        assert torch.equal(values, table[torch.arange(fmt.books), at].sum(2).flatten(1))
    if fmt.operand == "int8":
        assert torch.equal(values, values.to(torch.int8).float())


def test_liquid_is_made_for_int8_activations():
    assert {anybit.get_format(spec).spec for spec in SPECS if anybit.get_format(spec).made_for} == {
        "liquid",
        "liquid:group=32",
    }


def test_a_format_without_a_name_is_refused():
    class Nameless(Liquid):
        pass

    with pytest.raises(ValueError, match=r"Nameless has no name; decorate it with @register"):
        Nameless().spec  # noqa: B018
