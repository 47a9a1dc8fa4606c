"""How tools pack codes into words, and back."""

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from anybit.core import planes as bits


def unpack(words: Tensor, width: int, count: int) -> Tensor:
    """Codes of `width` bits (1 to 8) in a stream of int32 words, low bits first, along dim 1.

    words (R, >= ceil(count * width / 32)) -> (R, count) uint8. Codes may cross words' borders.
    """
    if width in (1, 2, 4, 8):
        return bits.unpack((words,), width, count)
    blocks = -(-count // 32)
    wide = padded(words, (0, max(0, blocks * width - words.shape[1])))
    wide = wide[:, : blocks * width].reshape(len(words), blocks, width).long() & 0xFFFFFFFF
    out = torch.empty(len(words), blocks, 32, dtype=torch.uint8)
    for i in range(32):
        word, shift = divmod(i * width, 32)
        value = wide[..., word] >> shift
        if shift + width > 32:
            value |= wide[..., word + 1] << (32 - shift)
        out[..., i] = value & ((1 << width) - 1)
    return out.reshape(len(words), -1)[:, :count].contiguous()


def unsigned(q: Tensor, width: int) -> Tensor:
    """Codes uint8 of signed integers of `width` bits, int8: the least one is 0."""
    return (q.int() + 2 ** (width - 1)).to(torch.uint8)


def pack(codes: Tensor, width: int) -> Tensor:
    """The inverse of `unpack`: (R, count) uint8 -> int32 words (R, ceil(count * width / 32))."""
    if width in (1, 2, 4, 8):
        return bits.pack(codes, width)[0]
    blocks = -(-codes.shape[1] // 32)
    whole = padded(codes, (0, blocks * 32 - codes.shape[1])).reshape(len(codes), blocks, 32)
    out = torch.zeros(len(codes), blocks, width, dtype=torch.int64)
    for i in range(32):
        word, shift = divmod(i * width, 32)
        code = whole[..., i].long()
        out[..., word] |= code << shift
        if shift + width > 32:
            out[..., word + 1] |= code >> (32 - shift)
    used = -(-codes.shape[1] * width // 32)
    return signed(out.reshape(len(codes), -1)[:, :used])


def fields(words: Tensor, width: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes of words that hold 32 // width each, low bits first: (R, W) -> (R, W * (32 // width)).

    order: field i of a word is the code at order[i]; in their own order by default.
    """
    per = 32 // width
    out = torch.empty(*words.shape, per, dtype=torch.uint8)
    for i in range(per):
        out[..., order[i] if order else i] = (words >> (width * i)) & ((1 << width) - 1)
    return out.flatten(1)


def signed(words: Tensor) -> Tensor:
    """Unsigned 32-bit words in int64 -> the same bits in int32."""
    return (words & 0xFFFFFFFF).sub_(1 << 31).to(torch.int32).bitwise_xor_(-(1 << 31))
