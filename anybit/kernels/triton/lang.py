"""What a format's `triton_decode` may call: codes, numbers and grid values of one tile of weights.

A format decodes without addresses. Its method

    def triton_decode(self, at):
        return lang.number(at, 8)        # W = (code - 8) * scale

is compiled into every kernel. `self` is the format (its fields and properties are compile-time
constants), `at` names the tile; `lang` and `tl` (triton.language) are given to the function, so a
format's file imports neither. It returns a tile of values in units of the scale, (N, columns), of
any dtype that holds them exactly; the kernel rounds them to the dtype of x and applies the scale.

Converting an integer to a float runs at a quarter of the speed of other instructions on NVIDIA
GPUs. So `number` and `bits` place a code's bits directly into the mantissa or the exponent field of
a float, for two weights (or four bytes) in one register.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import jit as compiler

from anybit.kernels.triton import ahead

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
NO_PTX = tl.constexpr(INTERPRET.value or bool(torch.version.hip))  # Python, or an AMD GPU

# at = (words of this field, one tile for each book and plane; field; layout; dtype; grid)
WORDS, FIELD, LAYOUT, DTYPE, GRID = (tl.constexpr(i) for i in range(5))


def settle(names: dict[str, Any]) -> None:
    """Have Triton name the functions of a module, which this ends, for its cache, and try kernels.

    Where a function's callees have no names yet, Triton leaves their constants out of its own. So
    names would depend on what was launched before, and a process that has compiled ahead of time
    would have compiled for nobody.
    """
    for function in [*names.values()]:
        if isinstance(function, triton.JITFunction):
            function.cache_key  # noqa: B018  is computed once
    ahead.install()


def _described(name: str, signature: Any, constants: dict[Any, Any], *others: Any) -> str:
    """What Triton's hooks get of a kernel as JSON, which knows no layouts: vLLM has such a hook."""
    known = {
        at: str(value) if is_dataclass(value) or isinstance(value, triton.JITFunction) else value
        for at, value in constants.items()
    }
    return _usual(name, signature, known, *others)


_usual: Any = getattr(compiler, "serialize_specialization_data", None)
if _usual is not None:
    compiler.serialize_specialization_data = _described


@cache
def jit(decode: Callable[..., Any]) -> Any:
    """A format's `triton_decode` as a Triton function, with `lang` and `tl` in its reach."""
    if not isinstance(decode, types.FunctionType):
        return decode  # the format's file made it a Triton function itself
    scope = {**decode.__globals__, "lang": sys.modules[__name__], "tl": tl}
    scope["Any"] = tl.constexpr(None)  # so that the function may annotate its arguments
    own = types.FunctionType(decode.__code__, scope, decode.__name__, decode.__defaults__)
    own.__module__, own.__qualname__ = decode.__module__, decode.__qualname__
    return triton.jit(own)


@triton.jit
def code(at, BOOK: tl.constexpr = 0):
    """Codes as int32, (N, positions)."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    BITS: tl.constexpr = LAYOUT_.fmt.bits
    if BITS > 8:
        return _joined(at, BOOK)
    return bits(at, ((0, BITS, 0),), 0, BOOK).to(tl.int32) & 0xFF


@triton.jit
def _joined(at, BOOK: tl.constexpr):
    """Codes of several planes as int32."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    PLANES: tl.constexpr = plane_count(LAYOUT_)
    total = at[WORDS][0].to(tl.int32) * 0
    for p in tl.static_range(PLANES):
        word = at[WORDS][BOOK * PLANES + p].to(tl.int32) >> offset_of(LAYOUT_, at[FIELD], p)
        bit = segment_of(LAYOUT_, p)
        total = (total << bit) | (word & ((1 << bit) - 1))
    return total


@triton.jit
def window(at):
    """Bits of the sequence up to the own ones of each position's step, (N, positions) uint32."""
    return at[WORDS][0]


@triton.jit
def dot4(x, WEIGHTS: tl.constexpr, PLUS: tl.constexpr):
    """The four bytes of x times the signed bytes of WEIGHTS, added up, plus PLUS: int32."""
    if NO_PTX:
        total = x.to(tl.int32) * 0 + PLUS
        for i in tl.static_range(4):
            total += ((x >> (8 * i)) & 255).to(tl.int32) * signed_byte(WEIGHTS, i)
        return total
    else:
        return tl.inline_asm_elementwise(dot4_asm(WEIGHTS, PLUS), "=r,r", [x], tl.int32, True, 1)


