"""Random layers for checks and times of kernels: exact products of theirs, and times of ours."""

from functools import partial

import torch
from torch import Tensor

from anybit import quantize_tensor
from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.formats.minifloat import Minifloat
from anybit.kernels.backend import Prepared
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.jit import kernel_file
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.hopper import scalar_linear, tiles
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.mma import linear as mma
from anybit.kernels.reference import operand_weight, quantize_tokens
from anybit.measure.timing import median_us, rotated

MORE_TILES = [
    *(Tile(tokens, ctas=2, split=c) for tokens in (8, 16, 32, 64) for c in (1, 2, 4)),
    *(Tile(tokens, split=c) for tokens in (8, 16, 64) for c in (1, 2, 3)),
    Tile(256),
    *(Tile(tokens, shared=shared) for tokens in (96, 192) for shared in (False, True)),
    Tile(96, split=2),
    *(Tile(128, rows=rows, shared=shared) for rows in (128, 256) for shared in (False, True)),
    *(Tile(tokens, rows=256, late=True) for tokens in (64, 96)),
    *(Tile(tokens, rows=256, shared=True, late=True) for tokens in (64, 96)),
    *(Tile(tokens, rows=256, split=split) for tokens in (64, 96, 128) for split in (2, 3)),
    *(Tile(tokens, split=split) for tokens in (96, 192) for split in (2, 3)),
]  # tried by `sweep` and `compare` beside the family


