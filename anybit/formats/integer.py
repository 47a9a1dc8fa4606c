"""int1 to int8: uniform integers, one scale for a row (CGQ) or for a group of columns (FGQ).

GemLite's linear dequantization, W = (q - zero) * scale. Without `zero` the levels are symmetric
about zero; int1 means {-1, +1}.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.core.format import Entry, Format, Grid, read_options, register
from anybit.core.groups import extremes, grouped, groups_of, store_scale, ungroup
from anybit.errors import InvalidInput
from anybit.kernels.cute.decode import Decoder, number

if TYPE_CHECKING:
    from anybit.kernels.triton import lang


@register(*(f"int{b}" for b in range(1, 9)))
@dataclass(frozen=True)
class Integer(Format):
    """Uniform integers of 1 to 8 bits.

    The grid holds "scale", and "zero" (uint8, or a float) where there are zero points.

    Attributes:
        bits: Bits of a code, part of the name: int4.
        group: Columns that share a scale (and zero point); 0 means the whole row.
        zero: Store a zero point per group, so that the levels cover [min, max] instead of +-max.
        order: Columns are stored sorted by group; only for weights that another tool made so.
    """

    bits: int = 4
    group: int = 0
    zero: bool = False
    order: bool = False

    def entries(self) -> dict[str, Entry]:
        zero = {"zero": Entry("level", self.group)} if self.zero else {}
        return super().entries() | zero

    @property
    def operand(self) -> str:  # type: ignore[override]
        return "activation" if self.zero else "int8"

    @property
    def zero_point(self) -> str | None:  # type: ignore[override]
        return "zero" if self.zero else None

    def fit(self, w: Tensor) -> Grid:
        if self.order:
            plain = dataclasses.replace(self, order=False).spec
            raise InvalidInput(
                f"{self.spec} only holds weights of other tools; quantize to {plain}"
            )
        rows = groups_of(w, self.group)
        if self.zero:
            low, high = extremes(rows)
            low, high = low.clamp_max_(0), high.clamp_min_(0)
            scale = store_scale((high - low) / (2**self.bits - 1))
            zero = (-low / scale.float()).round_().clamp_(0, 2**self.bits - 1)
            return {"scale": scale, "zero": zero.to(torch.uint8)}
        if self.bits == 1:  # {-1, +1}: the mean magnitude minimizes the squared error
            return {"scale": store_scale(rows.abs().mean(-1), zeros=0)}
        low, high = extremes(rows)
        return {"scale": store_scale(torch.maximum(high, -low) / (2 ** (self.bits - 1) - 1))}

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        if self.order:
            w = w.index_select(1, grid["order"])
        if self.bits == 1 and not self.zero:
            return (w >= 0).to(torch.uint8)
        q = grouped(w, grid["scale"]) * grid["scale"].float()[..., None].reciprocal()
        middle = grid["zero"].float()[..., None] if self.zero else 2 ** (self.bits - 1)
        q = q.add_(middle).round_()
        return ungroup(q.clamp_(0, 2**self.bits - 1)).to(torch.uint8)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        if self.zero:
            return ungroup(grouped(codes.float(), grid["zero"]) - grid["zero"].float()[..., None])
        if self.bits == 1:
            return codes.float() * 2 - 1
        return codes.float() - (1 << (self.bits - 1))

    def triton_decode(self, at: Any) -> Any:
        # One return: Triton compiles what follows a branch that returns.
        if self.zero:
            value = lang.number(at) - lang.level(at, 0)
        elif self.bits == 1:
            value = lang.number(at, 1, 2)
        else:
            value = lang.number(at, 2 ** (self.bits - 1))
        return value

    def hopper_decode(self, operand: str) -> Decoder | str:
        if self.zero:
            return number(self, operand)
        if self.bits == 1:
            return number(self, operand, minus=1, times=2)
        return number(self, operand, minus=2 ** (self.bits - 1))

    def _spec_parts(self) -> tuple[str, list[str]]:
        return f"int{self.bits}", self._options(skip=("bits",))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "Integer":
        return cls(bits=int(name.removeprefix("int")), **read_options(cls, name, args, ("bits",)))
