"""Single instructions against their definitions in the PTX ISA, written down a second time here.

Integers are Python's, of any size; floating-point results are exact fractions, rounded once.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.machine import HANDLERS, handler
from tests.ptx.parse import PtxError, parse
from tests.ptx.races import Clocks, Shadow
from tests.ptx.state import SHARED_BASE, WARP, Cta, State, Warp


class Bench:
    """One warp with some shared memory, which executes what it is given."""

    def __init__(self, **registers: list[int]):
        clocks = Clocks(1)
        self.cta = Cta(0, 0, np.zeros(SHARED_BASE + 4096, np.uint8), Shadow(8192, clocks))
        self.warp = Warp(0, 0, self.cta, 128)
        self.cta.warps = [self.warp]
        self.state = State([], {}, [], {}, [self.cta], clocks, np.random.default_rng(0))
        self.active = np.ones(WARP, bool)
        for name, values in registers.items():
            self.warp.registers[f"%{name}"] = np.array(values, np.uint64)

    def run(self, text: str) -> "Bench":
        for instruction in parse(f".entry k() {{ {text} }}").code:
            handler(instruction.op)(self.state, self.warp, self.active, instruction)
        return self

    def register(self, name: str) -> list[int]:
        return [int(x) for x in self.warp.registers[f"%{name}"]]


def signed(x: int, bits: int) -> int:
    x %= 1 << bits
    return x - (1 << bits) if x >> (bits - 1) else x


def samples(bits: int, seed: int) -> list[int]:
    """32 numbers: those at which something changes, and any."""
    top = 1 << bits
    edges = [0, 1, 2, 3, top - 1, top - 2, top // 2, top // 2 - 1, top // 2 + 1, 31 % top, 32 % top]
    chosen = random.Random(seed)
    values = edges + [chosen.randrange(top) for _ in range(WARP - len(edges))]
    chosen.shuffle(values)
    return values


def quotient(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def permuted(a: int, b: int, selector: int) -> int:
    bytes_of = (b << 32 | a).to_bytes(8, "little")
    out = []
    for at in range(4):
        digit = selector >> 4 * at & 15
        byte = bytes_of[digit & 7]
        out.append(byte if digit < 8 else 255 * (byte >> 7))
    return int.from_bytes(bytes(out), "little")


Definition = Callable[..., int]


def of_width(n: int) -> list[tuple[str, int, Definition]]:
    """Instructions of n bits: (name, n, definition on unsigned numbers); wrapped by who calls."""

    def s(x: int) -> int:
        return signed(x, n)

    table: list[tuple[str, Definition]] = [
        ("add.s", lambda a, b: a + b),
        ("sub.s", lambda a, b: a - b),
        ("mul.lo.s", lambda a, b: a * b),
        ("mad.lo.s", lambda a, b, c: a * b + c),
        ("neg.s", lambda a: -a),
        ("not.b", lambda a: ~a),
        ("and.b", lambda a, b: a & b),
        ("or.b", lambda a, b: a | b),
        ("xor.b", lambda a, b: a ^ b),
        ("min.u", min),
        ("max.u", max),
        ("min.s", lambda a, b: min(s(a), s(b))),
        ("max.s", lambda a, b: max(s(a), s(b))),
        ("div.u", lambda a, b: a // b),
        ("rem.u", lambda a, b: a % b),
        ("div.s", lambda a, b: quotient(s(a), s(b))),
        ("rem.s", lambda a, b: s(a) - quotient(s(a), s(b)) * s(b)),
        # Shifts by more than the width are by the width.
        ("shl.b", lambda a, b: a << min(b % 2**32, n)),
        ("shr.u", lambda a, b: a >> min(b % 2**32, n)),
        ("shr.s", lambda a, b: s(a) >> min(b % 2**32, n)),
    ]
    return [(f"{name}{n}", n, define) for name, define in table]


def dotted_unsigned(a: int, b: int, c: int) -> int:
    return c + sum((a >> i & 255) * (b >> i & 255) for i in (0, 8, 16, 24))


def dotted(a: int, b: int, c: int) -> int:
    return c + sum((a >> i & 255) * signed(b >> i & 255, 8) for i in (0, 8, 16, 24))


INTEGER: list[tuple[str, int, Definition]] = [
    *(case for n in (16, 32, 64) for case in of_width(n)),
    ("min.relu.s32", 32, lambda a, b: max(min(signed(a, 32), signed(b, 32)), 0)),
    ("mul.hi.u32", 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", 32, lambda a, b: signed(a, 32) * signed(b, 32) >> 32),
    ("mul.hi.u16", 16, lambda a, b: a * b >> 16),
    ("mul.hi.s16", 16, lambda a, b: signed(a, 16) * signed(b, 16) >> 16),
    ("mul.wide.u32", 32, lambda a, b: a * b),
    ("mul.wide.s32", 32, lambda a, b: signed(a, 32) * signed(b, 32)),
    ("mul.wide.u16", 16, lambda a, b: a * b),
    ("mul.wide.s16", 16, lambda a, b: signed(a, 16) * signed(b, 16)),
    ("shf.l.wrap.b32", 32, lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    ("prmt.b32", 32, permuted),
    ("dp4a.u32.s32", 32, dotted),
    ("dp4a.u32.u32", 32, dotted_unsigned),
    ("setp.lt.s32", 32, lambda a, b: signed(a, 32) < signed(b, 32)),
    ("setp.gt.u16", 16, lambda a, b: a > b),
    ("setp.ge.s64", 64, lambda a, b: signed(a, 64) >= signed(b, 64)),
    ("setp.eq.b64", 64, lambda a, b: a == b),
    ("setp.ne.b32", 32, lambda a, b: a != b),
    ("cvt.s64.s32", 32, lambda a: signed(a, 32)),
    ("cvt.u64.u32", 32, lambda a: a),
    ("cvt.u32.u64", 64, lambda a: a),
    ("cvt.u32.u16", 16, lambda a: a),
    ("cvt.u16.u32", 32, lambda a: a),
    ("cvt.s8.s32", 32, lambda a: signed(a, 8)),
    ("cvt.s32.s8", 8, lambda a: signed(a, 8)),
    ("cvt.s16.s8", 8, lambda a: signed(a, 8)),
    ("cvt.s32.s16", 16, lambda a: signed(a, 16)),
]


def width(op: str, bits: int) -> int:
    """Of an integer instruction's result."""
    if op.startswith("cvt"):
        return max(int(re.findall(r"\d+", op)[0]), 32 if op[4] == "s" else 0)
    return 2 * bits if ".wide" in op else bits


