"""Inline PTX of sm_80: `movmatrix`, and loads that say who writes what they read."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from anybit.kernels.cute.ptx import PAIR, asm, slots, width


def transpose(word: Uint32) -> Uint32:
    """An 8x8 matrix of 16-bit numbers in a warp's registers, transposed."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return asm(Uint32, text, Uint32(word))


def thread_again() -> Int32:
    """This thread's number, read here: what is computed from it holds no register before."""
    return asm(Int32, "mov.u32 $0, %tid.x;")


def load_once(address: Int64, kind: Any = Uint32) -> Any:
    """A word that nobody writes while this kernel runs."""
    text = "ld.global.nc.b32 $0, [$1];"
    return asm(kind, text, Int64(address), effects=False)


def prefetch(address: Int64) -> None:
    """Have a line come to the L2."""
    text = "prefetch.global.L2 [$0];"
    asm(None, text, Int64(address), memory=True)


def load_late(address: Int64, kind: Any = Uint32) -> Any:
    """A word that the previous kernel wrote: it stays behind the wait for that kernel."""
    text = "ld.global.b32 $0, [$1];"
    return asm(kind, text, Int64(address))


def load_half(address: Int64, dtype: str) -> Float32:
    """An fp16 or bf16 number that the previous kernel may have written, as `load_late`."""
    if dtype == "float16":
        text = "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.f32.f16 $0, h; }"
    else:  # `cvt` from bf16 is sm_90's
        text = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$1]; mov.b32 $0, {z, h}; }"
    return asm(Float32, text, Int64(address))


def load_words(address: Int64, n: int, at: int) -> list:
    """1, 2 or 4 consecutive words that nobody writes while this kernel runs."""
    text = f"ld.global.nc{width(n)}.b32 {slots(0, n)}, [${n}+{at}];"
    return asm(Uint32, text, Int64(address), count=n, effects=False)


def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)); the exponential is off by two units in the last place."""
    text = (
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.f32 e, e; "
        "add.f32 e, e, 0f3F800000; div.rn.f32 $0, $1, e; }"
    )
    return asm(Float32, text, Float32(x), effects=False)


def scale_pair(word: Uint32, scale: Float32, dtype: str) -> Uint32:
    """Two fp16 or bf16 numbers times an fp32 number, rounded once."""
    split = {
        "float16": "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; }",
        "bfloat16": "shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000;",
    }[dtype]
    text = (
        f"{{ .reg .f32 a, b; {split} mul.f32 a, a, $2; mul.f32 b, b, $2; "
        f"cvt.rn.{PAIR[dtype]}.f32 $0, b, a; }}"
    )
    return asm(Uint32, text, Uint32(word), Float32(scale), effects=False)
