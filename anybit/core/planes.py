"""Power-of-two bit planes: the one way that anybit stores codes.

A code of b bits is cut into segments whose widths are powers of two, high bits first: 6 = 4 + 2,
5 = 4 + 1, 7 = 4 + 2 + 1 (FP6-LLM's "4+2" made general). Every segment becomes its own plane of
little-endian int32 words along K, so every plane is aligned, only the last word of a row is
padded, and a slice of the matrix along N, or along K at multiples of 32 codes, is a slice of the
planes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.errors import InvalidInput

MOST = 24  # bits of a code
_BYTE = {4: torch.int16, 2: torch.int32, 1: torch.int64}  # the codes of a byte, in a byte each


def segments(bits: int) -> tuple[int, ...]:
    """Widths of the planes that hold codes of `bits` bits, high bits first: 7 -> (4, 2, 1)."""
    if not 1 <= bits <= MOST:
        raise InvalidInput(f"codes of {bits} bits are not supported; use 1 to {MOST}")
    return tuple(width for width in (16, 8, 4, 2, 1) if bits & width)


def words(codes: int, width: int) -> int:
    """int32 words that hold one row of `codes` codes in a plane of `width` bits."""
    return -(-codes * width // 32)


def pack(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Split integer codes (N, C), each below 2**bits, into planes of int32 (N, words)."""
    planes, low = [], bits
    # So that strides of dimensions of one, too, are those of bytes.
    codes = codes.flatten().view(codes.shape)
    padded = _widened(codes, -codes.shape[1] % 32, bits)
    for width in segments(bits):
        low -= width
        field = (padded >> low) & ((1 << width) - 1) if width < bits else padded
        plane = _join(field, width)
        planes.append(plane[:, : words(codes.shape[1], width)].contiguous())
    return tuple(planes)


def unpack(planes: tuple[Tensor, ...], bits: int, codes: int) -> Tensor:
    """The inverse of `pack`: codes (N, codes), uint8 for up to 8 bits, else int32."""
    total = None
    for plane, width in zip(planes, segments(bits), strict=True):
        full = -(-codes // 32) * width
        part = _split(_widened(plane, full - plane.shape[1], width), width)
        part = part.int() if bits > 8 else part
        total = part if total is None else (total << width) | part
    assert total is not None
    return total[:, :codes].contiguous()


def _widened(rows: Tensor, missing: int, width: int) -> Tensor:
    """The rows with so many zeros more: a copy where what is made of 8 bits would share memory."""
    if missing:
        return pad(rows, (0, missing))
    return rows.clone() if width == 8 else rows


def _join(codes: Tensor, width: int) -> Tensor:
    """(N, 32 n) codes of `width` bits -> (N, n * width) words."""
    if width == 16:
        return codes.to(torch.int16).view(torch.int32)
    if width == 8:
        return codes.to(torch.uint8).contiguous().view(torch.int32)
    x = codes.to(torch.uint8).contiguous().view(_BYTE[width])
    gap, step = 8 - width, 1
    while step * width < 8:  # fields of 8, 16, 32 bits become one of twice the size
        moved = x >> (gap * step)
        x = moved.bitwise_or_(x).bitwise_and_(_mask(step * width * 2, step * 16, x.itemsize))
        step *= 2
    return x.to(torch.uint8).view(torch.int32)


def _split(plane: Tensor, width: int) -> Tensor:
    """The inverse of `_join`."""
    plane = plane.contiguous()
    if width == 16:
        return plane.view(torch.int16).to(torch.int32) & 0xFFFF
    if width == 8:
        return plane.view(torch.uint8)
    x = plane.view(torch.uint8).to(_BYTE[width])
    gap, step = 8 - width, 4 // width
    while step:
        moved = x << (gap * step)
        x = moved.bitwise_or_(x).bitwise_and_(_mask(step * width, step * 8, x.itemsize))
        step //= 2
    return x.view(torch.uint8)


def _mask(ones: int, field: int, size: int) -> int:
    """A mask of `size` bytes with the low `ones` bits set in every `field` bits."""
    return sum(((1 << ones) - 1) << at for at in range(0, 8 * size, field))
