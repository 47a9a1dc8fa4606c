"""The numbers that a product is made of, and how they lie in registers."""

from dataclasses import dataclass

from anybit.kernels.native import instructions, ir
from anybit.kernels.native.ir import F32, I8, I16, I32, Value, vec
from anybit.kernels.native.isa import Isa

BLOCK = 512  # codes
RUN = 32  # codes that lie in one vector of 16-bit words
BAND = 16  # rows that lie in the lanes of a vector
SPAN = 256  # columns of whole numbers times 16 bits whose sum 32 bits hold


def laid(k: int) -> int:
    """Columns that K are laid out as: whole units of any operand. The last block may be short."""
    return -(-k // (2 * RUN)) * (2 * RUN)


@dataclass(frozen=True)
class Operand:
    """The numbers that a product is made of, in vectors of the processor's width.

    kind: "bf16" (products of bf16 in fp32), "fp32", "u8" (unsigned codes times int8), "s8" (codes
        times int8; codes of 8 bits are 128 less) or "i16" (codes times int8, both in 16 bits); the
        last three are summed in int32. "fixed": whole numbers times tokens in 16 bits of fixed
        point, summed in int32 over a group at most, and in fp32 from there on. "split": the same
        of unsigned codes, times the upper and the lower byte of tokens.
    banded: whether the lanes of a vector are rows, and tokens are the same in all of them; see
        `decode`.
    """

    kind: str
    isa: Isa
    banded: bool = False

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
        """Bytes of a weight's number."""
        sizes = {"bf16": 2, "fp32": 4, "u8": 1, "s8": 1, "i16": 2, "fixed": 2, "split": 1}
        return sizes[self.kind]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's number."""
        return 2 if self.kind == "split" else self.itemsize

    @property
    def parts(self) -> int:
        """Vectors that hold the rows of a band."""
        return BAND // self.isa.floats

    @property
    def columns_of_unit(self) -> int:
        """Columns of a unit of a band."""
        return self.codes // BAND

    def place(self, unit: int, j: int) -> tuple[int, int]:
        """Of a band's vector j of a unit: which part of the rows it holds, and of which 32 bits of
        each token's block it is a factor."""
        per = self.vectors // self.parts
        return j // per, unit * per + j % per

    def everywhere(self, x: Value, offset: Value | int) -> Value:
        """32 bits of a token in all lanes."""
        kind = F32 if self.kind == "fp32" else I32
        some = x.function.load(kind, x, offset)
        return some.splat(self.isa.floats).bits(self.vector)

    def span(self, group: int) -> int:
        """Columns that are added up before they are scaled; 0: all of a row."""
        return min(group or SPAN, SPAN) if self.kind in ("split", "fixed") else group

    @property
    def whole(self) -> bool:
        """Whether sums of rows are integers."""
        return self.kind in ("u8", "s8", "i16")

    @property
    def integer(self) -> bool:
        """Whether what is multiplied is integers."""
        return self.whole or self.kind in ("fixed", "split")

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
            "split": vec(bits // 8, I8),
        }
        return kinds[self.kind]

    def order(self) -> list[int]:
        """Places of a unit's columns: the number at i is that of column order[i]."""
        if self.banded:  # of bytes, the two of each run
            each = (0, 2, 1, 3) if self.itemsize == 1 else (0, 1, 2, 3)
            return [i + at for i in range(0, self.codes, 4) for at in each]
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

    def ordered(self, numbers: Value) -> list[Value]:
        """A unit's numbers, which lie in the order of columns, in its vectors."""
        order, lanes = self.order(), self.codes // self.vectors
        return [numbers.pick(order[i : i + lanes]) for i in range(0, self.codes, lanes)]

    def columns(self, j: int) -> list[int]:
        """The first column of each lane of the sums of a unit's vector j; not for bytes."""
        lanes = self.isa.floats
        if self.kind == "fp32":
            return self.order()[j * lanes : (j + 1) * lanes]
        return [2 * (j * lanes + i) for i in range(lanes)]

    def dot(self, total: Value, weight: Value, x: Value) -> Value:
        """total + products of a vector of weights and one of activations."""
        if self.kind == "fp32":
            return weight.fma(x, total)
        if self.kind == "bf16":
            return instructions.dot_bf16(total, weight, x)
        how = instructions.dot_words if self.itemsize == 2 else instructions.dot_bytes
        return how(total, weight, x)
