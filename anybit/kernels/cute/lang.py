"""What a Hopper decoder is written in: 32-bit words, and where the bits of a code lie in them.

A decoder turns packed words into the registers of a WGMMA's A operand. It is plain Python on
`Word`, which behaves like an unsigned 32-bit integer: inside a kernel it stands for a register of
one thread, and in a test for a numpy array with that register of many threads. So the function that
is compiled is the function that is tested, without a GPU. This module needs no CuTe DSL.
"""

from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from anybit.errors import InvalidInput

LANES = 32  # bits of a word


class Word:
    """A 32-bit register: a DSL `Uint32`, or a numpy array of uint32."""

    __slots__ = ("bits",)

    def __init__(self, bits: Any):
        self.bits = bits

    @property
    def emulated(self) -> bool:
        return isinstance(self.bits, np.ndarray)

    def _constant(self, value: int) -> Any:
        return np.uint32(value & 0xFFFFFFFF) if self.emulated else _dsl().unsigned(value)

    def _binary(self, other: "Word | int", name: str) -> "Word":
        right = other.bits if isinstance(other, Word) else self._constant(other)
        return Word(getattr(self.bits, name)(right))

    def __and__(self, other: "Word | int") -> "Word":
        return self._binary(other, "__and__")

    def __or__(self, other: "Word | int") -> "Word":
        return self._binary(other, "__or__")

    def __xor__(self, other: "Word | int") -> "Word":
        return self._binary(other, "__xor__")

    def __add__(self, other: "Word | int") -> "Word":
        return self._binary(other, "__add__")

    def __mul__(self, other: "Word | int") -> "Word":
        return self._binary(other, "__mul__")

    def __lshift__(self, n: int) -> "Word":
        return self._binary(n, "__lshift__")

    def __rshift__(self, n: int) -> "Word":
        return self._binary(n, "__rshift__")

    def constant(self, value: int) -> "Word":
        """The same value in every thread."""
        if self.emulated:
            return Word(np.full_like(self.bits, value & 0xFFFFFFFF))
        return Word(self._constant(value))


class Table(NamedTuple):
    """256 words in shared memory, each 32 times: a lane finds its copy in a bank of its own.

    Attributes:
        words: In a kernel, the table's address; (256,) uint32 where it is emulated.
    """

    words: Any

    def word(self, hashed: Word) -> Word:
        """The word whose number is in bits 7 to 14."""
        if not hashed.emulated:
            return Word(_dsl().look_up(self.words, hashed.bits, (lane(hashed) << 2).bits, 0x7F80))
        return Word(self.words[hashed.bits >> np.uint32(7) & np.uint32(255)])

    def half(self, hashed: Word) -> Word:
        """Of this word the low half, or the high one if bit 1 is set; zeros above."""
        if not hashed.emulated:
            place = (lane(hashed) << 2).bits
            return Word(_dsl().look_up(self.words, hashed.bits, place, 0x7F82))
        return Word(self.word(hashed).bits >> (hashed.bits & np.uint32(2)) * np.uint32(8)) & 0xFFFF


def _dsl() -> Any:
    """The instructions that have no operator in Python; imported inside a kernel only."""
    from anybit.kernels.cute import ptx

    return ptx


def rotate(word: Word, left: int, mask: int) -> Word:
    """`word` rotated left, right in the bits of `mask` at least (which may save an instruction)."""
    left %= LANES
    if left == 0:
        return word
    wrapped = mask & ((1 << left) - 1)  # these bits come from the upper end
    if not wrapped:
        return word << left
    if wrapped == mask:
        return word >> (LANES - left)
    return (word << left) | (word >> (LANES - left))


