"""One token that comes in 16 bits and is multiplied in int8: every CTA quantizes it for itself.

`narrow.py` without a launch before it. All codes lie in shared memory behind the rings, and a warp
makes those that it multiplies: but for the largest number of all, warps need nothing of each other.
The arithmetic is `reference.quantize_tokens`, bit for bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import (
    TYPES,
    asm,
    dp4a,
    load_global,
    load_shared,
    shuffle,
    store_shared,
)
from anybit.kernels.mma.narrow import Narrow
from anybit.kernels.mma.tiles import Kernel

HALF_WARP = 16  # pieces of 8 columns in a K tile
OF_HALVES = {  # two numbers of a register in fp32
    "float16": "mov.b32 {{l, h}}, {0}; cvt.f32.f16 {1}, l; cvt.f32.f16 {2}, h;",
    "bfloat16": "shl.b32 {1}, {0}, 16; and.b32 {2}, {0}, 0xFFFF0000;",
}
OF_ONE = {"float16": "mov.b32 {l, h}, $1; cvt.f32.f16 v, h;", "bfloat16": "mov.b32 v, $1;"}


class Single(Narrow):
    quantizes = True

    def __init__(self, spec: Kernel):
        super().__init__(spec)
        tiles = -(-self.tile.columns // (K_TILE * self.warps))  # of a warp
        self.lots = -(-tiles // 2)  # pieces of a lane, which have half a warp to a K tile

    @property
    def types(self):
        return super().types | {"x": (TYPES[self.out], 16)}

    def place_table(self, base):
        ring = super().place_table(base)
        self.codes = ring + self.warps * self.stages * self.stage_bytes
        self.largest = self.codes + self.tile.columns  # of each warp, and then its sum
        return ring

    def fetch_tokens(self, to, given, first, end, kt, lane):
        """Nothing: codes come by `quantize`."""

    def lookup(self, ring, lane):
        """Address of this lane's row for `ldmatrix`, but for the K tile and the step."""
        return self.codes + lane // 8 * 16

    def two_tokens(self, given, token):
        """Known behind the main loop: see `add_up`."""

    def add_up(self, given, at, rows, tokens, token, channel, end):
        one = self.scale(), sum(self.of_warps(self.warps * 4, Int32), Int32(0))
        super().add_up(given, at, rows, (one, one, Int32(0)), token, channel, end)

    def of_warps(self, at, kind):
        """What each warp has left `at` bytes behind the codes."""
        n = 4 if self.warps % 4 == 0 else 1
        every = [load_shared(self.largest, n, at + 4 * i, True, kind)
                 for i in range(0, self.warps, n)]  # fmt: skip
        return [word for some in every for word in some]

    def scale(self):
        """Of the token: its largest number over 127; 1 where that is 0."""
        most = Uint32(0)
        for word in self.of_warps(0, Uint32):
            most = cutlass.max(most, word)
        text = (
            f"{{ .reg .f32 v; .reg .b32 w; .reg .b16 l, h; .reg .pred p; {OF_ONE[self.out]} "
            "div.rn.f32 v, v, 0f42FE0000; mov.b32 w, v; setp.eq.u32 p, w, 0; "
            "selp.f32 $0, 0f3F800000, v, p; }"
        )
        return asm(Float32, text, most, effects=False)

    def quantize(self, given, warp, lane):
        """Write the codes of this warp's K tiles, its part of the largest number, and its sum."""
        columns, tiles = [], []
        for i in range(self.lots):
            tile = warp + (2 * i + lane // HALF_WARP) * self.warps
            tiles.append(tile)
            columns.append(tile * K_TILE + lane % HALF_WARP * 8)
        x = given.x.toint()
        words = [load_global(x + Int64(c) * 2, 4, c < given.k) for c in columns]
        most = Uint32(0)
        for some in words:
            for word in some:
                most = larger(word, most)
        for apart in (16, 8, 4, 2, 1):
            most = cutlass.max(most, shuffle(most, Uint32(lane ^ apart)))
        store_if(lane == 0, self.largest + warp * 4, [most])
        cute.arch.sync_threads()
        terms = divisor(self.scale())
        total = Uint32(0)
        for i in range(self.lots):
            codes = [quantized(words[i][2 * j : 2 * j + 2], terms, self.out) for j in range(2)]
            for word in codes:
                total = dp4a(Uint32(0x01010101), word, total, True)
            store_if(tiles[i] * K_TILE < given.k, self.codes + columns[i], codes)
        for apart in (16, 8, 4, 2, 1):
            total = total + shuffle(total, Uint32(lane ^ apart))
        store_if(lane == 0, self.largest + (self.warps + warp) * 4, [total])
        cute.arch.sync_warp()


@cute.jit
def store_if(when, address, values):
    if when:
        store_shared(address, values)


def larger(word, most):
    """The largest magnitude of two 16-bit numbers, in the upper half, and `most`, which is such."""
    text = (
        "{ .reg .b32 l, h; shl.b32 l, $1, 16; and.b32 l, l, 0x7FFF0000; "
        "and.b32 h, $1, 0x7FFF0000; max.u32 h, h, l; max.u32 $0, h, $2; }"
    )
    return asm(Uint32, text, Uint32(word), Uint32(most), effects=False)


def divisor(scale):
    """What `quantized` divides by: minus the scale and its inverse, both of numbers times the last.

    That is 2^100 for scales whose inverse could not be told, else 1.
    """
    text = (
        "{ .reg .f32 s; .reg .b32 w; .reg .pred p; mov.b32 w, $3; setp.lt.u32 p, w, 0x0DA24260; "
        "selp.f32 $2, 0f71800000, 0f3F800000, p; mul.rn.f32 s, $3, $2; "
        "div.rn.f32 $1, 0f3F800000, s; mul.rn.f32 $0, s, 0fBF800000; }"
    )
    return asm(Float32, text, scale, count=3, effects=False, early=True)


def quantized(two, terms, dtype):
    """Four codes of numbers in two registers: correctly rounded quotients, rounded to integers.

    1.5 * 2^23 rounds ties to even, and leaves the integer in the lowest byte. No quotient is beyond
    127 by more than that rounds off: the scale of any 16-bit number is right to 0.1 %.
    """
    names = "abcd"
    of_halves = OF_HALVES[dtype]
    lines = [of_halves.format(f"${i + 1}", *names[2 * i : 2 * i + 2]) for i in range(2)]
    lines += [
        f"mul.rn.f32 {v}, {v}, $5; mul.rn.f32 q, {v}, $4; fma.rn.f32 {v}, q, $3, {v}; "
        f"fma.rn.f32 q, {v}, $4, q; add.rn.f32 {v}, q, 0f4B400000;"
        for v in names
    ]
    text = (
        "{ .reg .f32 a, b, c, d, q; .reg .b16 l, h; "
        + " ".join(lines)
        + " prmt.b32 a, a, b, 0x0040; prmt.b32 c, c, d, 0x0040; prmt.b32 $0, a, c, 0x5410; }"
    )
    return asm(Uint32, text, *map(Uint32, two), *terms, effects=False)
