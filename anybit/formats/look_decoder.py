"""The trellis code `look` as operands of tensor cores: a hash where the state lies, a look-up.

The two bytes of a state lie side by side in a word, so one DP4A is its hash (`trellis_look.py`).
Its bits are the address of four values, or of two, in a table in shared memory; those of a product
with it are their signs, which one XOR applies to four.

Four values of a row are columns c, c + 1, c + 8 and c + 9, as operands of 16 bits have them. A lane
of an int8 product wants four neighbours. So lanes of a quad decode in another order, in which pairs
of them, two apart, exchange halves: of weights, or, where these are fewer, of tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anybit.formats.trellis_decoder import TILES, TrellisDecoder, windows
from anybit.formats.trellis_look import LOOKS, Look
from anybit.kernels.cute.decode import Constants
from anybit.kernels.cute.lang import LANES, Table, Word, bytes_of, dot4, from_lane, lane

TABLE_BYTES = 1 << 15  # 256 words, a copy of each for every bank
PLANE = 50  # instructions for 32 weights that take as long as a plane of other codes


@dataclass(frozen=True)
class LookDecoder(TrellisDecoder):
    """A code's values as bytes that are 128 too large, or as fp16 or bf16."""

    code: str = "look"

    table_bytes = TABLE_BYTES

    @property
    def width(self) -> int:
        return self.look.width

    @property
    def look(self) -> Look:
        return LOOKS[self.bits - 1]

    @property
    def arranges(self) -> bool:  # type: ignore[override]
        return self.slot == 8

    @property
    def cost(self) -> float:
        return self.instructions / PLANE

    @cached_property
    def instructions(self) -> int:
        each = 6 if self.width == 4 else 5.5  # of a step; two steps of two weights share three
        tile = self.finding + 8 // self.width * each + (4 if self.slot == 8 else 8)
        return int(TILES * tile) + min(self.bits, TILES)

    def stored(self, codes: Tensor) -> Tensor:
        rows = super().stored(codes)
        if self.slot == 16:
            return rows
        pairs = rows.view(len(rows), -1, 4, 2)  # lanes of a quad have two columns of eight
        return pairs[:, :, [0, 2, 1, 3]].reshape(rows.shape)

    def before(self, mine: Word, lanes: int) -> Word:
        if self.slot == 16:
            return super().before(mine, lanes)
        return swapped(super().before(swapped(mine), lanes))

    def table(self) -> Tensor:
        return (self.look.table() ^ -128).flatten().view(torch.int32)  # 128 more: unsigned bytes

    def registers(
        self,
        words: list[Word],
        constants: list[tuple[Constants, Constants]],
        table: Table | None = None,
        arranged: bool = False,
    ) -> list[Word]:
        assert table is not None
        out: list[Word] = []
        for hashes in self.hashes(words):
            signs = [h * self.look.spread for h in hashes]
            if self.width == 4:
                found = [table.word(h) for h in hashes]
                signs = [bytes_of(s, 0xBA98) for s in signs]
            else:
                both = [table.half(h) for h in hashes]
                found = [bytes_of(both[i], 0x5410, both[i + 1]) for i in (0, 2)]
                signs = [bytes_of(signs[i], 0xDC98, signs[i + 1]) for i in (0, 2)]
            rows = [f ^ s for f, s in zip(found, signs, strict=True)]
            if self.slot == 8:
                out += rows if arranged else exchanged(*rows)
            else:
                halves = [bytes_of(row, digits) for digits in (0x4140, 0x4342) for row in rows]
                out += [self.finish(half, ()) for half in halves]
        return out

    def hashes(self, words: list[Word]) -> list[list[Word]]:
        """Of the lane's steps in each tile.

        A PRMT brings two states that lie in the same two words into one. Where there is no second
        one, two DP4As take its place, since its pipe has most to do.
        """
        plan, previous = windows(self.bits, self.step), self.previous(words)
        both = self.look.high << 8 | self.look.low
        if any(window.left for window in plan):
            lines = [self.lines(words, previous, tile) for tile in range(TILES)]
            return [[self.hash(line, both << 8 * low) for line, low in found] for found in lines]
        strings = [self.string(words, previous, tile) for tile in range(TILES)]
        states = [s[w.line + w.byte :][:2] for s in strings for w in plan]
        out: dict[int, Word] = {}
        for i, ((first, high), (second, low)) in enumerate(states):
            alike = [j for j, ((a, _), (b, _)) in enumerate(states) if a is first and b is second]
            if first is second:
                upper, lower = self.look.high << 8 * high, self.look.low << 8 * low
                out[i] = self.hash(first, upper | lower)
            elif len(alike) == 1:
                rest = self.hash(second, self.look.low << 8 * low)
                out[i] = dot4(first, self.look.high << 8 * high, rest, signed=False)
            elif alike[0] == i:
                digits = [states[j][1][1] | 4 + states[j][0][1] << 4 for j in alike]
                line = bytes_of(second, digits[1] << 8 | digits[0], first)
                for place, j in enumerate(alike):
                    out[j] = self.hash(line, both << 16 * place)
        return [[out[t * len(plan) + i] for i in range(len(plan))] for t in range(TILES)]

    def hash(self, line: Word, weights: int) -> Word:
        return dot4(line, weights, 0, signed=False)

    def arrange(self, tokens: list[Word]) -> list[Word]:
        return exchanged(*tokens[:2]) + exchanged(*tokens[2:])


def swapped(mine: Word) -> Word:
    """Lanes 1 and 2 of each quad change places."""
    return (mine & LANES - 4) | ((mine & 1) << 1) | ((mine >> 1) & 1)


def exchanged(low: Word, high: Word) -> list[Word]:
    """Two words of four neighbouring columns, of columns c, c + 1, c + 8 and c + 9; or back.

    Lane t of a quad gives its upper halves for the lower ones of lane t + 2.
    """
    mine = lane(low)
    upper = (mine >> 1) & 1
    sent = bytes_of(low, upper * (0x5410 - 0x7632) + 0x7632, high)
    got = from_lane(sent, mine ^ 2)
    return [
        bytes_of(low, upper * (0x3254 - 0x5410) + 0x5410, got),
        bytes_of(high, upper * (0x3276 - 0x7610) + 0x7610, got),
    ]