@pytest.mark.parametrize(("op", "bits", "define"), INTEGER, ids=[case[0] for case in INTEGER])
def test_integers(op: str, bits: int, define: Callable[..., int]) -> None:
    count = {"mad": 3, "shf": 3, "prm": 3, "dp4": 3, "neg": 1, "not": 1, "cvt": 1}.get(op[:3], 2)
    values = [samples(bits, seed) for seed in range(count)]
    if op[:3] in ("div", "rem"):
        values[1] = [b or 7 for b in values[1]]
    names = "abc"[:count]
    bench = Bench(**dict(zip(names, values, strict=True)))
    bench.run(f"{op} %d, {', '.join('%' + name for name in names)};")
    want = [int(define(*row)) % (1 << width(op, bits)) for row in zip(*values, strict=True)]
    assert bench.register("d") == want


def test_known_words() -> None:
    """By hand, from the ISA's tables."""
    bench = Bench(a=[0x33221180] * WARP, b=[0x77665544] * WARP, n=[40] * WARP)
    bench.run("prmt.b32 %r, %a, %b, 0x7081; shf.l.wrap.b32 %f, %a, %b, %n; shl.b32 %s, %a, 32;")
    assert bench.register("r")[0] == 0x7780FF11  # digit 8: the sign of byte 0
    assert bench.register("f")[0] == 0x66554433  # by 40 modulo 32
    assert bench.register("s")[0] == 0
    bench.run("lop3.b32 %l, %a, %b, %n, 0x6a; lop3.b32 %m, %a, %b, %n, 0x1;")
    assert bench.register("l")[0] == (0x33221180 & 0x77665544) ^ 40
    assert bench.register("m")[0] == ~(0x33221180 | 0x77665544 | 40) & 0xFFFFFFFF
    bench.run("mov.b32 {%low, %high}, %a; mov.b32 %back, {%high, %low}; not.b32 %n, %a;")
    assert (bench.register("low")[0], bench.register("high")[0]) == (0x1180, 0x3322)
    assert bench.register("back")[0] == 0x11803322
    assert bench.register("n")[0] == 0xCCDDEE7F
    bench.run("setp.lt.u32 %p, %a, %b; not.pred %q, %p; selp.b32 %x, %a, %b, %q;")
    assert (bench.register("p")[0], bench.register("q")[0]) == (1, 0)
    assert bench.register("x")[0] == 0x77665544
    bench.run("and.pred %u, %p, %q; or.pred %v, %p, %q; mov.b64 %w, {%a, %b};")
    assert (bench.register("u")[0], bench.register("v")[0]) == (0, 1)
    assert bench.register("w")[0] == 0x7766554433221180


