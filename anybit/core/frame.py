"""What decoded values are products of, where a format says so; for kernels of few steps."""

from typing import NamedTuple

from torch import Tensor


class Fine(NamedTuple):
    """Factors in two steps: d * step, and shifts: -(base * low); both exactly.

    d, base: (N, blocks) fp16. step, low: (N, groups), whole numbers within int8; base and low are
    None where there are no shifts.
    """

    d: Tensor
    step: Tensor
    base: Tensor | None
    low: Tensor | None


class Frame(NamedTuple):
    """Values in two steps: numbers[digit] * factor + shift, all fp32.

    Attributes:
        numbers: (2**bits,), or as many as there are digits (`Format.digits`).
        factor: (N, groups).
        shift: (N, groups); None for zeros.
        fine: What factors and shifts are products of, if they are.
    """

    numbers: Tensor
    factor: Tensor
    shift: Tensor | None
    fine: Fine | None = None


class Rows(NamedTuple):
    """Values out of a table (rows, width), table[row] * signs * factor, all fp32.

    row: (N, positions) int32. signs: The same, bit i set where weight i of the position is
    negative; None where the table has the signs. factor: (N, groups).
    """

    table: Tensor
    row: Tensor
    signs: Tensor | None
    factor: Tensor