@triton.jit
def number(at, MINUS: tl.constexpr = 0, TIMES: tl.constexpr = 1, BOOK: tl.constexpr = 0):
    """code * TIMES - MINUS (TIMES is 1 or 2), exact, in the operand's dtype, (N, positions)."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    BITS: tl.constexpr = LAYOUT_.fmt.bits
    return field(at, 0, BITS, MINUS, TIMES, BOOK)


@triton.jit
def field(
    at,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    MINUS: tl.constexpr = 0,
    TIMES: tl.constexpr = 1,
    BOOK: tl.constexpr = 0,
):
    """`number` of COUNT bits of the code, from bit FIRST on."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    DTYPE_: tl.constexpr = at[DTYPE]
    if NO_PTX:
        x = (code(at, BOOK) >> FIRST) & ((1 << COUNT) - 1)
        return (x * TIMES - MINUS).to(tl.float32).to(DTYPE_)
    elif DTYPE_ == tl.int8:
        return _bytes_minus(at, FIRST, COUNT, MINUS, TIMES, BOOK)
    elif COUNT > mantissa(DTYPE_):  # 8 bits in bf16: the low 7, and the top one
        low = bits(at, ((FIRST, 7, 0),), 0x4300, BOOK).to(DTYPE_, bitcast=True) - 128
        high = bits(at, ((FIRST + 7, 1, 7),), 0x4300, BOOK).to(DTYPE_, bitcast=True)
        return low + (high - (128 + MINUS))
    else:
        # Twice the code is the code one bit higher.
        TO: tl.constexpr = in_place(LAYOUT_, at[FIELD], FIRST, COUNT + TIMES - 1, DTYPE_)
        UNIT: tl.constexpr = 2.0**-TO
        LESS: tl.constexpr = 2 ** mantissa(DTYPE_) * UNIT + MINUS
        x = bits(at, ((FIRST, COUNT, TO + TIMES - 1),), magic(DTYPE_), BOOK)
        x = x.to(DTYPE_, bitcast=True)
        return x - LESS if UNIT == 1 else x * UNIT - LESS


@triton.jit
def floating(at, EXPONENT: tl.constexpr, MANTISSA_: tl.constexpr, BOOK: tl.constexpr = 0):
    """Codes as floating-point numbers of one sign bit, EXPONENT and MANTISSA bits, (N, positions).

    The bias is 2**(EXPONENT - 1) - 1. The bits moved under the operand's exponent field are the
    number times a power of two, subnormals included, which one exact product puts right.
    """
    DTYPE_: tl.constexpr = at[DTYPE]
    REST: tl.constexpr = EXPONENT + MANTISSA_
    MOVES: tl.constexpr = ((REST, 1, 15), (0, REST, mantissa(DTYPE_) - MANTISSA_))
    x = bits(at, MOVES, 0, BOOK).to(DTYPE_, bitcast=True)
    SHIFT: tl.constexpr = bias(DTYPE_) - 2 ** (EXPONENT - 1) + 1
    return x * 2.0**SHIFT


@triton.jit
def bits(at, MOVES: tl.constexpr, CONSTANT: tl.constexpr = 0, BOOK: tl.constexpr = 0):
    """Bits of the codes in other places, or'ed with a constant: (N, positions), the unit's int.

    MOVES: ((from bit, how many, to bit), ...), bit 0 being a code's lowest. One shift and one
    logical operation for each plane and move serve a whole register of codes.
    """
    LAYOUT_: tl.constexpr = at[LAYOUT]
    PLANES: tl.constexpr = plane_count(LAYOUT_)
    if NO_PTX:
        return _bits_plainly(at, MOVES, CONSTANT, BOOK)
    ASM: tl.constexpr = bits_asm(LAYOUT_, at[FIELD], MOVES, CONSTANT)
    INT: tl.constexpr = tl.int16 if LAYOUT_.unit == 16 else tl.int8
    PACK: tl.constexpr = 32 // LAYOUT_.unit
    w = at[WORDS]
    if PLANES == 1:
        return tl.inline_asm_elementwise(ASM, "=r,r", [w[BOOK]], INT.value, True, PACK)
    elif PLANES == 2:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r", [w[2 * BOOK], w[2 * BOOK + 1]], INT.value, True, PACK
        )
    else:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [w[3 * BOOK], w[3 * BOOK + 1], w[3 * BOOK + 2]], INT.value, True, PACK
        )


@triton.jit
def level(at, I: tl.constexpr):
    """Values of grid tensor I (0 is the first after the scale), of a shape that fits the codes.

    Small integers (uint8) come in the operand's dtype, floats in fp32.
    """
    DTYPE_: tl.constexpr = at[DTYPE]
    v = at[GRID][I]
    if v.dtype != tl.uint8:
        return v.to(tl.float32)
    elif DTYPE_ == tl.int8:
        return v
    else:
        return v.to(tl.float32).to(DTYPE_)