# Floating point. (bits of the significand, exponent of the smallest normal number, largest number)
F32, F16, BF16 = (24, -126, 2.0**128), (11, -14, 2.0**16), (8, -126, 2.0**128)
FORMATS = {"f32": F32, "f16": F16, "bf16": BF16}


def rounded(x: Fraction, kind: str) -> float:
    """To nearest, ties to even; infinite from where the next power of two would be."""
    digits, least, end = FORMATS[kind]
    if not x:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, least) - digits + 1)
    value = round(x / step) * step
    return float(value) if abs(value) < end else float("inf") * (1 if value > 0 else -1)


def decoded(word: int, kind: str) -> float:
    if kind == "f16":
        return float(np.array([word & 0xFFFF], np.uint16).view(np.float16)[0])
    shift = 16 if kind == "bf16" else 0
    return float(np.array([word << shift & 0xFFFFFFFF], np.uint32).view(np.float32)[0])


def floats(kind: str, seed: int) -> list[int]:
    """Finite numbers, mostly of similar size, some subnormal."""
    chosen, out = random.Random(seed), []
    bits = 32 if kind == "f32" else 16
    fraction = FORMATS[kind][0] - 1
    bias = 15 if kind == "f16" else 127
    for lane in range(WARP):
        exponent = bias + chosen.randrange(-4, 4) if lane % 4 else chosen.choice([0, 1, 2, bias])
        sign, rest = chosen.getrandbits(1), chosen.getrandbits(fraction)
        out.append(sign << bits - 1 | exponent << fraction | rest)
    return out


DEFINE: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("name", DEFINE)
@pytest.mark.parametrize("kind", FORMATS)
def test_floats(name: str, kind: str) -> None:
    count = 3 if name == "fma" else 2
    low = [floats(kind, seed) for seed in range(count)]
    high = [floats(kind, seed + 9) for seed in range(count)]
    words = low
    op = f"{name}.rn.f32"
    if kind != "f32":
        op = f"{name}.rn.{kind}x2"
        words = [[h << 16 | a for h, a in zip(*pair, strict=True)]
                 for pair in zip(high, low, strict=True)]  # fmt: skip
    names = "abc"[:count]
    bench = Bench(**dict(zip(names, words, strict=True)))
    result = bench.run(f"{op} %d, {', '.join('%' + n for n in names)};").register("d")
    for shift, parts in [(0, low), (16, high)] if kind != "f32" else [(0, low)]:
        for lane, row in enumerate(zip(*parts, strict=True)):
            exact = DEFINE[name](*(Fraction(decoded(word, kind)) for word in row))
            assert decoded(result[lane] >> shift, kind) == rounded(exact, kind)


