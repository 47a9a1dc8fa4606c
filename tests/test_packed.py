"""What enters a packed weight is checked, and its parts are what was asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.packed import Packed, stack
from anybit.errors import InvalidInput, InvalidType

N, K = 8, 64
WIDTHS = range(1, 9)


def packed(spec: str = "int4", n: int = N, seed: int = 0) -> Packed:
    w = torch.randn(n, K, generator=torch.Generator().manual_seed(seed))
    return anybit.quantize_tensor(w, spec)


def from_codes(bits: int, codes: Tensor) -> Packed:
    like = packed(f"int{bits}")
    return Packed.from_codes(like.format, (N, K), codes, like.grid)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64, torch.uint16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_come_back(bits: int, kind: torch.dtype) -> None:
    codes = (torch.arange(N * K) % 2**bits).view(N, K)
    assert torch.equal(from_codes(bits, codes.to(kind)).codes(), codes.byte())


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_out_of_range_are_refused(bits: int) -> None:
    for wrong in (2**bits, -1, 1 << 20):
        codes = torch.zeros(N, K, dtype=torch.int32)
        codes[1, 2] = wrong
        low, high = min(wrong, 0), max(wrong, 0)
        with pytest.raises(
            InvalidInput, match=rf"from {low} to {high}, not from 0 to {2**bits - 1}$"
        ):
            from_codes(bits, codes)


def test_codes_of_another_kind_are_refused() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        with pytest.raises(InvalidType, match=f"codes of 'int4' are {kind}; convert"):
            from_codes(4, torch.zeros(N, K).to(kind))
    for shape in ((N, K - 1), (N + 1, K), (K,)):
        with pytest.raises(InvalidInput, match=r"have shape \(8, 64\), not \("):
            from_codes(4, torch.zeros(shape, dtype=torch.uint8))


PARTS = [slice(0, 8, 2), slice(8, 0, -1), slice(6, 2), slice(0, 0), slice(200, 300)]


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_ranges(part: slice) -> None:
    w = packed()
    for cut in (w.rows, w.columns):
        with pytest.raises(InvalidInput, match=r"(rows|columns) .* no range; cut it from start to"):
            cut(part)


@pytest.mark.parametrize("part", [slice(None), slice(2, 5), slice(-3, None), slice(4, 100)])
def test_rows_are_those_of_the_weight(part: slice) -> None:
    assert torch.equal(packed().rows(part).dequantize(), packed().dequantize()[part])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (("codebook:m=1,v=4", 8, 1), "their 'codebook' differ"),
        (("int4", 8, 0), "one is 'codebook:m=1,v=4' with K=64, another 'int4' with K=64"),
    ],
)
def test_unlike_weights_are_not_stacked(other: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"cannot be stacked: {why}"):
        stack([packed("codebook:m=1,v=4"), packed(*other)])


def test_outputs_rotated_in_other_blocks_are_not_stacked() -> None:
    with pytest.raises(InvalidInput, match=r"N=\[32, 64\] would be rotated in other blocks"):
        stack([packed("int4:rotate=kn", n) for n in (32, 64)])


def test_weights_are_stacked() -> None:
    parts = [packed(seed=seed) for seed in range(3)]
    both = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stack(parts).dequantize(), both)


def test_a_weight_is_shown_in_a_line() -> None:
    w = packed("int4:group=32")
    assert repr(w) == f"Packed(8x64, 'int4:group=32', 4.5 bits a weight, {w.nbytes()} bytes)"
