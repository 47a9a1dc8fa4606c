"""Trellis-coded weights (QTIP, https://arxiv.org/abs/2406.11235): 1 to 8 bits a weight.

The weights of a 16x16 tile are a sequence, and a step of it codes V of them by B = bits * V new
bits. What they stand for depends on the last L = 16 bits, the state, around the sequence's end
("tail-biting"), so a tile decodes alone:

    state[t] = code[t] + 2**B code[t-1] + 2**2B code[t-2] + ...    mod 2**16
    values of step t = table[state[t]]

So a weight takes the bits of a scalar code, and errs as little as a code for 256 dimensions. Tables
are computed, not stored (QTIP, section 3.1): one product of the state, and sums of its bytes or
halves; or the bytes hashed, and 1 KB looked up (`trellis_look.py`). `core/tiles.py` says where the
weights of a sequence lie, `kernels/viterbi.py` how it is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from anybit.core import tiles
from anybit.core.format import Format, Grid, register
from anybit.core.groups import divisor, groups_of, store_scale
from anybit.errors import InvalidInput
from anybit.formats import trellis_look
from anybit.formats.look_decoder import LookDecoder
from anybit.formats.trellis_decoder import TrellisDecoder, decoder_of
from anybit.kernels.between import of
from anybit.kernels.cute.decode import Decoder

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang

STATE = 16  # L
# The input's standard deviation in units of the code's, by bits a weight: what erred least on
# Gaussian numbers with `sum8`, in steps of 0.03 to 0.1. From 5 bits on, the range of int8 decides.
GAINS = (1.08, 0.97, 0.92, 0.87, 0.87, 0.82, 0.83, 0.8)


@register("trellis")
@dataclass(frozen=True)
class Trellis(Format):
    """Tail-biting sequences of a bitshift trellis in tiles of 16x16, a scale for every row.

    Attributes:
        rate: The option bits=: bits a weight, 1 to 8.
        code: sum8, the default, pair8 (two weights a step, 1 to 4 bits) and look (four weights a
            step of 1 and 2 bits, two of 3 and 4) have values within int8; mul1, mcg and 3inst are
            EXL3's.
    """

    rate: int = field(default=2, metadata={"option": "bits"})
    code: str = "sum8"

    tile = (tiles.SIDE, tiles.SIDE)
    window = STATE
    searched = False

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise InvalidInput(f"trellis:code={self.code} is unknown; known: {', '.join(CODES)}")
        most = len(CODES[self.code].widths)
        if not 1 <= self.rate <= most:
            raise InvalidInput(
                f"trellis:bits={self.rate} is out of range; code={self.code} has 1 to {most} bits"
            )

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.rate * self.width

    @property
    def width(self) -> int:  # type: ignore[override]
        return CODES[self.code].widths[self.rate - 1]

    @property
    def operand(self) -> str:  # type: ignore[override]
        return "int8" if CODES[self.code].whole else "activation"

    def fit(self, w: Tensor) -> Grid:
        unit = CODES[self.code].gains[self.rate - 1] * float(self.table().std())
        size = groups_of(w, 0).square().mean(-1).sqrt_()
        return {"scale": store_scale(size / unit, zeros=0)}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        x = tiles.sequences(w / divisor(grid["scale"]))
        x = x.view(len(x), -1, self.width)
        states = of(x).paths(x, self.table(w.device), self, x.shape[1] // 2)
        return tiles.join((states & (1 << self.bits) - 1).to(torch.uint8), len(w))

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        sequence = tiles.cut(codes, tiles.SIDE // self.width).int()
        state = sequence.clone()
        for i in range(1, -(-STATE // self.bits)):
            state |= sequence.roll(i, 1) << i * self.bits
        numbers = embedding(state & (1 << STATE) - 1, self.table(codes.device))
        return tiles.from_sequences(numbers.flatten(1), len(codes))

    @property
    def look(self) -> trellis_look.Look:
        """The constants of code=look."""
        return trellis_look.LOOKS[self.rate - 1]

    def tables(self) -> Grid:
        """Of code=look the words, or halves of words, of its table."""
        words = {4: torch.int32, 2: torch.int16}[self.width] if self.code == "look" else None
        return {"look": self.look.table().view(words).flatten()} if words else {}

    def table(self, device: torch.device | None = None) -> Tensor:
        """The values (2**16, width) fp32 of all states."""
        return table(self.code, self.rate, device)

    def triton_decode(self, at: Any) -> Any:
        s = lang.window(at)
        # One return: Triton compiles what follows a branch that returns.
        if self.code == "sum8":
            value = (lang.dot4(s * 0x83DCD12D, 0x01010101, 4) >> 2) - 128
        elif self.code == "pair8":
            x = s * 0xCBAC1FED
            first = lang.dot4(x, 0xC000405A, 128 - 11475) >> 8
            value = lang.pair(first, lang.dot4(x, 0x405A4000, 128 - 27795) >> 8)
        elif self.code == "look":
            h = (s & 255) * self.look.low + (s >> 8) * self.look.high
            index = h >> 7 & 255
            if self.width == 2:
                index = index * 2 + (h >> 1 & 1)
            flips = (h * self.look.spread >> 7 & 0x01010101) * 255
            entry = lang.entry(at, 0, index).to(tl.uint32)
            value = lang.of_steps(entry ^ flips, self.width)
        elif self.code == "mul1":  # in fp32, which rounds no product and no sum otherwise
            x = lang.dot4(s * 0x83DCD12D, 0x01010101, 1024).to(tl.float32)
            value = (x * 0.00676727294921875 - 10.3828125).to(tl.float16)
        else:
            x = s * 0xCBAC1FED if self.code == "mcg" else s * 89226354 + 64248484
            x = (x & 0x8FFF8FFF) ^ 0x3B603B60
            low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
            value = low + (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return value

    @property
    def hashed(self) -> tiles.Hashed | None:
        if self.code != "look":
            return None
        look = self.look
        return tiles.Hashed(self.rate, look.width, look.low, look.high, look.spread)

    def hopper_decode(self, operand: str) -> Decoder | str:
        kind = LookDecoder if self.code == "look" else TrellisDecoder
        return decoder_of(kind, self.code, self.rate, operand)


@dataclass(frozen=True)
class Code:
    """What states stand for.

    Attributes:
        numbers: States (S,) int64 and bits a weight -> values, (S,) or (S, width).
        widths: Weights of a step, by bits a weight from 1 on.
        whole: Whether all values are integers within int8.
        gains: See `GAINS`.
    """

    numbers: Callable[[Tensor, int], Tensor]
    widths: tuple[int, ...] = (1,) * 8
    whole: bool = False
    gains: tuple[float, ...] = GAINS


def _hash(states: Tensor, times: int, plus: int = 0) -> Tensor:
    """32 bits of each state."""
    return (states * times + plus) & 0xFFFFFFFF


def _dot4(x: Tensor, *weights: int) -> Tensor:
    """Sums of the four bytes of 32 bits, times small integers; low bytes first."""
    return sum((x >> 8 * i & 0xFF) * weight for i, weight in enumerate(weights)) + x * 0


def _sum8(states: Tensor, rate: int) -> Tensor:
    """The bytes' sum, 10 bits, rounded to 8."""
    return (_dot4(_hash(states, 0x83DCD12D), 1, 1, 1, 1) + 4 >> 2) - 128