class RandomLayer:
    """A random layer of one scheme, its tokens as the matrix unit takes them, and copies."""

    def __init__(
        self, scheme: str, dtype: torch.dtype, n: int, k: int, cold: bool = False, few: bool = False
    ):
        """few: the weight repeats 256 rows, which is soon made, and does for times.

        These are quantized as users' are: random codes take more power, and the clock falls.
        """
        self.fmt, self.activation = parse_scheme(scheme)
        self.dtype, self.n, self.k = dtype, n, k
        self.operand = operands.operand_of(self.activation, dtype)
        if few:
            rows = torch.randn(min(n, ROW_MULTIPLE), k, device="cuda") * 0.02
            self.packed = quantize_tensor(rows, self.fmt)
        else:
            self.packed = random_packed(scheme, n, k)
        self.prepared = operands.prepare(self.packed, self.activation, dtype)
        if few:
            times = -(-n // ROW_MULTIPLE)
            layout = tuple(repeated(part, times) for part in self.prepared.layout)
            self.prepared = self.prepared._replace(shape=(n, k), layout=layout)
        self.decoder = operands.decoder_for(self.fmt, getattr(torch, self.operand))
        self.nbytes = -(-n // 128) * (k // K_TILE) * self.decoder.blob_bytes
        self.copies = rotated(self.prepared, self.nbytes) if cold else [self.prepared]

    def tokens(self, m: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = torch.randn(m, self.k, device="cuda").to(self.dtype)
        if self.activation is None:
            return x, None, None
        codes, scale = quantize_tokens(x, self.activation)
        sums = codes.sum(1, dtype=torch.int32) if self.activation == "int8" else None
        return codes, scale.flatten(), sums

    def run(self, x, scale, sums, tile=None, overlap=True, prepared=None, bias=None) -> Tensor:
        return scalar_linear.multiply(
            x, scale, sums, prepared or self.prepared, bias, self.dtype, tile, overlap
        )

    def tiles(self) -> list[Tile]:
        """All that are compiled."""
        every = dict.fromkeys([*tiles.family(self.decoder), *more_tiles(self.decoder)])
        name = operands.NAMES[self.dtype]
        found = [t for t in every if kernel_file(Kernel(self.decoder, t, name)).exists()]
        return [t for t in found if self.k // K_TILE >= t.split]


def more_tiles(decoder: Decoder) -> list[Tile]:
    """Those of `MORE_TILES` that a decoder can have."""
    fit = (t for t in MORE_TILES if decoder.slot == 16 or t.columns == K_TILE)
    return [tiles.fitted(t, decoder) for t in fit]


def repeated(part: Tensor, times: int) -> Tensor:
    """The rows of a layout again and again; torch repeats no fp8 numbers, but their bytes."""
    several = part.view(torch.uint8) if part.element_size() == 1 else part
    return several.repeat(times, *[1] * (part.dim() - 1)).view(part.dtype)


def random_packed(scheme: str, n: int, k: int) -> Packed:
    """Random codes (finite ones) on the grid of random weights; nothing is encoded."""
    fmt = parse_scheme(scheme)[0]
    w = torch.randn(n, k, device="cuda") * 0.02
    grid = fmt.fit(w)
    if fmt.operand == "int8" and "step" in grid:  # sums must stay within a byte
        return quantize_tensor(w, fmt)
    shape = n, fmt.code_count(k)
    codes = torch.randint(2**fmt.bits, shape, dtype=torch.uint8, device="cuda")
    return Packed.from_codes(fmt, (n, k), finite(fmt, codes), grid)


def finite(fmt: Format, codes: Tensor) -> Tensor:
    """Codes with the largest number in place of NaN and inf."""
    if not isinstance(fmt, Minifloat):
        return codes
    half = 1 << (fmt.bits - 1)
    return codes & half | (codes & (half - 1)).clamp_max(fmt.largest_code)


def outputs(scheme: str) -> list[torch.dtype]:
    return [torch.bfloat16] if parse_scheme(scheme)[1] else [torch.float16, torch.bfloat16]


def exact_weight(p: RandomLayer) -> Tensor:
    """(N, K) fp64: the format's own values, as the operand's dtype has them, times the scale."""
    dtype = torch.bfloat16 if p.operand == "bfloat16" else torch.float32
    return operand_weight(p.packed, dtype).double()


def exact_product(p: RandomLayer, weight: Tensor, x, scale, sums) -> Tensor:
    """(M, N): int8 bit for bit as the kernel must round it, others in fp64."""
    if p.operand == "int8" and not p.decoder.sums:
        row_scale = p.prepared.layout[1][: p.n]
        values = (weight / row_scale[:, None].double()).round()  # exactly
        total = x.double() @ values.T
        return (total.float() * (row_scale * scale[:, None])).to(p.dtype)
    y = x.double() @ weight.T
    return y if scale is None else y * scale[:, None].double()


def right(p: RandomLayer, y: Tensor, want: Tensor) -> bool:
    if p.operand == "int8" and not p.decoder.sums:
        return torch.equal(y, want)
    # Rounding of the output, and of scaled weights where scales belong to groups; fp8 matrix
    # units keep 14 bits of a sum.
    bound = 1e-3 if p.dtype == torch.float16 else 6e-3
    bound = 2e-2 if p.operand == "float8_e4m3fn" else bound
    return bool((y.double() - want).norm() <= bound * want.norm())


# Times.


def time_tile(p: RandomLayer, m: int, tile: Tile | None, overlap: bool) -> float:
    x = p.tokens(m)
    calls = [lambda w=w: p.run(*x, tile=tile, overlap=overlap, prepared=w) for w in p.copies]
    return median_us(calls, torch.device("cuda"))


def time_copy(p: RandomLayer, m: int, rows: int = 0) -> float:
    """The weight decoded, so many rows at once (0: all), and cuBLAS's products with them."""
    x, copy = p.tokens(m)[0], scalar_linear.copy_kernel(p.decoder)
    y = torch.empty(m, p.n, dtype=p.dtype, device="cuda")

    def run(prepared: Prepared) -> None:
        for start in range(0, p.n, rows or p.n):
            end = min(p.n, start + (rows or p.n))
            blobs, *per_row = prepared.layout
            layout = (blobs[start // ROWS : -(-end // ROWS)], *(r[start:end] for r in per_row))
            part = prepared._replace(shape=(end - start, p.k), layout=layout)
            torch.mm(x, mma.decoded(x, copy, part).T, out=y[:, start:end])

    return median_us([partial(run, w) for w in p.copies], torch.device("cuda"))


def dense_us(n: int, k: int, m: int, dtype: torch.dtype) -> float:
    """cuBLAS, with cold weights."""
    w, x = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (n, m))
    calls = [lambda w=w: x @ w.T for w in rotated(w, w.nbytes)]
    return median_us(calls, torch.device("cuda"))