def bytes_of(word: Word, selector: int | Word, other: Word | None = None) -> Word:
    """PRMT: byte i of the result is byte (selector >> 4 i) & 7 of `word`; 4 to 7 are `other`'s.

    Where bit 3 of a digit is set, the byte's top bit fills the whole byte. Without `other`, digits
    4 to 7 give zero. A selector that is a word may differ from thread to thread.
    """
    if not word.emulated:
        digits = selector.bits if isinstance(selector, Word) else selector
        return Word(_dsl().prmt(word.bits, digits, 0 if other is None else other.bits))
    digits = selector.bits if isinstance(selector, Word) else np.uint32(selector)
    out = np.zeros_like(word.bits)
    for i in range(4):
        digit = digits >> np.uint32(4 * i)
        high = np.zeros_like(word.bits) if other is None else other.bits
        source = np.where(digit & np.uint32(4), high, word.bits)
        byte = source >> np.uint32(8) * (digit & np.uint32(3)) & np.uint32(255)
        byte = np.where(digit & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
        out |= byte << np.uint32(8 * i)
    return Word(out)


def mask_flip(word: Word, mask: int, flip: int) -> Word:
    """(word & mask) ^ flip in one LOP3; of constants, ptxas would make two."""
    if not word.emulated:
        return Word(_dsl().mask_flip(word.bits, mask, flip))
    return (word & mask) ^ flip


def dot4(word: Word, weights: int, plus: int | Word, signed: bool = True) -> Word:
    """DP4A: the four bytes of `word` times those of `weights`, added up, plus `plus`.

    signed: Whether the weights are.
    """
    more = plus.bits if isinstance(plus, Word) else plus
    if not word.emulated:
        return Word(_dsl().dp4a(word.bits, weights, more, signed))
    total = np.full(word.bits.shape, more, np.int64)
    for i in range(4):
        weight = weights >> 8 * i & 255
        weight = (weight ^ 128) - 128 if signed else weight
        total += (word.bits >> np.uint32(8 * i) & np.uint32(255)).astype(np.int64) * weight
    return Word(total.astype(np.uint32))


def byte_sums(rows: list[Word], columns: list[Word], plus: tuple[int, int]) -> list[Word]:
    """Bytes of a quad of lanes times signed bytes, added up: one product on the tensor core.

    Args:
        rows: The A operand of m16n8k32, four words: 0 and 2 are row g, 8 bytes from each lane of
            the quad, 1 and 3 row g + 8.
        columns: The B operand, two words: what lane 4 n + t has is multiplied with the bytes of
            lane t, and added to the sum n; the second word goes with words 2 and 3.
        plus: What is added to even and to odd sums.

    Returns:
        Sums 2 t and 2 t + 1 of row g, and of row g + 8, for lane t of a quad.
    """
    if not rows[0].emulated:
        found = _dsl().mma_bytes([w.bits for w in rows], [w.bits for w in columns], plus)
        return [Word(bits) for bits in found]
    matrix = np.concatenate([_quads(w) for w in columns], -1)
    matrix = (matrix ^ 128) - 128
    out = []
    for v in (0, 1):
        row = np.concatenate([_quads(w) for w in rows[v::2]], -1)
        sums = row @ np.swapaxes(matrix, -1, -2)  # (..., warp, g, column)
        for i in (0, 1):
            found = sums[..., i::2].reshape(rows[0].bits.shape) + plus[i]
            out.append(Word(found.astype(np.uint32)))
    return out


def _quads(word: Word) -> np.ndarray:
    """(..., warp, quad 8, bytes 16) int64."""
    bits = np.ascontiguousarray(word.bits)
    return bits.view(np.uint8).reshape(*bits.shape[:-1], -1, 8, 16).astype(np.int64)


def lane(like: Word) -> Word:
    """The thread's number in its warp; the last axis of emulated words is that of threads."""
    if not like.emulated:
        return Word(_dsl().lane())
    count = like.bits.shape[-1]
    return Word(np.broadcast_to(np.arange(count, dtype=np.uint32) % np.uint32(32), like.bits.shape))


def from_lane(word: Word, source: Word) -> Word:
    """SHFL: what the lane `source` (0 to 31) of the warp has in `word`; all lanes must ask."""
    if not word.emulated:
        return Word(_dsl().shuffle(word.bits, source.bits))
    first = np.arange(word.bits.shape[-1]) // 32 * 32
    return Word(np.take_along_axis(word.bits, first + source.bits, -1))


def add_halves(word: Word) -> Word:
    """The sum of a word's two fp16 numbers, in both halves."""
    if not word.emulated:
        return Word(_dsl().add_halves(word.bits))
    return add2(bytes_of(word, 0x1010), bytes_of(word, 0x3232), "float16")


def to_brain(word: Word) -> Word:
    """Two fp16 numbers as bf16, rounded to nearest even."""
    if not word.emulated:
        return Word(_dsl().half_to_brain(word.bits))
    return Word(_join_halves(_halves(word, "float16"), "bfloat16"))


def mul2(a: Word, b: Word, dtype: str) -> Word:
    """Two products of fp16 or bf16 numbers, each rounded once."""
    if not a.emulated:
        return Word(_dsl().half2("mul.rn", dtype, (a.bits, b.bits)))
    return Word(_join_halves(_halves(a, dtype) * _halves(b, dtype), dtype))


def add2(a: Word, b: Word, dtype: str) -> Word:
    """Two sums of fp16 or bf16 numbers, each rounded once."""
    if not a.emulated:
        return Word(_dsl().half2("add.rn", dtype, (a.bits, b.bits)))
    return Word(_join_halves(_halves(a, dtype) + _halves(b, dtype), dtype))


def fma2(a: Word, b: Word, c: Word, dtype: str) -> Word:
    """Two of a * b + c in fp16 or bf16, each rounded once."""
    if not a.emulated:
        return Word(_dsl().half2("fma.rn", dtype, (a.bits, b.bits, c.bits)))
    exact = _halves(a, dtype) * _halves(b, dtype) + _halves(c, dtype)
    return Word(_join_halves(exact, dtype))


def half_bits(value: float, dtype: str) -> int:
    """A number, and the same number again, as fp16 or bf16: a constant for `mul2` and its kin.

    Raises ValueError when the dtype cannot hold the number exactly.
    """
    number = torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype))
    if float(number) != value:
        raise InvalidInput(f"{value} is no {dtype} number")
    bits = int(number.view(torch.int16)) & 0xFFFF
    return bits << 16 | bits