def _pair8(states: Tensor, rate: int) -> Tensor:
    """Two sums of the same bytes. In the plane of both, the bytes point to a regular octagon."""
    x = _hash(states, 0xCBAC1FED)
    first = _dot4(x, 90, 64, 0, -64) - 11475
    second = _dot4(x, 0, 64, 90, 64) - 27795
    return torch.stack((first, second), 1) + 128 >> 8


def _mul1(states: Tensor, rate: int) -> Tensor:
    """EXL3's "mul1": the bytes' sum, in fp16."""
    total = _dot4(_hash(states, 0x83DCD12D), 1, 1, 1, 1) + 1024
    return (total * 0.00676727294921875 - 10.3828125).half()


def _halves(x: Tensor) -> Tensor:
    """The sum of two numbers of fp16 whose exponents lie about that of 1."""
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (part.to(torch.int16).view(torch.float16) for part in (x & 0xFFFF, x >> 16))
    return low + high


CODES = {
    "sum8": Code(_sum8, whole=True),
    "pair8": Code(_pair8, widths=(2,) * 4, whole=True),
    "look": Code(trellis_look.numbers, trellis_look.WIDTHS, True, trellis_look.GAINS),
    "mul1": Code(_mul1),
    "mcg": Code(lambda states, rate: _halves(_hash(states, 0xCBAC1FED))),
    "3inst": Code(lambda states, rate: _halves(_hash(states, 89226354, 64248484))),
}


@cache
def table(code: str, rate: int, device: torch.device | None = None) -> Tensor:
    """`Trellis.table` of a code."""
    numbers = CODES[code].numbers(torch.arange(1 << STATE), rate)
    return numbers.float().reshape(1 << STATE, -1).to(device)