@triton.jit
def lookup(at, I: tl.constexpr, index):
    """Rows `index` (N, positions) of table I, a grid tensor (..., width): (N, columns) fp32."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    WIDTH: tl.constexpr = LAYOUT_.fmt.width
    SIZE: tl.constexpr = table_size(LAYOUT_, I)
    t = at[GRID][I]
    if WIDTH == 1:
        return tl.load(t + index).to(tl.float32)
    elif INTERPRET or SIZE > 4096 or WIDTH % 2 == 1 or t.dtype.element_ty != tl.float16:
        e = tl.arange(0, WIDTH)
        v = tl.load(t + (index * WIDTH)[:, :, None] + e[None, None, :]).to(tl.float32)
        return tl.reshape(v, (index.shape[0], index.shape[1] * WIDTH))
    else:  # from shared memory, two numbers at a time
        HALF: tl.constexpr = WIDTH // 2
        ROWS: tl.constexpr = index.shape[0]
        pairs = tl.load(t.to(tl.pointer_type(tl.int32)) + tl.arange(0, SIZE // 2))
        at_pair = (index * HALF)[:, :, None] + tl.arange(0, HALF)[None, None, :]
        COUNT: tl.constexpr = ROWS * index.shape[1] * HALF
        v = tl.gather(pairs, tl.reshape(at_pair, (COUNT,)), 0)
        low, high = two(v)
        return tl.reshape(tl.join(low, high), (ROWS, index.shape[1] * WIDTH)).to(tl.float32)


@triton.jit
def entry(at, I: tl.constexpr, index):
    """Numbers `index` (N, positions) of table I, a grid tensor (entries,), as they are."""
    return tl.load(at[GRID][I] + index)


@triton.jit
def of_steps(words, WIDTH: tl.constexpr):
    """Bytes of the words of a sequence's steps, (N, steps) -> int8 (N, columns).

    A step of four weights has columns c, c + 1, c + 8 and c + 9 of a tile; see `core/tiles.py`.
    """
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1] * WIDTH
    v = (words[:, :, None] >> (tl.arange(0, WIDTH) * 8)[None, None, :]).to(tl.int8)
    if WIDTH == 4:
        v = tl.permute(tl.reshape(v, (ROWS, COLUMNS // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(v, (ROWS, COLUMNS))


@triton.jit
def spread(x, COUNT: tl.constexpr):
    """Each number (N, positions) COUNT times, (N, positions * COUNT)."""
    some = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], COUNT))
    return tl.reshape(some, (x.shape[0], x.shape[1] * COUNT))


@triton.jit
def spread_bits(x, COUNT: tl.constexpr):
    """The lowest COUNT bits of each number (N, positions), (N, positions * COUNT) int32."""
    some = x[:, :, None] >> tl.arange(0, COUNT)[None, None, :] & 1
    return tl.reshape(some, (x.shape[0], x.shape[1] * COUNT))


@triton.jit
def halves(x, at, GROUP: tl.constexpr):
    """Of each byte, that of two groups, the four bits of the group that each position is in.

    x: of a grid tensor with groups of 2 GROUP columns, which fields of columns do not cut. The
    result is (N, positions) int32.
    """
    LAYOUT_: tl.constexpr = at[LAYOUT]
    COUNT: tl.constexpr = LAYOUT_.columns // LAYOUT_.fmt.width
    second = tl.arange(0, COUNT) * LAYOUT_.fmt.width // GROUP % 2
    return x.to(tl.int32) >> (second * 4)[None, :] & 15


@triton.jit
def pair(first, second):
    """Values of neighbouring columns, (N, positions) each -> (N, 2 * positions)."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def multiply_add(at, step, offset):
    """code * step + offset in unsigned bytes, which must not overflow, read as int8 minus 128.

    For operands of matrix units alone: there, neighbours along K share a register and a step. In
    other layouts (of a tile that was shifted, say) a register may hold bytes of several rows.
    """
    LAYOUT_: tl.constexpr = at[LAYOUT]
    BITS: tl.constexpr = LAYOUT_.fmt.bits
    if NO_PTX:
        v = code(at).to(tl.int32) * step.to(tl.int32) + offset.to(tl.int32)
        return (v - 128).to(tl.int8)
    c = bits(at, ((0, BITS, 0),))
    # step and offset come replicated in all four bytes; one of step's is the multiplier.
    return tl.inline_asm_elementwise(
        "{.reg .b32 s; and.b32 s, $2, 255; mad.lo.u32 s, $1, s, $3; xor.b32 $0, s, 0x80808080;}",
        "=r,r,r,r",
        [c, step, offset],
        tl.int8,
        True,
        4,
    )


@triton.jit
def shifted(w, SHIFT):
    """Units shifted right by a number of bits that is not known at compile time."""
    mask = 0xFFFF if w.dtype == tl.int16 else 0xFF
    return ((w.to(tl.int32) & mask) >> SHIFT).to(w.dtype)


