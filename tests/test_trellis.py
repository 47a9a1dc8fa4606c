"""Trellis codes: the definition against a plain walk, the encoders against each other, rounding."""

import base64
import itertools
import os
from dataclasses import astuple

import numpy as np
import pytest
import torch

import anybit
from anybit import GPTQ, RTN, QuantLinear
from anybit.core import tiles
from anybit.core.format import get_format
from anybit.errors import InvalidInput
from anybit.formats import trellis, trellis_look
from anybit.kernels.viterbi import paths as plain_paths
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.gptq import fitted_scale, output_error
from anybit.quantizers.pv_tuning import TunedLayer

CODES = tuple(trellis.CODES)
EACH = [
    *(f"trellis:bits={bits},code=look" for bits in (1, 3, 4)),
    *(
        f"trellis:bits={bits},code={code}"
        for bits, code in zip((2, 4, 2, 3, 1, 5), CODES, strict=True)
    ),
]


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def values_of(state, code, rate):
    """The values of one state, in Python's integers."""
    if code == "look":
        width, low, high, spread, packed = astuple(trellis_look.LOOKS[rate - 1])
        table = base64.b85decode(packed)
        h = (state % 256) * low + (state // 256) * high
        first = h // 128 % 256 * 4 + (h // 2 % 2 * 2 if width == 2 else 0)
        signs = (h * spread % 2**32).to_bytes(4, "little")
        entry = [(b ^ 128) - 128 for b in table[first : first + width]]
        return [-1 - v if sign > 127 else v for v, sign in zip(entry, signs, strict=False)]
    if code in ("sum8", "mul1"):
        total = sum((state * 0x83DCD12D & 0xFFFFFFFF) >> 8 * i & 255 for i in range(4))
        if code == "sum8":
            return [(total + 4) // 4 - 128]
        scale, shift = (np.uint16(b).view(np.float16) for b in (0x1EEE, 0xC931))
        return [float(np.float16((total + 1024) * float(scale) + float(shift)))]
    if code == "pair8":
        x = (state * 0xCBAC1FED & 0xFFFFFFFF).to_bytes(4, "little")
        rows = ((90, 64, 0, -64), 11475), ((0, 64, 90, 64), 27795)
        return [(sum(w * b for w, b in zip(r, x, strict=True)) - c + 128) // 256 for r, c in rows]
    x = state * 0xCBAC1FED if code == "mcg" else state * 89226354 + 64248484
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (np.uint16(h & 0xFFFF).view(np.float16) for h in (x, x >> 16))
    return [float(low + high)]


@pytest.mark.parametrize("spec", EACH)
def test_values_are_those_of_a_walk_through_each_tile(spec):
    fmt = get_format(spec)
    random = np.random.default_rng(0)
    codes = random.integers(0, 2**fmt.bits, (32, 32 // fmt.width), dtype=np.uint8)
    got = fmt.values(torch.from_numpy(codes), {})
    for i, j in itertools.product(range(2), range(2)):
        columns = 16 // fmt.width
        steps = codes[i * 16 : i * 16 + 16, j * columns : j * columns + columns].flatten().tolist()
        state, numbers = 0, []
        for code in steps[-16:] + steps:  # the end of the sequence is what came before it
            state = (state << fmt.bits | code) & 0xFFFF
            numbers += values_of(state, fmt.code, fmt.rate)
        numbers = numbers[16 * fmt.width :]
        tile = got[i * 16 : i * 16 + 16, j * 16 : j * 16 + 16]
        for p, number in enumerate(numbers):
            lane, own = p // 8, p % 8
            row, column = lane // 4 + own // 4 * 8, lane % 4 * 2 + own % 2 + (8 if own & 2 else 0)
            assert tile[row, column] == number


@pytest.mark.parametrize("spec", EACH)
def test_codes_of_integers_are_within_int8_and_have_no_mean(spec):
    fmt = get_format(spec)
    table = fmt.table()
    whole = bool((table == table.round()).all() and table.abs().max() <= 127)
    assert whole == (fmt.operand == "int8")
    assert (table.mean(0).abs() < 0.02 * table.std(0)).all()


def test_the_best_of_all_short_paths():
    """Of all closed paths of 6 steps, the one found is the best or nearly so."""
    table, bits = gaussian(16, 1, seed=1), 2
    x = gaussian(20, 6, 1, seed=2)
    codes = torch.tensor(list(itertools.product(range(4), repeat=6)))
    states = codes | codes.roll(1, 1) << bits
    errors = (table[states][:, None] - x[None]).square().sum((2, 3)).min(0).values
    found = plain_paths(x, table, steps_of(bits), 2)
    assert torch.equal(found >> bits, found.roll(1, 1) & 3)
    got = (table[found.long()] - x).square().sum((1, 2))
    assert (got >= errors - 1e-5).all()
    assert got.sum() < 1.1 * errors.sum()
    assert (got < errors + 1e-5).sum() >= 10


def steps_of(bits):
    """A format with so many bits a step."""
    return get_format(f"trellis:bits={bits}")


def check_paths(found, x, table, bits):
    """Closed, and no worse than the definition's beyond the rounding of costs."""
    assert found.dtype == torch.int32
    old = (len(table) >> bits) - 1
    assert torch.equal(found >> bits, found.roll(1, 1) & old)
    want = (table[plain_paths(x, table, steps_of(bits), 8).long()] - x).square().sum()
    got = (table[found.long()] - x).square().sum()
    assert abs(got - want) < 2e-3 * want


@pytest.mark.parametrize("level", [0, -1])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_native_paths_are_the_definition_s(bits, level, monkeypatch):
    from anybit.kernels.native import isa, viterbi

    if isa.isa() is None:
        pytest.skip("no kernels for this processor")
    if level:
        monkeypatch.setattr(viterbi, "level", lambda: isa.able()[level])
    width = 2 - bits % 2
    table = gaussian(1 << 16, width, seed=3)
    x = gaussian(3, 32, width)
    check_paths(viterbi.paths(x, table, steps_of(bits), 8), x, table, bits)


@pytest.mark.parametrize(
    "spec",
    [
        *("trellis:bits=2", "trellis:bits=4,code=mcg", "trellis:bits=1,code=pair8"),
        *("trellis:bits=1,code=look", "trellis:bits=3,code=look", "trellis:code=look"),
    ],
)
def test_triton_paths_are_the_definition_s(spec):
    pytest.importorskip("triton")
    from anybit.kernels.triton import viterbi

    device = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
    fmt = get_format(spec)
    table = fmt.table()[: 1 << max(8, 2 * fmt.bits)]
    x = gaussian(1, 12, fmt.width) * table.std()
    found = viterbi.paths(x.to(device), table, fmt, 3).cpu()
    want = plain_paths(x, table, fmt, 3)
    errors = [(table[path.long()] - x).square().sum() for path in (found, want)]
    assert torch.equal(found >> fmt.bits, found.roll(1, 1) & (len(table) - 1 >> fmt.bits))
    assert abs(errors[0] - errors[1]) < 1e-3 * errors[1]


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("trellis", 0.0705),  # a Gaussian's bound is 0.0625; int2 with its best scale has 0.119
        ("trellis:bits=3", 0.0182),
        ("trellis:bits=4", 0.0048),
        ("trellis:code=pair8", 0.0733),
        ("trellis:code=mcg", 0.0715),
        ("trellis:bits=1,code=look", 0.278),
        ("trellis:code=look", 0.0738),
        ("trellis:bits=3,code=look", 0.0187),
        ("trellis:bits=4,code=look", 0.0051),
    ],
)
def test_error_on_gaussian_weights(spec, most):
    w = gaussian(64, 256, seed=5)
    packed = RTN().quantize(w, get_format(spec))
    assert float((packed.dequantize() - w).square().mean()) < most
    scaled = RTN().quantize(w * 1e-3, get_format(spec))
    assert float((scaled.dequantize() * 1e3 - w).square().mean()) < most


def test_rows_of_zeros_stay_zeros():
    w = gaussian(32, 64)
    w[3] = w[20] = 0
    statistics = Statistics(tokens=100, hessian=torch.eye(64))
    for packed in (RTN().quantize(w, get_format("trellis")),
                   GPTQ().quantize(w, get_format("trellis"), statistics)):  # fmt: skip
        for decoded in (packed.dequantize(), TunedLayer(QuantLinear(packed)).quantized().weight):
            assert not decoded[[3, 20]].any()
            assert (decoded[0] - w[0]).norm() < 0.4 * w[0].norm()


def test_the_size_of_inputs_does_not_matter():
    """Powers of two are exact, however small their squares make the Hessian."""
    w, x = gaussian(32, 64), gaussian(99, 64)
    one, other = (
        GPTQ().quantize(w, get_format("trellis"), Statistics(tokens=99, hessian=h))
        for h in (x.T @ x, x.T @ x * 2.0**-110)
    )
    assert torch.equal(one.dequantize(), other.dequantize())


def test_chunks_of_rows_are_whole_tiles(monkeypatch):
    w = gaussian(48, 64)
    whole = RTN().quantize(w, get_format("trellis"))
    monkeypatch.setattr("anybit.quantizers.rtn.CHUNK", 24 * 64)
    parts = RTN().quantize(w, get_format("trellis"))
    assert torch.equal(parts.dequantize(), whole.dequantize())


@pytest.mark.parametrize(
    "spec", ["trellis", "trellis:bits=3,code=pair8", "trellis:bits=4,code=look"]
)
def test_gptq_lowers_the_output_s_error(spec):
    fmt, w = get_format(spec), gaussian(32, 96)
    x = gaussian(400, 96, seed=1) @ (gaussian(96, 96, seed=2) * 0.5 + torch.eye(96))
    h = x.T @ x
    packed = GPTQ(damping=0.01).quantize(w, fmt, Statistics(tokens=400, hessian=h))
    nearest = RTN().quantize(w, fmt)
    errors = [output_error(w, p.codes(), h, fmt, p.grid).sum() for p in (packed, nearest)]
    assert errors[0] < 0.6 * errors[1]
    # Its scales are the best for its codes.
    for factor in (0.99, 1.01):
        other = packed.grid | {"scale": packed.grid["scale"] * factor}
        assert output_error(w, packed.codes(), h, fmt, other).sum() > errors[0]
    again = fitted_scale(w, packed.codes(), h, fmt, packed.grid, 0.01)
    assert torch.allclose(again.float(), packed.grid["scale"].float(), rtol=2e-3)


def test_sequences_are_a_permutation():
    w = torch.arange(32 * 48).float().view(32, 48)
    s = tiles.sequences(w)
    assert torch.equal(tiles.from_sequences(s, 32), w)
    assert s[4, :8].tolist() == [16 * 48 + 16 + c for c in (0, 1, 8, 9, 384, 385, 392, 393)]


def test_what_is_out_of_range_is_refused():
    for spec, message in (
        ("trellis:bits=9", "bits=9 is out of range; code=sum8 has 1 to 8 bits"),
        ("trellis:bits=0", "bits=0 is out of range"),
        ("trellis:bits=5,code=pair8", "code=pair8 has 1 to 4 bits"),
        ("trellis:bits=5,code=look", "code=look has 1 to 4 bits"),
        ("trellis:code=mcq", "code=mcq is unknown; known: sum8, "),
        ("trellis:rate=2", "unknown option 'rate' .* known options: bits, code"),
    ):
        with pytest.raises(InvalidInput, match=message):
            get_format(spec)
    with pytest.raises(InvalidInput, match="N=24 is not a multiple of tiles of 16 rows"):
        anybit.quantize_tensor(gaussian(24, 64), "trellis")
    with pytest.raises(InvalidInput, match="K=40 is not a multiple of tiles of 16"):
        anybit.quantize_tensor(gaussian(32, 40), "trellis")
