import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit.core import planes as bits

WIDTHS = range(1, bits.MOST + 1)
rows = st.integers(1, 5)
columns = st.integers(1, 200)
widths = st.sampled_from(WIDTHS)


def random_codes(n: int, k: int, width: int) -> torch.Tensor:
    codes = torch.randint(0, 2**width, (n, k), dtype=torch.int32)
    return codes if width > 8 else codes.to(torch.uint8)


@pytest.mark.parametrize("width", WIDTHS)
def test_segments_are_powers_of_two_high_bits_first(width):
    parts = bits.segments(width)
    assert sum(parts) == width
    assert list(parts) == sorted(parts, reverse=True)
    assert all(part & (part - 1) == 0 for part in parts)


def test_six_is_four_plus_two():
    codes = torch.tensor([[0b101101, 0b010010]], dtype=torch.uint8)
    four, two = bits.pack(codes, 6)
    assert four.tolist() == [[0b0100_1011]]
    assert two.tolist() == [[0b10_01]]


@settings(deadline=None, max_examples=60)
@given(rows, columns, widths)
def test_pack_is_lossless_and_dense(n, k, width):
    codes = random_codes(n, k, width)
    planes = bits.pack(codes, width)
    assert [p.shape for p in planes] == [(n, -(-k * s // 32)) for s in bits.segments(width)]
    assert torch.equal(bits.unpack(planes, width, k), codes)


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_and_codes_share_no_memory(width):
    codes = random_codes(3, 64, width)
    wanted, planes = codes.clone(), bits.pack(codes, width)
    codes.zero_()
    found = bits.unpack(planes, width, 64)
    assert torch.equal(found, wanted)
    found.zero_()
    assert torch.equal(bits.unpack(planes, width, 64), wanted)


@settings(deadline=None, max_examples=30)
@given(rows, columns, widths)
def test_every_code_lies_where_the_layout_says(n, k, width):
    codes, low = random_codes(n, k, width), width
    for plane, segment in zip(bits.pack(codes, width), bits.segments(width), strict=True):
        low -= segment
        at = torch.arange(k) * segment
        word = plane.long()[:, at // 32] & 0xFFFFFFFF
        field = (word >> (at % 32)) & (2**segment - 1)
        assert torch.equal(field, (codes.long() >> low) & (2**segment - 1))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 160), widths, st.data())
def test_a_slice_of_the_planes_is_the_planes_of_the_slice(n, k, width, data):
    codes = random_codes(n, k, width)
    top = data.draw(st.integers(0, n - 1))
    first = 32 * data.draw(st.integers(0, (k - 1) // 32))
    part = bits.pack(codes[top:, first:], width)
    for plane, segment, expected in zip(
        bits.pack(codes, width), bits.segments(width), part, strict=True
    ):
        assert torch.equal(plane[top:, first * segment // 32 :], expected)


def test_unsupported_width_is_named():
    with pytest.raises(ValueError, match="codes of 25 bits are not supported; use 1 to 24"):
        bits.segments(25)