@triton.jit
def floats(at, mask):
    """What lies at addresses, in fp32; zeros where the mask is false."""
    return tl.load(at, mask=mask, other=0).to(tl.float32)


@triton.jit
def two(words):
    """The fp16 numbers in the low and in the high bits of words."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """acc + a b on the matrix unit, in acc's dtype."""
    if INTERPRET and a.dtype != tl.int8:  # numpy multiplies fp16 slowly
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, acc, out_dtype=acc.dtype)


@triton.jit
def _bytes_minus(
    at,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    MINUS: tl.constexpr,
    TIMES: tl.constexpr,
    BOOK: tl.constexpr,
):
    """`field` in int8, MINUS being 0 to 128. A set top bit keeps bytes from borrowing."""
    MOVES: tl.constexpr = ((FIRST, COUNT, TIMES - 1),)
    if COUNT == 8:
        tl.static_assert(MINUS == 128, "codes of 8 bits fit int8 as code - 128")
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [bits(at, MOVES, 0, BOOK)], tl.int8, True, 4
        )
    return tl.inline_asm_elementwise(
        minus_asm(MINUS), "=r,r", [bits(at, MOVES, 0x80, BOOK)], tl.int8, True, 4
    )


@triton.jit
def _bits_plainly(at, MOVES: tl.constexpr, CONSTANT: tl.constexpr, BOOK: tl.constexpr):
    """`bits`, where there is no PTX."""
    LAYOUT_: tl.constexpr = at[LAYOUT]
    total = _joined(at, BOOK)
    out = total * 0 + CONSTANT
    for i in tl.static_range(len(MOVES)):
        out = out | (((total >> MOVES[i][0]) & ((1 << MOVES[i][1]) - 1)) << MOVES[i][2])
    return out.to(tl.int16 if LAYOUT_.unit == 16 else tl.int8)


# Compile-time arithmetic. Triton lets it call methods, but no functions of Python's own.


@triton.constexpr_function
def mantissa(dtype):
    return dtype.fp_mantissa_width


@triton.constexpr_function
def magic(dtype):
    """Bits of 2**mantissa, a number whose last place counts ones."""
    return dtype.exponent_bias + dtype.fp_mantissa_width << dtype.fp_mantissa_width


@triton.constexpr_function
def bias(dtype):
    """The exponent's bias."""
    return dtype.exponent_bias


@triton.constexpr_function
def plane_count(layout):
    return len(layout.segments)


@triton.constexpr_function
def tile_count(layout, plane):
    return layout.tiles(layout.segments[plane])


@triton.constexpr_function
def cut_tiles(layout, plane, cut):
    return layout.cut_tiles(plane, cut)


@triton.constexpr_function
def cut_shift(layout, plane, cut):
    return layout.cut_shift(plane, cut)


@triton.constexpr_function
def grid_count(layout):
    return len(layout.grid)


@triton.constexpr_function
def grid_group(layout, i):
    return layout.grid_groups[i]


@triton.constexpr_function
def new_groups(layout, field):
    return layout.new_groups(field)


@triton.constexpr_function
def new_scale(layout, field):
    return layout.new_scale(field)


@triton.constexpr_function
def scale_count(layout, cut):
    return layout.scale_count(cut)


@triton.constexpr_function
def scale_of(layout, field, cut):
    return field * layout.columns // layout.group if layout.group < layout.granule // cut else 0


@triton.constexpr_function
def table_size(layout, i):
    return layout.table_size(i)


@triton.constexpr_function
def segment_of(layout, plane):
    return layout.segments[plane]


@triton.constexpr_function
def tile_of(layout, i, field, cut):
    return layout.tile_of(i, field, cut)


@triton.constexpr_function
def offset_of(layout, field, plane):
    return layout.offset(field, plane)


@triton.constexpr_function
def in_place(layout, field, first, count, dtype):
    return layout.in_place(field, first, count, dtype.fp_mantissa_width)


@triton.constexpr_function
def bits_asm(layout, field, moves, constant):
    plain = [[getattr(v, "value", v) for v in move] for move in moves]
    return layout.bits_asm(field, plain, constant)


@triton.constexpr_function
def signed_byte(word, i):
    return (int(word) >> 8 * int(i) & 255 ^ 128) - 128


@triton.constexpr_function
def dot4_asm(weights, plus):
    own = f"mov.b32 w, {int(weights)}; mov.b32 p, {int(plus)};"
    return f"{{.reg .b32 w, p; {own} dp4a.u32.s32 $0, $1, w, p;}}"


@triton.constexpr_function
def minus_asm(minus):
    four = int(minus) * 0x01010101
    return f"{{.reg .b32 t; sub.u32 t, $1, {four}; xor.b32 $0, t, 0x80808080;}}"


settle(globals())