def test_a_fused_product_is_rounded_once() -> None:
    """1 + (2**-24 + 2**-70): just above a tie, which float64 cannot hold."""
    a, b = np.float32(2.0**-24 * (1 + 2.0**-23)), np.float32(1 - 2.0**-23)
    exact = Fraction(float(a)) * Fraction(float(b))
    for one in (1.0, float(np.nextafter(np.float32(1), np.float32(2)))):
        want = rounded(exact + Fraction(one), "f32")
        words = [int(np.float32(x).view(np.uint32)) for x in (a, b, one)]
        bench = Bench(**{n: [word] * WARP for n, word in zip("abc", words, strict=True)})
        found = bench.run("fma.rn.f32 %d, %a, %b, %c;").register("d")[0]
        assert decoded(found, "f32") == want


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_conversions_of_floats(kind: str) -> None:
    a, b = floats("f32", 1), floats("f32", 2)
    a[:3] = [0x477FEFFF, 0x477FF000, 0x33000000]  # 65519.99, 65520, 2**-25
    bench = Bench(a=a, b=b)
    bench.run(f"cvt.rn.{kind}x2.f32 %d, %a, %b; cvt.rn.{kind}.f32 %e, %a; cvt.f32.{kind} %f, %d;")
    for lane in range(WARP):
        want = [rounded(Fraction(decoded(x[lane], "f32")), kind) for x in (a, b)]
        word = bench.register("d")[lane]
        assert [decoded(word >> 16, kind), decoded(word, kind)] == want
        assert decoded(bench.register("e")[lane], kind) == want[0]
        assert decoded(bench.register("f")[lane], "f32") == want[1]


def test_integers_become_floats() -> None:
    values = [*samples(32, 5)[:-2], 0x01000001, 0x01000003]  # ties
    found = Bench(a=values).run("cvt.rn.f32.s32 %d, %a;").register("d")
    for word, value in zip(found, values, strict=True):
        assert decoded(word, "f32") == rounded(Fraction(signed(value, 32)), "f32")


# Warps.


def test_shuffles() -> None:
    bench = Bench(a=[100 + lane for lane in range(WARP)])
    bench.run("shfl.sync.idx.b32 %i, %a, 5, 31, -1; shfl.sync.bfly.b32 %x, %a, 3, 0x1f, -1;")
    assert bench.register("i") == [105] * WARP
    assert bench.register("x") == [100 + (lane ^ 3) for lane in range(WARP)]
    bench = Bench(a=list(range(100, 132)), n=[7 * lane for lane in range(WARP)])
    bench.run("shfl.sync.idx.b32 %i, %a, %n, 31, -1;")
    assert bench.register("i") == [100 + 7 * lane % 32 for lane in range(WARP)]
    bench.run("elect.sync %l|%p, -1;")
    assert bench.register("p") == [1] + [0] * 31


def test_lanes_vote() -> None:
    bench = Bench(a=list(range(WARP)))
    bench.run("setp.gt.s32 %q, %a, 28; vote.sync.ballot.b32 %v, %q, -1; popc.b32 %c, %v;")
    assert bench.register("v") == [0b111 << 29] * WARP
    assert bench.register("c") == [3] * WARP


def halves(values: list[float]) -> int:
    """Two fp16 numbers in a word, the first in the low half."""
    low, high = (int(np.float16(v).view(np.uint16)) for v in values)
    return high << 16 | low


