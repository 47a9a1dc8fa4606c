"""LiquidQuant (LiquidGEMM, section 4): 4-bit weights that decode to int8 without overflow.

Two levels. First an int8 for every weight, inside [-119, 119], with one scale a row; then a uint4
per weight in groups of 64, with an integer step s <= 16 and the group's minimum. The int8 is
(q * s + a) XOR 0x80 with a = 128 + min, in 8-bit arithmetic that never leaves [0, 255]
(equations 9 to 12), so four packed codes decode with one 32-bit multiply-add and one XOR.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.core.format import Entry, Format, Grid, register
from anybit.core.groups import extremes, grouped, groups_of, store_scale, ungroup
from anybit.core.packed import Packed
from anybit.kernels.cute.decode import Constants, Decoder
from anybit.kernels.cute.lang import Word, bytes_of

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang

LIMIT = 119  # equation 11: 119 + 16 / 2 + 128 = 255
LEVELS = 15
STEPS = 16


@dataclass(frozen=True)
class LiquidDecoder(Decoder):
    """q * s + a in every byte, four weights with one IMAD (equation 12).

    The XOR 0x80 is left out: the operand is unsigned, and the epilogue subtracts 128 * sum(x).
    """

    grid_words = 1
    finishing = 1
    preparing = 4

    def grid(self, packed: Packed) -> Tensor:
        step, offset = packed.grid["step"].int(), packed.grid["offset"].int()
        return (step | offset << 8)[..., None]

    def constants(self, words: list[Word]) -> tuple[Constants, Constants]:
        word = words[0]
        low = bytes_of(word, 0x4440), bytes_of(word, 0x1111)
        return low, (bytes_of(word, 0x4442), bytes_of(word, 0x3333))

    def finish(self, register: Word, row: Constants) -> Word:
        step, offset = row
        return register * step + offset


@register("liquid")
@dataclass(frozen=True)
class Liquid(Format):
    """uint4 codes over an int8 grid.

    The grid holds "scale" (N, 1) of the first level, and of the second "step" (N, K / group) uint8,
    which is s, and "offset" (N, K / group) uint8, which is a = 128 + min.

    Attributes:
        group: Columns that share a step and a minimum.
    """

    group: int = 64

    bits = 4
    operand = "int8"
    made_for = "int8"

    def entries(self) -> dict[str, Entry]:
        level = Entry(torch.uint8, self.group)
        return {"scale": Entry(), "step": level, "offset": level}

    def fit(self, w: Tensor) -> Grid:
        """Of equation 7's step, one less and one more, the one of least squared error in a group.

        All are centered on the group's range: of a step too small for it both ends are cut.
        """
        low, high = (t[..., None] for t in extremes(w))
        scale = store_scale(torch.maximum(high, -low) / LIMIT)
        x = groups_of(self._in_int8(w, scale), self.group)
        low, high = extremes(x)
        tried, errors = [], []
        for more in (0, -1, 1):
            step = ((high - low) / LEVELS).round_().add_(more).clamp_(1, STEPS)
            offset = ((low + high - LEVELS * step) / 2).round_().clamp_(-128)
            tried.append(torch.stack((step, offset + 128)).to(torch.uint8))
            codes = self._nearest(x, *tried[-1])
            errors.append(self._numbers(codes, *tried[-1]).sub_(x).square_().sum(-1))
        best = torch.stack(errors).argmin(0).expand(1, 2, *step.shape)
        step, offset = torch.stack(tried).gather(0, best)[0]
        return {"scale": scale, "step": step.clone(), "offset": offset.clone()}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        x = grouped(self._in_int8(w, grid["scale"]), grid["step"])
        return ungroup(self._nearest(x, grid["step"], grid["offset"])).to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        """The int8 weights, equation 8: q * s + min."""
        q = grouped(codes.float(), grid["step"])
        return ungroup(self._numbers(q, grid["step"], grid["offset"]))

    def _in_int8(self, w: Tensor, scale: Tensor) -> Tensor:
        """In units of the first level, where no code overflows; rounded once, by the second."""
        return (w * (1 / scale.float())).clamp_(-LIMIT, LIMIT)

    def _nearest(self, x: Tensor, step: Tensor, offset: Tensor) -> Tensor:
        x = x - (offset.float()[..., None] - 128)
        return x.div_(step.float()[..., None]).round_().clamp_(0, LEVELS)

    def _numbers(self, q: Tensor, step: Tensor, offset: Tensor) -> Tensor:
        return (q * step.float()[..., None]).add_(offset.float()[..., None] - 128)

    def triton_decode(self, at: Any) -> Any:
        operand: tl.constexpr = at[lang.DTYPE]
        if operand == tl.int8:
            return lang.multiply_add(at, lang.level(at, 0), lang.level(at, 1))
        else:  # noqa: RET505  (Triton compiles what follows a return, too)
            return lang.number(at) * lang.level(at, 0) + (lang.level(at, 1) - 128)

    def hopper_decode(self, operand: str) -> Decoder | str:
        if operand != "int8":
            return "liquid decodes to int8 only; quantize activations too: liquid@int8"
        return LiquidDecoder("uint8", (0, 1, 2, 3), group=self.group, middle=128)
