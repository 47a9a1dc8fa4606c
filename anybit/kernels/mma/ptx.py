"""Inline PTX of sm_80: `movmatrix`, and loads that say who writes what they read."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from anybit.kernels.cute.ptx import PAIR, asm, several, slots, width


@dsl_user_op
def transpose(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """An 8x8 matrix of 16-bit numbers in a warp's registers, transposed."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(asm(T.i32(), [Uint32(word)], text, "=r,r", True, {"loc": loc, "ip": ip}))


@dsl_user_op
def thread_again(*, loc: Any = None, ip: Any = None) -> Int32:
    """This thread's number, read here: what is computed from it holds no register before."""
    return Int32(asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", True, {"loc": loc, "ip": ip}))


@dsl_user_op
def load_once(address: Int64, kind: Any = Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """A word that nobody writes while this kernel runs."""
    text = "ld.global.nc.b32 $0, [$1];"
    return several(1, kind, [Int64(address)], text, "l", False, {"loc": loc, "ip": ip})[0]


@dsl_user_op
def prefetch(address: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Have a line come to the L2."""
    text = "prefetch.global.L2 [$0];"
    asm(None, [Int64(address)], text, "l,~{memory}", True, {"loc": loc, "ip": ip})


@dsl_user_op
def load_late(address: Int64, kind: Any = Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """A word that the previous kernel wrote: it stays behind the wait for that kernel."""
    text = "ld.global.b32 $0, [$1];"
    return several(1, kind, [Int64(address)], text, "l", True, {"loc": loc, "ip": ip})[0]


@dsl_user_op
def load_half(address: Int64, dtype: str, *, loc: Any = None, ip: Any = None) -> Float32:
    """An fp16 or bf16 number that the previous kernel may have written, as `load_late`."""
    if dtype == "float16":
        text = "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.f32.f16 $0, h; }"
    else:  # `cvt` from bf16 is sm_90's
        text = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$1]; mov.b32 $0, {z, h}; }"
    return several(1, Float32, [Int64(address)], text, "l", True, {"loc": loc, "ip": ip})[0]


@dsl_user_op
def load_words(address: Int64, n: int, at: int, *, loc: Any = None, ip: Any = None) -> list:
    """1, 2 or 4 consecutive words that nobody writes while this kernel runs."""
    text = f"ld.global.nc{width(n)}.b32 {slots(0, n)}, [${n}+{at}];"
    return several(n, Uint32, [Int64(address)], text, "l", False, {"loc": loc, "ip": ip})


@dsl_user_op
def silu(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x / (1 + exp(-x)); the exponential is off by two units in the last place."""
    text = (
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.f32 e, e; "
        "add.f32 e, e, 0f3F800000; div.rn.f32 $0, $1, e; }"
    )
    return Float32(asm(T.f32(), [Float32(x)], text, "=f,f", False, {"loc": loc, "ip": ip}))


@dsl_user_op
def scale_pair(
    word: Uint32, scale: Float32, dtype: str, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Two fp16 or bf16 numbers times an fp32 number, rounded once."""
    split = {
        "float16": "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; }",
        "bfloat16": "shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000;",
    }[dtype]
    text = (
        f"{{ .reg .f32 a, b; {split} mul.f32 a, a, $2; mul.f32 b, b, $2; "
        f"cvt.rn.{PAIR[dtype]}.f32 $0, b, a; }}"
    )
    args = [Uint32(word), Float32(scale)]
    return Uint32(asm(T.i32(), args, text, "=r,r,f", False, {"loc": loc, "ip": ip}))
