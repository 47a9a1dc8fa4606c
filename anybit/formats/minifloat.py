"""Any small floating-point number, eXmY: fp6 (e3m2) and fp5 (e2m2) of ZeroQuant(4+2) and FP6-LLM.

A code is a sign, X exponent bits with bias 2**(X-1) - 1, and Y mantissa bits, with subnormals. All
codes are finite numbers, except where fp16 or float8_e4m3fn read NaN or inf: the largest exponent
of X = 5 and the last code of e4m3 (which reaches 448) are never used.
Weights are W = S * code with S = max|w| / largest value (ZeroQuant(4+2), "FP6").

Decoding needs no exponent arithmetic ("bias shift"): the bits moved under fp16's exponent field
are the value times 2**(bias - 15), subnormals included, and that power of two joins the scale.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.core.format import Format, Grid, read_options, register
from anybit.core.groups import extremes, grouped, groups_of, store_scale, ungroup
from anybit.errors import InvalidInput
from anybit.kernels.cute.decode import BIAS, LIFT, MANTISSA, Decoder, HalfDecoder
from anybit.kernels.cute.tables import looked

if TYPE_CHECKING:
    from anybit.kernels.triton import lang

ALIASES = {"fp8": (4, 3), "fp6": (3, 2), "fp5": (2, 2), "fp4": (2, 1)}
BY_SHAPE = {shape: name for name, shape in ALIASES.items()}


@register("fp", *ALIASES)
@dataclass(frozen=True)
class Minifloat(Format):
    """eXmY of 3 to 8 bits. The grid holds "scale" alone.

    Attributes:
        exponent: X, 1 to 5 bits, written `fp:e3m2`.
        mantissa: Y bits.
        group: Columns that share a scale; 0 means the whole row.
    """

    exponent: int
    mantissa: int
    group: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.exponent <= 5 and self.mantissa >= 0 and 3 <= self.bits <= 8):
            raise InvalidInput(
                f"fp:e{self.exponent}m{self.mantissa} has {self.bits} bits; a minifloat has 3 to 8 "
                "bits and an exponent of 1 to 5: fp:e3m2, fp:e2m2, fp:e4m3"
            )

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """The exponent's bias, 2**(X - 1) - 1."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def shift(self) -> float:
        """What the bit moves into fp16 leave out: 2**(15 - bias), 2**12 for e3m2."""
        return 2.0 ** (15 - self.bias)

    @property
    def largest_code(self) -> int:
        """The code, without sign, of the largest number; NaN and inf are left out."""
        reserved = 1 if (self.exponent, self.mantissa) == (4, 3) else 0
        if self.exponent == 5:  # fp16's exponent, whose highest value is no number
            reserved = 1 << self.mantissa
        return (1 << (self.bits - 1)) - 1 - reserved

    @property
    def largest(self) -> float:
        """The largest value, in units of the scale."""
        return float(self.to_float(torch.tensor(self.largest_code)))

    def fit(self, w: Tensor) -> Grid:
        low, high = extremes(groups_of(w, self.group))
        return {"scale": store_scale(torch.maximum(high, -low) / self.largest)}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        inverse = 1 / self.scales(grid)[..., None]
        return self.from_float(ungroup(grouped(w, grid["scale"]) * inverse))

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        table = self.to_float(torch.arange(2**self.bits, device=codes.device))
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    def from_float(self, x: Tensor) -> Tensor:
        """fp32 -> codes (uint8): to nearest, ties to even; too large numbers become the largest."""
        m = self.mantissa
        sign = x.view(torch.int32).lt(0)
        x = x.abs()
        magic = self._magic(x)
        code = x.add_(magic).view(torch.int32).sub_(magic.view(torch.int32))
        first = (127 + 1 - self.bias + 23 - m) << 23
        code += (magic.view(torch.int32).sub_(first)) >> (23 - m)
        return code.add_(sign, alpha=1 << (self.bits - 1)).to(torch.uint8)

    def round_(self, x: Tensor) -> Tensor:
        """Numbers fp32, none negative, in place: what the codes of `from_float` stand for."""
        magic = self._magic(x)
        return x.add_(magic).sub_(magic)

    def _magic(self, x: Tensor) -> Tensor:
        """What rounds numbers fp32, none negative, when it is added; clamps them in place.

        Adding 2**(e + 23 - m) to a number with exponent e leaves its mantissa, rounded to m bits,
        at the end of the sum; subnormals count as the smallest exponent.
        """
        exponent = x.clamp_max_(self.largest).view(torch.int32) & 0x7F800000
        exponent.clamp_min_((127 + 1 - self.bias) << 23)
        return exponent.add_((23 - self.mantissa) << 23).view(torch.float32)

    def to_float(self, codes: Tensor) -> Tensor:
        """Codes -> fp32, by the definition: (-1)^S * 2^(E - bias) * 1.M, or 2^(1 - bias) * 0.M."""
        codes = codes.to(torch.int32)
        m = self.mantissa
        exponent = (codes >> m) & ((1 << self.exponent) - 1)
        fraction = (codes & ((1 << m) - 1)).float() / (1 << m)
        normal = exponent > 0
        value = torch.ldexp(fraction + normal, exponent.clamp_min(1) - self.bias)
        return torch.where(codes >> (self.bits - 1) > 0, -value, value)

    def triton_decode(self, at: Any) -> Any:
        return lang.floating(at, self.exponent, self.mantissa)

    def hopper_decode(self, operand: str) -> Decoder | str:
        x, y = self.exponent, self.mantissa
        if operand == "float8_e4m3fn":
            if x > 4 or y > 3:
                return f"{self.spec!r} does not fit into e4m3"
            places = (*range(3 - y, 3 + x), 7)
            shift = 7 - self.bias
            return Decoder(operand, places, shift, group=self.group, sums=self._scale_words)
        if operand not in MANTISSA and (x, y) == (2, 1):  # twice e2m1 are whole numbers
            twice = (2 * self.to_float(torch.arange(16))).tolist()
            found = looked(twice, self.group, operand)
            assert isinstance(found, Decoder)
            return replace(found, shift=-1, sums=self._scale_words or 2)
        if operand not in MANTISSA:
            return "floating-point weights but e2m1 have no decoder to int8"
        shift = BIAS[operand] - self.bias
        lift = 0
        if operand == "bfloat16":
            lift = min(shift, LIFT[operand])
        elif self.group:  # as far as the largest value stays below fp16's
            lift = min(LIFT[operand], LIFT[operand] - math.ceil(math.log2(self.largest)) + shift)
        first = MANTISSA[operand] - y
        places = (*range(first, first + y + x), 15)
        return HalfDecoder(operand, places, shift=shift, group=self.group, lift=lift)

    @property
    def _scale_words(self) -> int:
        """16-bit words that hold a group's scale as it is, see `Decoder.sums`."""
        return 2 * (self.group > 0)

    def _spec_parts(self) -> tuple[str, list[str]]:
        shape = (self.exponent, self.mantissa)
        options = self._options(skip=("exponent", "mantissa"))
        if shape in BY_SHAPE:
            return BY_SHAPE[shape], options
        return "fp", [f"e{shape[0]}m{shape[1]}", *options]

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Minifloat":
        named = ("exponent", "mantissa")
        if name in ALIASES:
            return cls(*ALIASES[name], **read_options(cls, name, args, named))
        shape = re.fullmatch(r"e(\d)m(\d)", args[0]) if args else None
        if not shape:
            raise InvalidInput(f"write {name!r} with its bits: fp:e3m2 or fp:e3m2,group=128")
        return cls(int(shape[1]), int(shape[2]), **read_options(cls, name, args[1:], named))
