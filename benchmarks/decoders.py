"""Other ways to decode than ours, which `ablation.py` compiles in their place.

Each reads the codes that ours reads and makes the same operand, or a multiple of it that is a power
of two.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from anybit.formats.liquid import LiquidDecoder
from anybit.kernels.cute.decode import Constants, Decoder, HalfDecoder
from anybit.kernels.cute.lang import LANES, Word, bytes_of

SHIFT = 12  # log2 of what bit moves into fp16 leave out of FP6 (e3m2)
HIGH, REST = 0x80808080, 0x7F7F7F7F  # of bytes


@dataclass(frozen=True)
class Lanes(LiquidDecoder):
    """QServe's order: products first, then a sum in each byte, which may wrap around.

    So no carry may reach the next byte: PTX's `vadd4`, for which Hopper has no instruction.
    LiquidQuant's codes are such that nothing wraps, so its one multiply-add gives the same bytes.
    """

    finishing = 4

    def finish(self, register: Word, row: Constants) -> Word:
        step, offset = row
        product = register * step
        return ((product & REST) + (offset & REST)) ^ ((product ^ offset) & HIGH)


@dataclass(frozen=True)
class Four(Decoder):
    """FP6-LLM's order: four codes at once, as the high bytes of fp16, which are then spread."""

    @property
    def instructions(self) -> int:
        return self.bytes.instructions + self.slot

    @property
    def bytes(self) -> Decoder:
        """What gathers codes into bytes."""
        return Decoder("float8_e4m3fn", tuple(place - 8 for place in self.places))

    def order(self) -> Tensor:
        # Byte e of word j is number e // 2 of register 2 j, or of the next one where e is even.
        word, e = torch.arange(LANES) // 4, torch.arange(LANES) % 4
        weight = (2 * word + 1 - e % 2) * 2 + e // 2
        order = self.bytes.order()
        return weight[order // self.bits] * self.bits + order % self.bits

    def registers(self, words: list[Word], constants: list[Any]) -> list[Word]:
        four = [self.bytes.gather(words, j) for j in range(8)]
        return [bytes_of(word, pick) for word in four for pick in (0x3414, 0x2404)]


def ours(decoder: Decoder) -> Decoder:
    return decoder


def lanes(decoder: Decoder) -> Decoder:
    return Lanes(**{f.name: getattr(decoder, f.name) for f in fields(Decoder)})


def unshifted(decoder: Decoder) -> Decoder:
    """The exponent's bias made good in every weight, by a product, and not in the scale."""
    assert isinstance(decoder, HalfDecoder)
    return replace(decoder, lift=SHIFT)


def four(decoder: Decoder) -> Decoder:
    return Four(decoder.operand, decoder.places, decoder.shift)
