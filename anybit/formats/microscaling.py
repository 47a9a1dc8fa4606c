"""Small floating-point numbers with a scale of 8 bits for every few columns: MXFP and NVFP4.

MXFP (OCP Microscaling Formats 1.0): elements e2m1, e2m3, e3m2, e4m3 or e5m2 in groups of 32, whose
scale is a power of two, e8m0: 2**(byte - 127). NVFP4: e2m1 in groups of 16, whose scale is an e4m3
in units of one fp32 number for the whole weight. Codes are those of `minifloat`; scales are stored
as they are published, a byte each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.format import Entry, Grid, read_options, register
from anybit.core.groups import divisor, groups_of, round_scale
from anybit.errors import InvalidInput
from anybit.formats.minifloat import Minifloat
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.tables import folded

ELEMENTS = {"mxfp4": ((2, 1),), "mxfp6": ((2, 3), (3, 2)), "mxfp8": ((4, 3), (5, 2))}
E4M3_REACH = 256  # of NVFP4's scales: 1.5 times as much, for a group that ends at 4, is below 448
PIECE = 1 << 18  # weights that are fitted at a time


@register(*ELEMENTS)
@dataclass(frozen=True)
class Microscaling(Minifloat):
    """MXFP: eXmY times 2**(byte - 127). The grid holds "scale" alone, in float8_e8m0fnu.

    Attributes:
        exponent: X; the name says how many bits a code has: `mxfp6:e3m2`, or `mxfp6` for e2m3.
        mantissa: Y bits.
        group: Columns that share a scale; 0 means the whole row.
    """

    group: int = 32

    def entries(self) -> dict[str, Entry]:
        return {"scale": Entry(torch.float8_e8m0fnu, self.group)}

    def fit(self, w: Tensor) -> Grid:
        """The power of two by OCP's rule, which clips up to a quarter of a range, or the next one:
        whichever leaves the smaller squared error.
        """
        emax = math.floor(math.log2(self.largest))
        return {"scale": by_pieces(w, lambda rows: self._fit(groups_of(rows, self.group), emax))}

    def _fit(self, groups: Tensor, emax: int) -> Tensor:
        groups = groups.abs()
        largest = groups.amax(-1)
        _, exponent = torch.frexp(torch.where(largest == 0, 2.0**emax, largest))
        low = torch.ldexp(torch.ones_like(largest), exponent - 1 - emax)
        two = [round_scale(scale, torch.float8_e8m0fnu) for scale in (low, 2 * low)]
        return self._better(groups, two, [scale.float() for scale in two])

    def _better(self, groups: Tensor, stored: list[Tensor], scales: list[Tensor]) -> Tensor:
        """Of two scales for each group (N, groups), the one of less squared error, the first of
        equals. groups: without signs; stored: scales as the grid holds them; scales: in fp32.
        """
        errors = []
        for scale in scales:
            scaled = groups * (1 / scale[..., None])
            rounded = self.round_(scaled.clone())
            errors.append(torch.linalg.vector_norm(rounded.sub_(scaled), dim=-1) * scale)
        first, second = (scale.view(torch.uint8) for scale in stored)  # `where` takes any bytes
        return torch.where(errors[0] <= errors[1], first, second).view(stored[0].dtype)

    def hopper_decode(self, operand: str) -> Decoder | str:
        e2m1 = (self.exponent, self.mantissa) == (2, 1)
        if operand == "float8_e4m3fn" and self.group and e2m1:
            return folded(self.group)
        return super().hopper_decode(operand)

    @property
    def _scale_words(self) -> int:
        return int(self.group > 0)  # e8m0 and e4m3 are bf16 numbers

    def _spec_parts(self) -> tuple[str, list[str]]:
        shape = (self.exponent, self.mantissa)
        name = next(name for name, shapes in ELEMENTS.items() if shape in shapes)
        element = [] if shape == ELEMENTS[name][0] else [f"e{shape[0]}m{shape[1]}"]
        return name, element + self._options(skip=("exponent", "mantissa"))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Microscaling":
        shapes = {f"e{x}m{y}": (x, y) for x, y in ELEMENTS[name]}
        shape = ELEMENTS[name][0]
        if args and args[0] in shapes:
            shape, args = shapes[args[0]], args[1:]
        elif args and "=" not in args[0]:
            raise InvalidInput(f"{name} has no {args[0]!r}; its elements are {', '.join(shapes)}")
        return cls(*shape, **read_options(cls, name, args, ("exponent", "mantissa")))


@register("nvfp4")
@dataclass(frozen=True)
class NVFP4(Microscaling):
    """e2m1 times an e4m3 for every 16 columns, times an fp32 number.

    The grid holds "scale" in float8_e4m3fn, and "row_scale" (N, 1) fp32: the number of the weight,
    once for each row, so that weights with different ones can be one on top of the other.

    Attributes:
        divide: The scale of a group is scale / row_scale (compressed-tensors), not the product.
    """

    exponent: int = 2
    mantissa: int = 1
    group: int = 16
    divide: bool = False

    rowwise = False  # all rows share the number

    def entries(self) -> dict[str, Entry]:
        return {
            "scale": Entry(torch.float8_e4m3fn, self.group),
            "row_scale": Entry(torch.float32),
        }

    def scales(self, grid: Grid) -> Tensor:
        scale = grid["scale"].float()
        row = grid["row_scale"]  # of padding it is 0
        return scale / divisor(row) if self.divide else scale * row

    def row_factor(self, grid: Grid) -> Tensor | None:
        return 1 / divisor(grid["row_scale"]) if self.divide else grid["row_scale"]

    def fit(self, w: Tensor) -> Grid:
        """Four over six (https://arxiv.org/abs/2512.02010): a group's largest weight becomes 6, or
        4, between whose multiples numbers lie closer: whichever leaves the smaller squared error.
        """
        low, high = w.aminmax()
        largest = torch.maximum(high, -low)
        unit = torch.where(largest == 0, 1.0, largest / (self.largest * E4M3_REACH))
        if self.divide:  # a power of two, which weights that an engine merges can share in exports
            _, exponent = torch.frexp(unit)
            unit = torch.ldexp(torch.ones_like(unit), exponent)
        unit = unit.clamp_min(torch.finfo(torch.float32).tiny)
        if self.divide:
            unit = 1 / unit
        row = unit.expand(w.shape[0], 1).contiguous()
        return {
            "scale": by_pieces(w, lambda rows: self._four_over_six(rows, unit)),
            "row_scale": row,
        }

    def _four_over_six(self, w: Tensor, unit: Tensor) -> Tensor:
        groups = groups_of(w, self.group).abs()
        largest = groups.amax(-1)
        one = unit.view(1, 1)
        wanted = largest * one if self.divide else largest / one
        wanted = torch.where(largest == 0, 1.0, wanted)
        two = [round_scale(wanted / top, torch.float8_e4m3fn) for top in (6, 4)]
        return self._better(groups, two, [self.scales({"scale": s, "row_scale": one}) for s in two])

    def hopper_decode(self, operand: str) -> Decoder | str:
        return Minifloat.hopper_decode(self, operand)

    def _spec_parts(self) -> tuple[str, list[str]]:
        return "nvfp4", self._options(skip=("exponent", "mantissa"))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "NVFP4":
        return cls(**read_options(cls, name, args, ("exponent", "mantissa")))


def by_pieces(w: Tensor, fit: Callable[[Tensor], Tensor]) -> Tensor:
    """Scales of all rows, fitted to a few rows at a time, so that temporaries stay small."""
    step = max(1, PIECE // max(1, w.shape[1]))
    return torch.cat([fit(rows) for rows in w.split(step)])
