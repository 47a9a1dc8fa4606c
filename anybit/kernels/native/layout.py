"""From the stored planes of a weight to the layout of `decode`, as fast as memory is written."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.planes import segments, words
from anybit.kernels.native import build, ir, memory
from anybit.kernels.native.decode import place, vectors
from anybit.kernels.native.ir import I8, I16, I32, Function, vec
from anybit.kernels.native.isa import Isa
from anybit.kernels.native.operand import BAND, BLOCK, RUN, laid

NAMES = ("next", "from", "to", "n", "chunk", "row", "left", "span", "step", "blocks")
BAND_NAMES = ("next", "from", "to", "n", "bands", "row", "words", "span", "step", "blocks")
CHUNK = 16  # rows that a thread takes at once


def lay_out(planes: tuple[Tensor, ...], bits: int, k: int, isa: Isa) -> Tensor:
    """Codes of a weight in blocks.

    Args:
        planes: of `Packed`, (N, words) int32 each.
        bits: of a code.
        k: codes in a row.
        isa: what the processor can do.

    Returns:
        (N, bytes of a row) uint8; codes beyond K are 0.
    """
    (blocks, tail), widths = divmod(laid(k), BLOCK), segments(bits)
    n, step = len(planes[0]), BLOCK * bits // 8
    span = blocks * step + 64 * sum(vectors(width, tail) for width in widths)
    out = memory.empty(n, span)
    for first, count, codes in ((0, blocks, BLOCK), (blocks, 1, tail)):
        to = out.data_ptr() + first * step
        for plane, width in zip(planes, widths, strict=True):
            many = vectors(width, codes)
            plane, skip = plane.contiguous(), first * 64 * width
            row = 4 * words(k, width)
            if count and codes:
                kernel(width, many, isa)(
                    (0, plane.data_ptr() + skip, to, n, CHUNK, row, row - skip, span, step, count),
                    torch.get_num_threads(),
                )
            to += 64 * many
    return out


@cache
def kernel(width: int, many: int, isa: Isa) -> build.Kernel:
    """What moves one plane of `width` bits, `many` vectors of each block."""
    f = Function("lay_out", NAMES, isa)
    size = 64 * many  # bytes of the plane in a block
    row, blocks = f.number("row"), f.number("blocks")
    zeros = f.allocate(I8, size)
    with (
        f.chunks(f.number("chunk"), f.number("n")) as (first, last),
        f.loop(first, last) as r,
        f.loop(0, blocks) as b,
    ):
        source = f.at("from", r * row + b * size)
        target = f.at("to", r * f.number("span") + b * f.number("step"))
        left = f.number("left") - b * size
        with f.when(left < size):  # a part of a block
            with f.loop(0, size) as i:
                f.store(f.zero(I8), zeros, i)
            with f.loop(0, left) as i:
                f.store(f.load(I8, source, i), zeros, i)
        whole = left >= size
        source = whole.select(source, zeros)
        for v in range(many):
            _vector(f, f.at(source, 64 * v), f.at(target, 64 * v), width)
    return build.kernel(f)


def _vector(f: Function, source: ir.Value, target: ir.Value, width: int) -> None:
    """64 bytes of codes in their order -> runs of 32 in the lanes of 16-bit words."""
    total, kind = None, vec(RUN, I16)
    per = 8 // width  # codes in a byte
    down = ", ".join(f"i16 {i % per * width}" for i in range(RUN))
    for run in range(16 // width):
        some = f.load(vec(RUN // per, I8), source, run * RUN // per)
        codes = some.pick([i // per for i in range(RUN)]).cast("zext", kind)
        if per > 1:
            codes = f.emit(f"lshr {kind} {codes.text}, <{down}>", kind) & ((1 << width) - 1)
        codes = codes << place(run, width)
        total = codes if total is None else total | codes
    assert total is not None
    f.store(total, target)


def lay_out_bands(planes: tuple[Tensor, ...], bits: int, k: int, isa: Isa) -> Tensor:
    """Codes of a weight in bands: as `lay_out`, (N / 16, bytes of a band) uint8.

    Rows beyond N are anything.
    """
    blocks, step, at = laid(k) // RUN, BLOCK * bits // 8, 0
    n, bands = len(planes[0]), -(-len(planes[0]) // BAND)
    out = memory.empty(bands, blocks * step)
    for plane, width in zip(planes, segments(bits), strict=True):
        plane, count = plane.contiguous(), words(k, width)
        to = out.data_ptr() + at
        if n:
            band_kernel(width, isa)(
                (0, plane.data_ptr(), to, n, bands, 4 * count, count, blocks * step, step, blocks),
                torch.get_num_threads(),
            )
        at += 64 * width
    return out


@cache
def band_kernel(width: int, isa: Isa) -> build.Kernel:
    """What moves one plane of `width` bits. A word of it holds columns of a row: it is a lane."""
    f = Function("lay_out_bands", BAND_NAMES, isa)
    last_row, count = f.number("n") - 1, f.number("words")
    kind, mask = vec(BAND, I32), (1 << width) - 1
    with (
        f.chunks(1, f.number("bands")) as (band, _),
        f.loop(0, f.number("blocks")) as b,
    ):
        rows = [(band * BAND + r).smaller(last_row) * f.number("row") for r in range(BAND)]
        target = f.at("to", band * f.number("span") + b * f.number("step"))
        for v in range(width):
            i = b * width + v
            there = i < count
            word_at = there.select(i, count - 1) << 2
            lanes = f.zero(kind)
            for r, row in enumerate(rows):
                word = f.load(I32, "from", row + word_at)
                lanes = f.emit(f"insertelement {kind} {lanes.text}, i32 {word.text}, i32 {r}", kind)
            total = f.zero(kind)
            for column in range(32 // width):
                code = (lanes >> (column * width)) & mask
                total = total | code << 16 * (column % 2) + place(column // 2, width)
            f.store(there.select(total, f.zero(kind)), target, 64 * v)
    return build.kernel(f)
