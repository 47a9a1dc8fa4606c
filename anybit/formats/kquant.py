"""The formats of GGUF files (llama.cpp) that have two levels of scales, or a minimum in 16 bits.

MLX and quanto store the second kind as well, with codes of other bits and in other groups.

    W = d * (step - s) * T[code] - base * low       q2_k to q6_k, iq4_xs
    W = d * code + base                             q2_1 to q6_1, q8_1

d and base are fp16 numbers of a block of 256 columns (32 by default in the second line); step and
low are whole numbers of few bits for every group within it; T are whole numbers, too. Both
products are exact in fp32, so that a weight is rounded once, as by ggml's `ggml-quants.c`.

The other types of GGUF need no format of their own: q4_0, q5_0 and q8_0 are `int4:group=32`,
`int5:group=32` and `int8:group=32`, iq4_nl is a table (`table4`), mxfp4 is `mxfp4`. Those
whose codes are rows of a table are in `iquant.py`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Entry, Format, Grid, read_options, register
from anybit.core.frame import Fine, Frame
from anybit.core.groups import extremes, grouped, groups_of, store_scale, ungroup
from anybit.formats.microscaling import by_pieces
from anybit.formats.table4 import IQ4
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.levels import levels
from anybit.kernels.cute.tables import looked

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang


class Kind(NamedTuple):
    """One of the formats.

    Attributes:
        bits: Of a code.
        group: Columns that share a step.
        steps: Bits of a step; 0: there are none, and d is that of a group.
        minus: s, subtracted from stored steps.
        below: Subtracted from codes, where T are whole numbers in steps of 1.
        base: Whether there is a base.
    """

    bits: int
    group: int
    steps: int
    minus: int = 0
    below: int = 0
    base: bool = False


KINDS = {
    **{f"q{bits}_1": Kind(bits, 32, 0, base=True) for bits in (2, 3, 4, 5, 6, 8)},
    "q2_k": Kind(2, 16, 4, base=True),
    "q3_k": Kind(3, 16, 6, minus=32, below=4),
    "q4_k": Kind(4, 32, 6, base=True),
    "q5_k": Kind(5, 32, 6, base=True),
    "q6_k": Kind(6, 16, 8, minus=128, below=32),
    "iq4_xs": Kind(4, 32, 6, minus=32),
}
BLOCK = 256
NORMAL = (2.0**-8, 2.0**12)  # the largest magnitudes of a row whose d and base fit fp16 well
MORE = (-1.0, -0.6, -0.3, 0.0, 0.3, 0.6, 1.0)  # levels than there are, in the ranges to try


@register(*KINDS)
@dataclass(frozen=True)
class KQuant(Format):
    """One of `KINDS`.

    The grid holds "d" (N, K / block) fp16 and "step" (N, K / group) uint8, with a base also "base"
    like d and "low" like step, but for q2_k, where low is the upper half of the byte that step is
    in. "scale" (N, 1) is a power of two, 1 unless a row's weights are beyond fp16's range.

    Attributes:
        name: One of `KINDS`.
        columns: That share d and base, where there are no steps; an option called "group".
    """

    name: str = "q4_k"
    columns: int = field(default=32, metadata={"option": "group"})

    @property
    def kind(self) -> Kind:
        kind = KINDS[self.name]
        return kind if kind.steps else kind._replace(group=self.columns)

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.kind.bits

    @property
    def block(self) -> int:
        """Columns that share d."""
        return BLOCK if self.kind.steps else self.kind.group

    @property
    def joint(self) -> bool:
        """Whether step and low share a byte."""
        return self.kind.base and self.kind.steps == 4

    @property
    def table(self) -> bool:
        """Whether T is a table, stored with the weight like that of a codebook."""
        return self.name == "iq4_xs"

    # What Triton's compiler asks for: it reads fields of a format, and no tuples.

    @property
    def minus(self) -> int:
        return self.kind.minus

    @property
    def below(self) -> int:
        return self.kind.below

    @property
    def base(self) -> bool:
        return self.kind.base

    @property
    def steps(self) -> int:
        return self.kind.steps

    def entries(self) -> dict[str, Entry]:
        d, step = Entry(group=self.block), Entry(torch.uint8, self.kind.group)
        out = {"scale": Entry(), "d": d}
        if self.kind.base:
            out["base"] = d
        if self.kind.steps:
            out["step"] = step
        if self.kind.base and self.kind.steps and not self.joint:
            out["low"] = step
        if self.table:
            out["codebook"] = Entry(torch.float32, table=(1, 2**self.bits, 1))
        return out

    def frame(self, grid: Grid) -> Frame:
        d = grid["d"].float()
        numbers = grid["codebook"].flatten() if self.table else self._numbers(d.device)
        if not self.kind.steps:
            return Frame(numbers, d, grid["base"].float())
        stored = grid["step"]
        step = (stored & 15 if self.joint else stored).float() - self.kind.minus
        per = stored.shape[1] // d.shape[1]
        factor = d.repeat_interleave(per, 1) * step
        if not self.kind.base:
            return Frame(numbers, factor, None, Fine(grid["d"], step, None, None))
        low = (stored >> 4 if self.joint else grid["low"]).float()
        shift = -(grid["base"].float().repeat_interleave(per, 1) * low)
        return Frame(numbers, factor, shift, Fine(grid["d"], step, grid["base"], low))

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        numbers, factor, shift, _ = self.frame(grid)
        values = grouped(numbers[codes.int()], factor) * factor[..., None]
        return ungroup(values if shift is None else values + shift[..., None])

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        numbers, factor, shift, _ = self.frame(grid)
        w = grouped(w * (1 / grid["scale"].float()), factor)
        if shift is not None:
            w = w - shift[..., None]
        return ungroup(self._nearest(w, factor, numbers)).to(torch.uint8)

    def fit(self, w: Tensor) -> Grid:
        """The factor and shift of each group of least squared error among a few, then the d and
        base of a block for which they are whole multiples.
        """
        scale = row_unit(w)
        both = by_pieces(
            torch.cat((w, scale), 1), lambda part: self._fit(part[:, :-1], part[:, -1:])
        )
        factor, shift = both.chunk(2, 1)
        grid = {"scale": store_scale(scale)}
        if self.table:
            grid["codebook"] = self._numbers(w.device).view(1, 16, 1)
        if not self.kind.steps:
            return grid | {"d": factor.half(), "base": shift.half()}
        per, most = self.block // self.kind.group, 2**self.kind.steps - 1
        grid["d"], step = multiples(factor, per, -self.kind.minus, most - self.kind.minus)
        grid["step"] = (step + self.kind.minus).to(torch.uint8)
        if self.kind.base:
            grid["base"], low = multiples(-shift, per, 0, most)
            if self.joint:
                grid["step"] |= low.to(torch.uint8) << 4
            else:
                grid["low"] = low.to(torch.uint8)
        return grid

    def _numbers(self, device: torch.device) -> Tensor:
        """T."""
        if self.table:
            return torch.tensor(IQ4, dtype=torch.float32, device=device)
        codes = torch.arange(2**self.bits, dtype=torch.float32, device=device)
        return codes - self.kind.below

    def _fit(self, w: Tensor, scale: Tensor) -> Tensor:
        """Factors, then shifts, of all groups of some rows."""
        groups, numbers = groups_of(w / scale, self.kind.group), self._numbers(w.device)
        if self.kind.base:
            low, high = extremes(groups)
            if self.kind.steps:  # shifts are not above 0
                low = low.clamp_max(0)
            tries = [(high - low) / (numbers[-1] + more) for more in MORE]
            found = [self._least_squares(groups, a, low, numbers) for a in tries]
        else:  # the number of largest magnitude, the first, is for the largest weight
            largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
            tries = [largest / (numbers[0] * (1 + more / 2**self.bits)) for more in MORE]
            found = [self._least_squares(groups, a, None, numbers) for a in tries]
        factors, shifts, errors = (torch.stack(some) for some in zip(*found, strict=True))
        best = errors.argmin(0, keepdim=True)
        return torch.cat((factors.gather(0, best)[0], shifts.gather(0, best)[0]), 1)

    def _nearest(self, w: Tensor, factor: Tensor, numbers: Tensor) -> Tensor:
        """Codes of the numbers nearest to w (N, groups, columns) in units of the factor."""
        w = w * torch.where(factor == 0, 0.0, 1 / factor)[..., None]
        if self.table:
            return torch.bucketize(w.contiguous(), (numbers[1:] + numbers[:-1]) / 2)
        return (w + self.kind.below).round_().clamp_(0, 2**self.bits - 1)

    def _least_squares(
        self, groups: Tensor, factor: Tensor, shift: Tensor | None, numbers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best factor and shift for the codes that a factor and a shift lead to.

        groups: (N, groups, columns). shift: None for none.

        Returns:
            Factor, shift and squared error, (N, groups) each.
        """
        x = groups if shift is None else groups - shift[..., None]
        q = numbers[self._nearest(x, factor, numbers).int()]
        qq, qx = q.square().sum(-1), (q * groups).sum(-1)
        best = torch.zeros_like(factor)
        if shift is not None:
            n, sq, sx = groups.shape[-1], q.sum(-1), groups.sum(-1)
            determinant = n * qq - sq * sq
            best = torch.where(determinant > 0, (qq * sx - sq * qx) / determinant, shift)
            best = best.clamp_max(0) if self.kind.steps else best
            qx = qx - best * sq
        factor = torch.where(qq > 0, qx / qq, factor)
        error = (q * factor[..., None] + best[..., None] - groups).square_().sum(-1)
        return factor, best, error

    def triton_decode(self, at: Any) -> Any:
        if self.table:
            number = lang.lookup(at, 2, lang.code(at))
        else:
            number = lang.number(at, self.below).to(tl.float32)
        if self.steps == 0:
            return number * lang.level(at, 0) + lang.level(at, 1)
        elif not self.base:  # noqa: RET505  (Triton compiles what follows a return, too)
            step = lang.level(at, 1).to(tl.float32) - self.minus
            return number * (lang.level(at, 0) * step)
        elif self.joint:
            both = lang.level(at, 2).to(tl.float32)
            low = tl.floor(both * 0.0625)
            factor = lang.level(at, 0) * (both - low * 16)
            return number * factor - lang.level(at, 1) * low
        else:
            factor = lang.level(at, 0) * lang.level(at, 2).to(tl.float32)
            return number * factor - lang.level(at, 1) * lang.level(at, 3).to(tl.float32)

    def hopper_decode(self, operand: str) -> Decoder | str:
        kind = self.kind
        if self.table:
            return looked(IQ4, kind.group, operand)
        return levels(kind.bits, kind.group, operand, kind.below, kind.base)

    def _spec_parts(self) -> tuple[str, list[str]]:
        return self.name, self._options(skip=("name",))

    @property
    def has_group_option(self) -> bool:
        return not KINDS[self.name].steps

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "KQuant":
        named = ("name", "columns") if KINDS[name].steps else ("name",)
        return cls(name, **read_options(cls, name, args, named))


def row_unit(w: Tensor) -> Tensor:
    """A power of two (N, 1) for each row, 1 unless its weights are beyond fp16's range."""
    largest = w.abs().amax(1, keepdim=True)
    _, exponent = torch.frexp(largest)
    fits = (largest == 0) | ((largest >= NORMAL[0]) & (largest <= NORMAL[1]))
    return torch.ldexp(torch.ones_like(largest), torch.where(fits, 0, exponent))


def multiples(a: Tensor, per: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Numbers (N, groups) as whole multiples, low to high, of one fp16 number for each `per`.

    The number of largest magnitude becomes low where multiples are signed, else high.

    Returns:
        The fp16 numbers (N, groups / per), and the multiples (N, groups) fp32.
    """
    parts = a.reshape(len(a), -1, per)
    largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    d = (largest / (low or high)).half()
    some = (parts * torch.where(d == 0, 0.0, 1 / d.float())).round_()
    return d[..., 0], some.clamp_(low, high).flatten(1)