@pytest.mark.parametrize("k", [8, 16])
def test_warp_products(k: int) -> None:
    """Fragments as in the ISA's figures: group g = lane / 4, thread t = lane % 4."""
    chosen = np.random.default_rng(k)
    a, b = chosen.integers(-4, 5, (16, k)), chosen.integers(-4, 5, (k, 8))
    c = chosen.integers(-9, 9, (16, 8))
    registers: dict[str, list[int]] = {}
    for n in range(k // 4):  # a0: row g; a1: row g + 8; a2, a3: columns + 8
        rows = [lane // 4 + 8 * (n % 2) for lane in range(WARP)]
        columns = [lane % 4 * 2 + 8 * (n // 2) for lane in range(WARP)]
        at = zip(rows, columns, strict=True)
        registers[f"a{n}"] = [halves([a[r, x], a[r, x + 1]]) for r, x in at]
    for n in range(k // 8):
        rows = [lane % 4 * 2 + 8 * n for lane in range(WARP)]
        registers[f"b{n}"] = [halves([b[r, i // 4], b[r + 1, i // 4]]) for i, r in enumerate(rows)]
    places = [
        [(lane // 4 + 8 * (n // 2), lane % 4 * 2 + n % 2) for lane in range(WARP)] for n in range(4)
    ]
    for n, place in enumerate(places):
        registers[f"c{n}"] = [int(np.float32(c[at]).view(np.uint32)) for at in place]
    lists = {x: ", ".join(f"%{x}{n}" for n in range(count))
             for x, count in (("a", k // 4), ("b", k // 8), ("c", 4), ("d", 4))}  # fmt: skip
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.f16.f16.f32 "
    text += ", ".join(f"{{{lists[x]}}}" for x in "dabc") + ";"
    bench = Bench(**registers).run(text)
    want = a @ b + c
    for n, place in enumerate(places):
        found = [decoded(word, "f32") for word in bench.register(f"d{n}")]
        assert found == [float(want[at]) for at in place]


def in_lanes(matrix: np.ndarray, each: int, tall: bool) -> list[list[int]]:
    """Words of A's (rows, K) or B's (8, K) registers: `each` bytes of K of a row, in lane order."""
    words = []
    for step in range(matrix.shape[1] // (4 * each)):
        for first in (0, 8) if tall else (0,):
            places = [(lane // 4 + first, (lane % 4 + 4 * step) * each) for lane in range(WARP)]
            words.append([int(matrix[r, c : c + each].view(np.uint32)[0]) for r, c in places])
    return words


@pytest.mark.parametrize("types", ["s32.u8.s8.s32", "f32.e4m3.e4m3.f32"])
def test_warp_products_of_bytes(types: str) -> None:
    """m16n8k32. The bytes of e4m3 are small whole numbers, m * 2**-9."""
    chosen = np.random.default_rng(len(types))
    a, b = (chosen.integers(0, 16, (rows, 32)).astype(np.uint8) for rows in (16, 8))
    if types.startswith("s32"):
        a, b = chosen.integers(0, 256, (16, 32)).astype(np.uint8), (b.astype(np.int16) - 8)
        b = b.astype(np.int8)
    registers = {f"a{i}": word for i, word in enumerate(in_lanes(a, 4, True))}
    registers |= {f"b{i}": word for i, word in enumerate(in_lanes(b, 4, False))}
    start = 2**32 - 5 if types.startswith("s32") else 0
    bench = Bench(**registers, **{f"c{i}": [start] * WARP for i in range(4)}).run(
        f"mma.sync.aligned.m16n8k32.row.col.{types} {{%d0, %d1, %d2, %d3}}, "
        "{%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c1, %c2, %c3};"
    )
    want = a.astype(np.int64) @ b.astype(np.int64).T
    for i in range(4):
        for lane, word in enumerate(bench.register(f"d{i}")):
            at = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
            if types.startswith("s32"):
                assert signed(word, 32) == want[at] - 5
            else:  # 0 to 15 stand for 0 to 15 times 2**-9: subnormals, and the step behind them
                assert decoded(word, "f32") == want[at] * 2.0**-18


def test_matrices_turn_in_registers() -> None:
    words = [2 * lane | (2 * lane + 1) << 16 for lane in range(WARP)]
    bench = Bench(a=words).run("movmatrix.sync.aligned.m8n8.trans.b16 %b, %a;")
    for lane, word in enumerate(bench.register("b")):
        row, column = lane // 4, lane % 4 * 2
        assert word == (column * 8 + row) | ((column + 1) * 8 + row) << 16


def test_matrices_of_shared_memory() -> None:
    """Rows of 16 bytes, at the addresses of lanes 8 i to 8 i + 7 for matrix i."""
    bench = Bench(at=[SHARED_BASE + 16 * lane for lane in range(WARP)])
    memory = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    bench.cta.shared[SHARED_BASE : SHARED_BASE + 512] = memory.reshape(-1).view(np.uint8)
    bench.run("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%a, %b, %c, %d}, [%at];")
    bench.run("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%e, %f, %g, %h}, [%at];")
    for lane in range(WARP):
        row, column = lane // 4, lane % 4 * 2
        for n in range(4):
            matrix = memory[n].tolist()
            plain, turned = bench.register("abcd"[n])[lane], bench.register("efgh"[n])[lane]
            assert plain == matrix[row][column] | matrix[row][column + 1] << 16
            assert turned == matrix[column][row] | matrix[column + 1][row] << 16
    bench.run("bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%at], {%a, %b};")
    found = bench.cta.shared[SHARED_BASE : SHARED_BASE + 256].view(np.uint16).reshape(2, 8, 8)
    assert (found == memory[:2].transpose(0, 2, 1)).all()


@pytest.mark.parametrize(("types", "n", "size"), [("f32.f16.f16", 8, 2), ("s32.u8.s8", 16, 1)])
def test_warpgroup_products(types: str, n: int, size: int) -> None:
    """B of K-major rows of 128 bytes, whose 16-byte chunks trade places by the row."""
    chosen, k = np.random.default_rng(n), 32 // size
    a, b = chosen.integers(0, 5, (16, k)), chosen.integers(-4, 5, (n, k))
    dtypes = {"f16": np.float16, "u8": np.uint8, "s8": np.int8}
    a_type, b_type = (dtypes[t] for t in types.split(".")[1:])
    registers: dict[str, list[int]] = {"desc": [1 << 62 | 64 << 32 | SHARED_BASE >> 4] * WARP}
    each = 4 // size
    for i in range(4):
        row = [lane // 4 + 8 * (i % 2) for lane in range(WARP)]
        column = [lane % 4 * each + i // 2 * 4 * each for lane in range(WARP)]
        registers[f"a{i}"] = [
            int(a[r, x : x + each].astype(a_type).view(np.uint32)[0])
            for r, x in zip(row, column, strict=True)
        ]
    for i in range(n // 2):
        registers[f"d{i}"] = [0] * WARP
    bench = Bench(**registers, p=[1] * WARP)
    for r, line in enumerate(b):
        for c in range(2):
            at = SHARED_BASE + r * 128 + (c ^ r % 8) * 16
            piece = line[c * k // 2 : (c + 1) * k // 2].astype(b_type).view(np.uint8)
            bench.cta.shared[at : at + 16] = piece
    d = ", ".join(f"%d{i}" for i in range(n // 2))
    bench.run(
        f"wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {{{d}}}, "
        "{%a0, %a1, %a2, %a3}, %desc, %p; wgmma.commit_group.sync.aligned; "
        "wgmma.wait_group.sync.aligned 0;"
    )
    want = a @ b.T
    for i in range(n // 2):
        for lane, word in enumerate(bench.register(f"d{i}")):
            place = (lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2)
            found = decoded(word, "f32") if types.startswith("f32") else signed(word, 32)
            assert found == want[place]


def test_names_have_one_meaning() -> None:
    for name in ("mul.hi.s32", "mul.wide.u16", "cvt.s8.s32", "bar.warp.sync", "st.async.weak"):
        assert sum(bool(re.fullmatch(pattern, name)) for pattern in HANDLERS) <= 1
    with pytest.raises(PtxError, match="does not know bfind"):
        handler("bfind.u32")