def _halves(word: Word, dtype: str) -> np.ndarray:
    """Array (..., 2) of float64: the halves of a word, low first."""
    raw = torch.from_numpy(word.bits.view(np.int16).copy()).view(getattr(torch, dtype))
    return raw.double().numpy().reshape(*word.bits.shape, 2)


def _join_halves(values: np.ndarray, dtype: str) -> np.ndarray:
    # float64 holds these products and sums exactly, and fp32 too, through which bf16 goes.
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))
    return rounded.view(torch.int16).numpy().view(np.uint32).reshape(values.shape[:-1])


# Where bits lie.


class Plane(NamedTuple):
    """Some bits of every code, so stored that one rotation and one mask bring them into place.

    places: where those bits stand in an operand element ("slot"), lowest bit of the code first.
    bits: which bits of the code they are. shifts: one for each register of a word: how far the
    stored bits were moved left; together they fill the slot exactly.
    """

    places: tuple[int, ...]
    bits: tuple[int, ...]
    shifts: tuple[int, ...]


@cache
def planes(places: tuple[int, ...], slot: int) -> tuple[Plane, ...]:
    """Cut codes, whose bit i belongs at places[i] of a slot, into as few planes as possible.

    FP6-LLM's 4 + 2 segments, made general: the widths are powers of two, and translates of each
    plane's pattern tile the slot, so that no bit of a word is wasted.
    """
    found = _cut(tuple(range(len(places))), places, slot, len(places))
    assert found is not None  # single bits always tile
    return found


@cache  # subsets of the bits come back many times
def _cut(
    bits: tuple[int, ...], places: tuple[int, ...], slot: int, widest: int
) -> tuple[Plane, ...] | None:
    if not bits:
        return ()
    best: tuple[Plane, ...] | None = None
    fewest = len(bits).bit_count()  # planes, if the widths are the binary digits of the count
    for width in (8, 4, 2, 1):
        if width > min(widest, len(bits)):
            continue
        for some in combinations(bits, width):
            shifts = tiling(tuple(places[b] - places[some[0]] for b in some), slot)
            if shifts is None:
                continue
            rest = _cut(tuple(b for b in bits if b not in some), places, slot, width)
            if rest is not None and (best is None or 1 + len(rest) < len(best)):
                best = (Plane(tuple(places[b] for b in some), some, shifts), *rest)
                if len(best) == fewest:
                    return best
    return best


@cache
def tiling(pattern: tuple[int, ...], slot: int) -> tuple[int, ...] | None:
    """Shifts of a set of bits that together cover every bit of a slot once (cyclically)."""

    def cover(taken: int) -> tuple[int, ...] | None:
        if taken == (1 << slot) - 1:
            return ()
        first = next(i for i in range(slot) if not taken >> i & 1)
        for offset in pattern:
            shift = (first - offset) % slot
            bits = sum(1 << ((p + shift) % slot) for p in pattern)
            if not bits & taken:
                rest = cover(taken | bits)
                if rest is not None:
                    return (shift, *rest)
        return None

    if slot % len(pattern) or len({p % slot for p in pattern}) < len(pattern):
        return None
    return cover(0)
