"""y = x W^T with a dense W and few tokens: as fast as W is read.

Several rows of W meet four tokens at a time, so that W is read once from memory for all of them.
torch's product of bf16 reads at half of what memory gives. bf16 is multiplied as such where the
processor can; all else as fp32. Sums are fp32 (Arm's `bfdot` takes subnormal numbers as 0).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.kernels.native import build, ir, memory
from anybit.kernels.native.activations import DTYPES
from anybit.kernels.native.floats import BYTES, read, rounded
from anybit.kernels.native.fused import FLOATS, level, threads
from anybit.kernels.native.instructions import dot_bf16
from anybit.kernels.native.ir import BF16, F32, Function, Value, vec
from anybit.kernels.native.isa import Isa

NAMES = ("next", "w", "x", "x_stride", "bias", "y", "m", "n", "k", "chunk")
MOST_TOKENS = 32  # torch is as fast from there on
TOGETHER = 4  # tokens that are multiplied at once
CHAINS = 4  # sums that do not wait for each other
AHEAD = 2048  # bytes between what is multiplied and what is asked of memory


@dataclass(frozen=True)
class Dense:
    """What the kernel is compiled for.

    dtype: of all tensors, LLVM's name. tokens, rows: of x and W that are multiplied at once.
    """

    isa: Isa
    dtype: str
    tokens: int
    rows: int
    bias: bool


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` multiplies these, and fast."""
    few = x.dim() == 2 and 0 < len(x) <= MOST_TOKENS and x.stride(1) == 1
    most = few and (len(x) <= TOGETHER or len(weight) >= rows(level()))
    return most and x.dtype in FLOATS and weight.dtype == x.dtype and weight.is_contiguous()


def rows(isa: Isa) -> int:
    """Rows that are multiplied by more tokens than one time's: their sums fill the registers."""
    return 6 if isa.registers == 32 else 3


def placed(weight: Tensor) -> Tensor:
    """The weight in memory that is read fast."""
    if weight.nbytes < memory.LARGE or weight.dtype not in FLOATS:
        return weight
    return memory.placed(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K), at most MOST_TOKENS, and weight (N, K), all of one dtype -> (M, N)."""
    (m, k), n = x.shape, len(weight)
    y = torch.empty(m, n, dtype=x.dtype)
    each = 1 if m <= TOGETHER else rows(level())
    spec = Dense(level(), DTYPES[x.dtype], min(m, TOGETHER), each, bias is not None)
    places = weight.data_ptr(), x.data_ptr(), x.stride(0) * x.itemsize
    count = threads(n * k)
    chunk = max(4, min(64, n // (4 * count)))
    chunk = -(-chunk // each) * each
    kernel(spec)((0, *places, build.pointer(bias), y.data_ptr(), m, n, k, chunk), count)
    return y


@cache
def kernel(spec: Dense) -> build.Kernel:
    f = _Rows(spec).function
    return build.kernel(f)


class _Rows:
    """The function under construction.

    The last rows and tokens are those that fill a time up: some are multiplied twice, alike.
    """

    def __init__(self, spec: Dense):
        self.spec, self.size = spec, BYTES[spec.dtype]
        self.function = f = Function("dense", NAMES, spec.isa)
        self.pairs = spec.dtype == BF16 and spec.isa.bf16
        self.lanes = spec.isa.floats * (2 if self.pairs else 1)
        self.m, self.n, self.k = (f.number(name) for name in "mnk")
        with (
            f.chunks(f.number("chunk"), self.n) as (first, last),
            f.loop(first, last, spec.rows) as r,
        ):
            r = r.smaller(self.n - spec.rows)
            with f.loop(0, self.m, spec.tokens) as t:
                self._times(r, t.smaller(self.m - spec.tokens))

    def _times(self, r: Value, t: Value) -> None:
        """Multiply rows from r on and tokens from t on."""
        f, spec, k = self.function, self.spec, self.k
        x, stride = f.pointer("x"), f.number("x_stride")
        self.x = [f.at(x, stride * (t + i)) for i in range(spec.tokens)]
        self.w = [f.at("w", (r + j) * k * self.size) for j in range(spec.rows)]
        chains = max(1, CHAINS // (spec.tokens * spec.rows))
        zero = f.constant(0, vec(spec.isa.floats, F32))
        pairs = [(j, i) for j in range(spec.rows) for i in range(spec.tokens)]
        sums = {pair: [f.variable(zero) for _ in range(chains)] for pair in pairs}
        step = self.lanes * chains
        most, whole = k // step * step, k // self.lanes * self.lanes
        with f.loop(0, most, step) as i:
            for w in self.w:
                for line in range(0, step * self.size, 64):
                    f.prefetch(w, i * self.size + (AHEAD + line))
            for c in range(chains):
                own = {pair: parts[c] for pair, parts in sums.items()}
                self._multiply(i + c * self.lanes, own)
        with f.loop(most, whole, self.lanes) as i:
            self._multiply(i, {pair: parts[0] for pair, parts in sums.items()})
        rest = {pair: f.variable(f.constant(0, F32)) for pair in pairs}
        with f.loop(whole, k) as i:
            self._multiply(i, rest)
        for pair, parts in sums.items():
            total = parts[0].get()
            for other in parts[1:]:
                total = total + other.get()
            y = total.sum() + rest[pair].get()
            row, token = r + pair[0], t + pair[1]
            if spec.bias:
                y = y + read(spec.dtype, f.pointer("bias"), row * self.size, 1)
            place = (self.n * token + row) * self.size
            f.store(rounded(y, spec.dtype), "y", place)

    def _multiply(self, i: Value, sums: dict[tuple[int, int], ir.Variable]) -> None:
        """Add the products of vectors of W and x at column i, or of single numbers, to sums."""
        f, spec, at = self.function, self.spec, i * self.size
        single = sums[0, 0].kind == F32
        if self.pairs and not single:
            kind = vec(self.lanes, BF16)
            numbers = [f.load(kind, x, at) for x in self.x]
            for j, w in enumerate(self.w):
                weight = f.load(kind, w, at)
                for t, number in enumerate(numbers):
                    total = sums[j, t]
                    total.set(dot_bf16(total.get(), weight, number))
            return
        count = 1 if single else self.lanes
        numbers = [read(spec.dtype, x, at, count) for x in self.x]
        for j, w in enumerate(self.w):
            weight = read(spec.dtype, w, at, count)
            for t, number in enumerate(numbers):
                sums[j, t].set(weight.fma(number, sums[j, t].get()))
