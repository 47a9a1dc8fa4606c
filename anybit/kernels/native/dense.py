"""y = x W^T with a dense W and few tokens: as fast as W is read.

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
from anybit.kernels.native.ir import BF16, F32, PTR, Arguments, Function, Value, vec
from anybit.kernels.native.isa import Isa

NAMES = ("next", "w", "x", "x_stride", "bias", "y", "n", "k", "chunk")
MOST_TOKENS = 4
CHAINS = 4  # sums that do not wait for each other
AHEAD = 2048  # bytes between what is multiplied and what is asked of memory


@dataclass(frozen=True)
class Dense:
    """What the kernel is compiled for. dtype: of all tensors, LLVM's name."""

    isa: Isa
    dtype: str
    tokens: int
    bias: bool


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` multiplies these, and fast."""
    few = x.dim() == 2 and 0 < len(x) <= MOST_TOKENS and x.stride(1) == 1
    return few and x.dtype in FLOATS and weight.dtype == x.dtype and weight.is_contiguous()


def placed(weight: Tensor) -> Tensor:
    """The weight in memory that is read fast."""
    if weight.nbytes < memory.LARGE or weight.dtype not in FLOATS:
        return weight
    out = memory.empty(weight.nbytes).view(weight.dtype).view(weight.shape)
    return out.copy_(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K), at most MOST_TOKENS, and weight (N, K), all of one dtype -> (M, N)."""
    (m, k), n = x.shape, len(weight)
    y = torch.empty(m, n, dtype=x.dtype)
    spec = Dense(level(), DTYPES[x.dtype], m, bias is not None)
    places = weight.data_ptr(), x.data_ptr(), x.stride(0) * x.itemsize
    bias_at = 0 if bias is None else bias.data_ptr()
    count = threads(n * k)
    chunk = max(4, min(64, n // (4 * count)))
    kernel(spec)((0, *places, bias_at, y.data_ptr(), n, k, chunk), count)
    return y


@cache
def kernel(spec: Dense) -> build.Kernel:
    f = _Rows(spec).function
    return build.load(ir.module([f]), [f.name], spec.isa)[0]


class _Rows:
    """The function under construction."""

    def __init__(self, spec: Dense):
        self.spec, self.size = spec, BYTES[spec.dtype]
        self.function = f = Function("dense", [PTR])
        args = Arguments(f, NAMES)
        self.pairs = spec.dtype == BF16 and spec.isa.bf16
        self.lanes = spec.isa.floats * (2 if self.pairs else 1)
        n, k = args.number("n"), args.number("k")
        x, stride = args.pointer("x"), args.number("x_stride")
        self.x = [f.at(x, stride * i) for i in range(spec.tokens)]
        chains = max(1, CHAINS // spec.tokens)
        with (
            f.chunks(args.address("next"), args.number("chunk"), n) as (first, last),
            f.loop(first, last) as r,
        ):
            self.w = f.at(args.pointer("w"), r * k * self.size)
            zero = f.constant(0, vec(spec.isa.floats, F32))
            sums = [[f.variable(zero) for _ in range(chains)] for _ in range(spec.tokens)]
            step = self.lanes * chains
            most, whole = k // step * step, k // self.lanes * self.lanes
            with f.loop(0, most, step) as i:
                for at in range(0, step * self.size, 64):
                    f.prefetch(self.w, i * self.size + (AHEAD + at))
                for c in range(chains):
                    self._multiply(i + c * self.lanes, [row[c] for row in sums])
            with f.loop(most, whole, self.lanes) as i:
                self._multiply(i, [row[0] for row in sums])
            rest = [f.variable(f.constant(0, F32)) for _ in range(spec.tokens)]
            with f.loop(whole, k) as i:
                self._multiply(i, rest)
            for t in range(spec.tokens):
                total = sums[t][0].get()
                for other in sums[t][1:]:
                    total = total + other.get()
                y = f.sum(total) + rest[t].get()
                if spec.bias:
                    y = y + read(f, spec.dtype, args.pointer("bias"), r * self.size, 1)
                place = (n * t + r) * self.size
                f.store(rounded(f, spec.isa, y, spec.dtype), args.pointer("y"), place)
        f.give()

    def _multiply(self, i: Value, sums: list[ir.Variable]) -> None:
        """Add the products of a vector of W at column i, or of one number, to each token's sum."""
        f, spec, at = self.function, self.spec, i * self.size
        single = sums[0].kind == F32
        if self.pairs and not single:
            weight = f.load(vec(self.lanes, BF16), self.w, at)
            for x, total in zip(self.x, sums, strict=True):
                number = f.load(weight.kind, x, at)
                total.set(dot_bf16(f, spec.isa, total.get(), weight, number))
            return
        count = 1 if single else self.lanes
        weight = read(f, spec.dtype, self.w, at, count)
        for x, total in zip(self.x, sums, strict=True):
            total.set(f.fma(weight, read(f, spec.dtype, x, at, count), total.get()))
