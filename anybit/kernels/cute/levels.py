"""Decoders of codes with a factor, and a shift or none, for each group: K-quants and others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.kernels.cute.decode import BIAS, LIFT, MANTISSA, Constants, Decoder, HalfDecoder
from anybit.kernels.cute.lang import Word, fma2


@dataclass(frozen=True)
class Levels(HalfDecoder):
    """fp16 or bf16: code * factor + shift, as a format's `frame` has them, or code * scale.

    Both are rounded to the operand's dtype, in units of a power of two of the row, and the sum once
    more.

    Attributes:
        shifts: Groups have shifts; without, codes have a center.
    """

    shifts: bool = False

    @property
    def grid_words(self) -> int:
        return (1 + self.shifts) if self.group else 0

    @property
    def finishing(self) -> int:  # type: ignore[override]
        return 1

    def grid(self, packed: Packed) -> Tensor | None:
        if not self.group:
            return None
        factor, shift, unit = self._frame(packed)
        parts = [factor / unit * 2.0**self.lift]
        if shift is not None:
            parts.append(shift / unit * 2.0 ** (self.lift - self.shift))
        dtype = getattr(torch, self.operand)
        words = torch.stack(parts, -1).to(dtype).view(torch.int16)
        return words.to(torch.int32) & 0xFFFF

    def row_scale(self, packed: Packed) -> Tensor:
        fmt, grid = packed.format, packed.grid
        if not self.group:
            return super().row_scale(packed)
        more = fmt.row_factor(grid) if fmt.frame(grid) is None else fmt.scales(grid)
        unit = self._frame(packed)[2]
        unit = unit if more is None else unit * more
        return unit.flatten() * 2.0 ** (self.shift - self.lift)

    def _frame(self, packed: Packed) -> tuple[Tensor, Tensor | None, Tensor]:
        """Factors and shifts (N, groups), and the unit of each row (N, 1)."""
        frame = packed.format.frame(packed.grid)
        factor, shift = packed.grid["scale"].float(), None
        if frame is not None:
            factor, shift = frame.factor, frame.shift
        largest = factor.abs().amax(1, keepdim=True)
        if shift is not None:
            low = shift.abs().amax(1, keepdim=True) * 2.0**-self.bits
            largest = torch.maximum(largest, low)
        _, exponent = torch.frexp(largest)
        unit = torch.ldexp(torch.ones_like(largest), torch.where(largest == 0, 0, exponent))
        return factor, shift, unit

    def finish(self, register: Word, row: Constants) -> Word:
        if self.shifts:
            return fma2(register, row[0], row[1], self.operand)
        return super().finish(register, row)


def levels(bits: int, group: int, operand: str, below: int, shifts: bool) -> Decoder | str:
    """The decoder of whole numbers with a factor for each group, and a shift or none.

    Args:
        bits: Of a code.
        group: Columns that share them.
        operand: As in `decoder`.
        below: What is subtracted from codes that have no shifts.
        shifts: Whether `Format.frame` has shifts.
    """
    if operand not in MANTISSA:
        return f"factors of groups cannot be multiplied into weights for {operand}"
    first = max(MANTISSA[operand] - bits, 0)  # as in `number`
    shift = BIAS[operand] - 1 + MANTISSA[operand] - first
    return Levels(
        operand,
        tuple(range(first, first + bits)),
        shift=shift,
        group=group,
        lift=min(shift, LIFT[operand]),
        center=0 if shifts else below,
        shifts=shifts,
    )
