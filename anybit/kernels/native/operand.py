"""The numbers that a product is made of, and how they lie in registers."""

from dataclasses import dataclass

from anybit.kernels.native import instructions, ir
from anybit.kernels.native.ir import F32, I8, I16, I32, Function, Value, vec
from anybit.kernels.native.isa import Isa

BLOCK = 512  # codes
RUN = 32  # codes that lie in one vector of 16-bit words


def laid(k: int) -> int:
    """Columns that K are laid out as: whole units of any operand. The last block may be short."""
    return -(-k // (2 * RUN)) * (2 * RUN)


@dataclass(frozen=True)
class Operand:
    """The numbers that a product is made of, in vectors of the processor's width.

    kind: "bf16" (products of bf16 in fp32), "fp32", "u8" (unsigned codes times int8), "s8" (codes
        times int8; codes of 8 bits are 128 less) or "i16" (codes times int8, both in 16 bits); the
        last three are summed in int32. "fixed": whole numbers times tokens in 16 bits of fixed
        point, summed in int32 over a group at most, and in fp32 from there on.
    """

    kind: str
    isa: Isa

    @property
    def vectors(self) -> int:
        """Vectors that hold the numbers of a unit: of one run, or of two for bytes."""
        return self.codes * self.itemsize // (self.isa.bits // 8)

    @property
    def codes(self) -> int:
        """Codes of a unit, the smallest part that is decoded at once."""
        return 2 * RUN if self.itemsize == 1 else RUN

    @property
    def units(self) -> int:
        """Units in a block."""
        return BLOCK // self.codes

    @property
    def itemsize(self) -> int:
        return {"bf16": 2, "fp32": 4, "u8": 1, "s8": 1, "i16": 2, "fixed": 2}[self.kind]

    @property
    def whole(self) -> bool:
        """Whether sums of rows are integers."""
        return self.kind in ("u8", "s8", "i16")

    @property
    def integer(self) -> bool:
        """Whether what is multiplied is integers."""
        return self.whole or self.kind == "fixed"

    @property
    def sums(self) -> str:
        """The type of a vector of sums of products."""
        return vec(self.isa.floats, I32 if self.integer else F32)

    @property
    def totals(self) -> str:
        """The type of a vector of sums of a row."""
        return vec(self.isa.floats, I32 if self.whole else F32)

    @property
    def vector(self) -> str:
        """The type of a vector of numbers, as they are loaded."""
        bits = self.isa.bits
        kinds = {
            "bf16": vec(bits // 16, ir.BF16),
            "fp32": vec(bits // 32, F32),
            "u8": vec(bits // 8, I8),
            "s8": vec(bits // 8, I8),
            "i16": vec(bits // 16, I16),
            "fixed": vec(bits // 16, I16),
        }
        return kinds[self.kind]

    def order(self) -> list[int]:
        """Places of a unit's columns: the number at i is that of column order[i]."""
        if self.itemsize == 1:
            return [half + i for i in range(RUN) for half in (0, RUN)]
        if self.kind == "fp32":
            both = 2 * self.isa.floats
            return [
                start + odd + 2 * i
                for start in range(0, RUN, both)
                for odd in (0, 1)
                for i in range(self.isa.floats)
            ]
        return list(range(RUN))

    def columns(self, j: int) -> list[int]:
        """The first column of each lane of the sums of a unit's vector j; not for bytes."""
        lanes = self.isa.floats
        if self.kind == "fp32":
            return self.order()[j * lanes : (j + 1) * lanes]
        return [2 * (j * lanes + i) for i in range(lanes)]

    def dot(self, f: Function, total: Value, weight: Value, x: Value) -> Value:
        """total + products of a vector of weights and one of activations."""
        if self.kind == "fp32":
            return f.fma(weight, x, total)
        if self.kind == "bf16":
            return instructions.dot_bf16(f, self.isa, total, weight, x)
        how = instructions.dot_words if self.itemsize == 2 else instructions.dot_bytes
        return how(f, self.isa, total, weight, x)
