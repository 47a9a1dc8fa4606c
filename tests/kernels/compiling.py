"""Triton kernels compiled for any GPU, in a process of its own: here Triton interprets."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

from anybit.core.scheme import parse_scheme
from tests.forks import CONTEXT

Target = tuple[str, int | str, int]  # backend, architecture, lanes of a warp
HOPPER: Target = ("cuda", 90, 32)


class Job(NamedTuple):
    """A kernel and what is fixed when it is compiled.

    name: Its module in anybit.kernels.triton, and the function. kinds: the types of arguments that
    are no constants. aligned: pointers and strides that are multiples of 16.
    """

    name: str
    kinds: dict[str, str]
    constants: dict[str, Any]
    target: Target = HOPPER
    options: dict[str, Any] = {"num_warps": 4}
    aligned: tuple[str, ...] = ()


class Made(NamedTuple):
    shared: int
    text: str


def process(hip: bool = False) -> ProcessPoolExecutor:
    """Where `built` and `products` run. hip: as torch is built for AMD's GPUs."""
    return ProcessPoolExecutor(1, CONTEXT, initializer=_begin, initargs=(hip,))


def _begin(hip: bool) -> None:
    import torch

    os.environ["TRITON_INTERPRET"] = "0"
    torch.version.hip = "6.4" if hip else None


def function_of(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(import_module(f"anybit.kernels.triton.{module}"), function)


def built(job: Job) -> Made:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = function_of(job.name)
    names = function.arg_names
    constants = {n: value for n, value in job.constants.items() if n in names}
    kinds = job.kinds | dict.fromkeys(constants, "constexpr")
    signature = {n: kinds.get(n, "constexpr") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    known = {
        (names.index(n),): [["tt.divisibility", 16]] for n in job.aligned if n not in constants
    }
    source = ASTSource(function, signature, values, known)
    made = triton.compile(source, target=GPUTarget(*job.target), options=job.options)
    return Made(made.metadata.shared, made.asm["ptx" if job.target[0] == "cuda" else "amdgcn"])


def product(target: Target, scheme: str, folder: str = "") -> Made:
    """The GEMM of a scheme, and for a trellis its encoder. folder: of the format's own module."""
    import torch

    from anybit.kernels.triton import lang, viterbi
    from anybit.kernels.triton.layout import layout_of

    if folder:
        sys.path.insert(0, folder)
        import_module(scheme)
    fmt, activation = parse_scheme(scheme)
    layout = layout_of(fmt, activation)
    decode = lang.jit(type(fmt).triton_decode)
    number = {torch.uint8: "*u8", torch.int8: "*i8", torch.float16: "*fp16", torch.float32: "*fp32"}
    number |= {torch.int16: "*i16", torch.int32: "*i32"}
    kinds: dict[str, Any] = dict.fromkeys(("M", "N", "K", "PADDED", "PIECES", "X_STRIDE"), "i32")
    kinds |= {
        "x": "*i8" if layout.unit == 8 else "*fp16", "scale": "*fp16",
        "words": ({16: "*i16", 8: "*i8"}[layout.unit],) * len(layout.segments)
        if not fmt.window else ("*i32",),
        "grid": tuple(number[entry.default_dtype] for _, entry in layout.grid),
        "y": "*fp16", "partial": "*fp32", "locks": "*i32", "SPLIT": "i32",
    }  # fmt: skip
    constants = {
        "LAYOUT": layout, "DECODE": decode, "MODE": layout.scale_mode,
        "EVEN_K": True, "TOKENS": 16, "ROWS": 64, "SHARED": False, "CUT": 1, "STEPS": 1,
        "STAGES": 2, "BAND": 8,
    }  # fmt: skip
    if activation:
        kinds |= {"x_scale": "*fp32", "bias": "*fp32", "pairs": "*i32"}
    else:
        constants |= {"x_scale": None, "bias": None, "pairs": None}
    if fmt.window:
        given = dict.fromkeys(("FIRST", "COUNT", "KEPT", "ZERO"), "i32")
        given |= {"x": "*fp32", "ends": "*i32", "back": "*i16"}
        given |= {"vectors": "*fp32", "which": "*i16"}
        fixed = {"PINNED": True, "LAYOUT": layout, "DECODE": decode, "STATE": fmt.window}
        fixed |= {"STEPS": 256 // fmt.width, "WIDTH": fmt.width, "BITS": fmt.bits}
        name, options = "viterbi._forward", {"num_warps": viterbi.warps(fmt)}
        vectors = viterbi.distinct(fmt.table())[0] if fmt.width > 1 else None
        if vectors is not None:
            fixed["VECTORS"] = vectors.shape[1]
            name, options = "viterbi._forward_looked_up", {"num_warps": viterbi.LOOKED_UP_WARPS}
        built(Job(name, given, fixed, target, options))
    return built(Job("gemm.gemm", kinds, constants, target))
