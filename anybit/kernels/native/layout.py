"""From the stored planes of a weight to the layout of `decode`, as fast as memory is written."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.planes import segments, words
from anybit.kernels.native import build, ir, memory
from anybit.kernels.native.decode import place
from anybit.kernels.native.ir import I8, I16, PTR, Arguments, Function, vec
from anybit.kernels.native.isa import Isa
from anybit.kernels.native.operand import BLOCK, RUN

NAMES = ("next", "from", "to", "n", "chunk", "row", "step", "blocks")
CHUNK = 16  # rows that a thread takes at once


def blocks_of(k: int) -> int:
    """Blocks that hold K codes."""
    return -(-k // BLOCK)


def lay_out(planes: tuple[Tensor, ...], bits: int, k: int, isa: Isa) -> Tensor:
    """Codes of a weight in blocks.

    Args:
        planes: of `Packed`, (N, words) int32 each.
        bits: of a code.
        k: codes in a row.
        isa: what the processor can do.

    Returns:
        (N, blocks * 64 * bits) uint8; codes beyond K are 0.
    """
    n, blocks = len(planes[0]), blocks_of(k)
    step = BLOCK * bits // 8
    out = memory.empty(n, blocks * step)
    at = 0
    for plane, width in zip(planes, segments(bits), strict=True):
        plane = plane.contiguous()
        kernel(width, isa)(
            (0, plane.data_ptr(), out.data_ptr() + at, n, CHUNK, 4 * words(k, width), step, blocks),
            torch.get_num_threads(),
        )
        at += BLOCK * width // 8
    return out


@cache
def kernel(width: int, isa: Isa) -> build.Kernel:
    """What moves one plane of `width` bits."""
    f = Function("lay_out", [PTR])
    args = Arguments(f, NAMES)
    size = BLOCK * width // 8  # bytes of the plane in a block
    row, blocks = args.number("row"), args.number("blocks")
    zeros = f.allocate(I8, size)
    with (
        f.chunks(args.address("next"), args.number("chunk"), args.number("n")) as (first, last),
        f.loop(first, last) as r,
        f.loop(0, blocks) as b,
    ):
        source = f.at(args.pointer("from"), r * row + b * size)
        target = f.at(args.pointer("to"), (r * blocks + b) * args.number("step"))
        left = row - b * size
        with f.when(f.compare("slt", left, f.integer(size))):  # a part of a block
            with f.loop(0, size) as i:
                f.store(f.zero(I8), zeros, i)
            with f.loop(0, left) as i:
                f.store(f.load(I8, source, i), zeros, i)
        whole = f.compare("sge", left, f.integer(size))
        source = f.select(whole, source, zeros)
        for v in range(width):
            _vector(f, f.at(source, 64 * v), f.at(target, 64 * v), width)
    f.give()
    return build.load(ir.module([f]), [f.name], isa)[0]


def _vector(f: Function, source: ir.Value, target: ir.Value, width: int) -> None:
    """64 bytes of codes in their order -> runs of 32 in the lanes of 16-bit words."""
    total, kind = None, vec(RUN, I16)
    per = 8 // width  # codes in a byte
    down = ", ".join(f"i16 {i % per * width}" for i in range(RUN))
    for run in range(16 // width):
        some = f.load(vec(RUN // per, I8), source, run * RUN // per)
        codes = f.cast("zext", f.shuffle(some, some, [i // per for i in range(RUN)]), kind)
        if per > 1:
            codes = f.emit(f"lshr {kind} {codes.text}, <{down}>", kind) & ((1 << width) - 1)
        codes = codes << place(run, width)
        total = codes if total is None else total | codes
    assert total is not None
    f.store(total, target)
