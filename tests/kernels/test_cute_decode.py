"""Packing, fragment order and decoders of the Hopper kernels, thread by thread, without a GPU.

The decoders are the functions that kernels compile; here their registers are numpy arrays that hold
every thread at once.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.format import Format, get_format
from anybit.core.groups import ungroup
from anybit.formats.integer import Integer
from anybit.formats.minifloat import Minifloat
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import K_TILE, MANTISSA, Decoder, decoder, number
from anybit.kernels.cute.lang import Table, Word, planes, tiling
from anybit.kernels.cute.pack import REGISTERS, ROWS, fragment, pack
from anybit.kernels.reference import operand_weight
from tests.needs import pairs
from tests.specs import SPECS

OPERANDS = ("int8", "float16", "bfloat16", "float8_e4m3fn")
TRELLIS = (
    *(f"trellis:bits={bits}" for bits in (1, 3, 4, 5, 6, 7, 8)),
    *(f"trellis:bits={bits},code=pair8" for bits in (1, 2, 3)),
    *(f"trellis:bits={bits},code=look" for bits in (1, 2, 3, 4)),
    "trellis:bits=1,code=mul1",
    "trellis:bits=4,code=3inst",
)
PAIRS = [
    (spec, operand)
    for spec in (
        *SPECS,
        "int4:group=256",
        "fp8:group=128",
        "int8:zero",
        "int8:group=128,zero",
        *TRELLIS,
    )
    for operand in OPERANDS
    if not isinstance(decoder(get_format(spec), operand), str)
]


def unchunk(words: Tensor, bits: int) -> Tensor:
    """The inverse of `chunk`: (row tile, K tile, warpgroup 2, thread 128, half 2, bits)."""
    tiles, k_tiles, _ = words.shape
    flat = words.view(tiles, k_tiles, 2, 128 * 2 * bits)
    whole = 2 * bits // 4
    parts = [flat[..., 512 * i : 512 * (i + 1)].unflatten(-1, (128, 4)) for i in range(whole)]
    if bits % 2:
        parts.append(flat[..., 512 * whole :].unflatten(-1, (128, 2)))
    return torch.cat(parts, -1).unflatten(-1, (2, bits))


def unfragment(f: Tensor, slot: int) -> Tensor:
    """The inverse of `fragment`."""
    e = 32 // slot
    tiles, k_tiles = f.shape[:2]
    codes = f.view(tiles, k_tiles, 2, 4, 8, 4, 2, 8 // e, 2, 2, e)
    codes = codes.permute(0, 2, 3, 9, 4, 1, 6, 7, 8, 5, 10)
    return codes.reshape(tiles * ROWS, k_tiles * K_TILE)


def emulate(blobs: torch.Tensor, d: Decoder) -> torch.Tensor:
    """What the threads of a kernel feed to the matrix unit: (rows, K) fp64."""
    size = 128 * 128 * d.bits // 8
    words = unchunk(blobs[..., :size].contiguous().view(torch.int32), d.bits).numpy()
    tiles, k_tiles = words.shape[:2]
    grid = blobs[..., size:].contiguous().view(torch.int32).numpy().view(np.uint32)
    grid = grid.reshape(tiles, k_tiles, 2, 32, d.entries, d.grid_words)
    t = np.arange(128)
    pair = t // 32 * 8 + t % 32 // 4
    words_of_table = d.table()
    looked_up = [] if words_of_table is None else [Table(words_of_table.numpy().view(np.uint32))]
    out = []
    for half in range(2):
        codes = [Word(words[..., half, i].view(np.uint32).copy()) for i in range(d.bits)]
        first, last = half * d.entries // 2, -(-(half + 1) * d.entries // 2)
        constants = [
            d.constants([Word(grid[:, :, :, pair, e, i].copy()) for i in range(d.grid_words)])
            for e in range(first, last)
        ]
        registers = np.stack([r.bits for r in d.registers(codes, constants, *looked_up)], -1)
        out.append(torch.from_numpy(registers.view(np.int32).copy()))
    bits = torch.stack(out, -2)  # tile, K tile, warpgroup, thread, half, register
    values = bits.view(getattr(torch, d.operand)).to(torch.float64)
    if d.sums:
        row = torch.arange(32) // (32 // d.slot) % 2
        column = 2 * torch.arange(2)[:, None] + torch.arange(32) // 16  # of four WGMMAs
        scales = []
        for e in range(d.entries):
            words = [Word(grid[:, :, :, pair, e, i].copy()) for i in range(d.grid_words)]
            found = [w.bits.view(np.float32) for w in d.scales(words)]
            scales.append(torch.stack([torch.from_numpy(f) for f in found], -1))
        each = torch.stack(scales, -1)  # tile, K tile, warpgroup, thread, row, group
        values = values * each[..., row, column * d.entries // 4]
    return unfragment(values, d.slot)


def columns_of(fmt: Format) -> int:
    """The fewest columns of a weight; two at least."""
    return max(2, fmt.tile[1], *(entry.group for entry in fmt.entries().values()))


@pytest.mark.parametrize(("which", "whole"), pairs(PAIRS, [True, False]))
def test_threads_hold_the_weights(which: tuple[str, str], whole: bool) -> None:
    """In whole K tiles, and where the last has a group of columns."""
    spec, operand = which
    d = decoder(get_format(spec), operand)
    assert isinstance(d, Decoder)
    torch.manual_seed(0)
    fmt = get_format(spec)
    k = 512 if whole else 256 + columns_of(fmt)
    shape = 144, k
    w = torch.randn(shape)
    grid = fmt.fit(w)
    kind = torch.uint8 if fmt.bits <= 8 else torch.int32
    codes = torch.randint(2**fmt.bits, (144, k // fmt.width * fmt.books), dtype=kind)
    if isinstance(fmt, Minifloat) and fmt.bits == 8:  # no NaN, no infinity
        codes = codes & 0x80 | (codes & 0x7F).clamp_max(fmt.largest_code)
    if spec.startswith("liquid"):  # codes that quantization makes: sums stay within a byte
        codes = fmt.encode(w, grid)
    packed = anybit.Packed.from_codes(fmt, shape, codes, grid)

    blobs = pack(packed, d, REGISTERS)
    operands = emulate(blobs, d)[:144]
    assert operands[:, k:].isfinite().all()  # meets zeros
    operands = operands[:, :k]
    got = (operands - d.row_zero(packed)[:, None]) if d.operand == "uint8" else operands
    got = got * d.row_scale(packed)[:, None].double()
    dtype = torch.bfloat16 if d.operand == "bfloat16" else torch.float32
    want = operand_weight(packed, dtype).double()  # few values are no bf16 numbers
    if d.grid_words and d.operand in MANTISSA:
        # One rounding of the scale (if the operand has fewer bits than it), one of a table's
        # number and one of the product; below the smallest normal number the error stops shrinking.
        info = torch.finfo(getattr(torch, d.operand))
        frame = packed.format.frame(packed.grid)
        rounded = (
            1
            + (d.operand == "bfloat16" or frame is not None)
            + bool({"codebook", "table"} & {*packed.grid})
        )
        bound = want.abs() * info.eps / 2 * rounded * 1.005
        if frame is not None and frame.shift is not None:  # each is rounded
            parts = frame.numbers.abs().max() * frame.factor.abs() + frame.shift.abs()
            bound += ungroup(parts[..., None].expand(-1, -1, k // parts.shape[1])) * info.eps / 2
        bound += d.row_scale(packed)[:, None].double() * info.smallest_normal * info.eps
        assert bool(((got - want).abs() <= bound).all())
    elif d.sums and packed.format.row_factor(packed.grid) is not None:  # multiplied in the end
        torch.testing.assert_close(got, want, rtol=2.0**-23, atol=0)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("slot", [8, 16])
def test_fragment_is_a_permutation(slot: int) -> None:
    codes = torch.arange(256 * 256).view(256, 256)
    assert torch.equal(unfragment(fragment(codes, slot), slot), codes)
    # PTX, "wgmma register fragments": thread 5 of warp 2, register 1, first element.
    e = 32 // slot
    held = fragment(codes, slot)[1, 0, 1, 2 * 32 + 5, 0].view(-1, e)
    row, column = 128 + 64 + 2 * 16 + 5 // 4 + 8, (5 % 4) * e
    assert int(held[1, 0]) == row * 256 + column
    assert int(held[2, 0]) == (row - 8) * 256 + column + 4 * e


def test_every_bit_has_one_place() -> None:
    for spec, operand in PAIRS:
        d = decoder(get_format(spec), operand)
        assert isinstance(d, Decoder)
        cut = planes(d.places, d.slot)
        assert sorted(b for plane in cut for b in plane.bits) == list(range(d.bits))
    assert tiling((0, 3), 16) is not None
    assert tiling((0, 1, 2, 6), 16) is None
    assert [len(p.bits) for p in planes((8, 9, 10, 11, 12, 15), 16)] == [4, 2]  # FP6-LLM's 4 + 2


class Mine(Integer):
    """A subclass, as somebody may write it; unregistered."""

    spec = "mine"


def test_a_subclass_of_a_format_keeps_its_decoder() -> None:
    for operand in OPERANDS:
        assert decoder(Mine(4), operand) == decoder(Integer(4), operand)


def test_formats_without_a_decoder_say_why() -> None:
    def refusal(spec: str, operand: str) -> str:
        found = decoder(get_format(spec), operand)
        assert isinstance(found, str)
        return found

    assert refusal("codebook", "float16") == "Codebook has no hopper_decode"
    assert "takes 16, 32, 64 and multiples of 128" in refusal("int4:group=8", "float16")
    assert "takes 32, 64 and multiples of 128" in refusal("nvfp4", "float8_e4m3fn")
    assert "have no decoder to int8" in refusal("mxfp6", "int8")
    assert "no whole ones" in refusal("nf4", "int8")
    assert "2 to 5" in refusal("int8", "float8_e4m3fn")
    assert "zero points of groups cannot" in refusal("int4:group=64,zero", "int8")
    assert "zero points cannot be subtracted" in refusal("int4:group=64,zero", "float8_e4m3fn")


def test_numbers_are_refused_where_they_do_not_fit() -> None:
    def refusal(fmt: Format, operand: str, minus: int = 0, times: int = 1) -> str:
        found = number(fmt, operand, minus, times)
        assert isinstance(found, str)
        return found

    assert "9 bits do not fit into bytes" in refusal(Integer(8), "int8", times=2)
    assert "9 bits do not fit into bfloat16" in refusal(Integer(8), "bfloat16", times=2)
    assert "4 bits minus 8 only" in refusal(Integer(4), "float8_e4m3fn", minus=7)
    assert "one code per weight" in refusal(get_format("sparse"), "float16")
    with pytest.raises(ValueError, match=r"has zero points, so .* leave out minus=8"):
        number(get_format("int4:zero"), "float16", minus=8)


def spread(octaves: int) -> anybit.Packed:
    """mxfp4 whose rows have groups so many powers of two apart; and one without a weight."""
    fmt = get_format("mxfp4")
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, 8 * 2)
    scale = torch.full((128, 8), 120, dtype=torch.uint8)
    scale[:, 3] += octaves
    scale[:, 5], codes[:, 5 * 32 : 6 * 32] = 0, 8  # -0
    return anybit.Packed.from_codes(
        fmt, (128, 256), codes, {"scale": scale.view(torch.float8_e8m0fnu)}
    )


def test_powers_of_two_are_folded_as_far_as_fp8_reaches() -> None:
    d = decoder(get_format("mxfp4"), "float8_e4m3fn")
    assert isinstance(d, Decoder)
    for octaves in range(12):
        packed = spread(octaves)
        got = emulate(pack(packed, d, REGISTERS), d)[:128] * d.row_scale(packed)[:, None].double()
        assert torch.equal(got, packed.dequantize().double())
    with pytest.raises(ValueError, match="more than 11 powers of two apart"):
        pack(spread(12), d, REGISTERS)


def test_a_layer_whose_scales_lie_too_far_apart_is_refused() -> None:
    def refusal(octaves: int, activation: str | None) -> str:
        layer = LayerSpec.of(spread(octaves), activation, torch.bfloat16)
        return operands.refuse_format(layer) or ""

    assert "powers" not in refusal(40, None)
    assert "powers" not in refusal(11, "fp8")
    assert (
        refusal(12, "fp8")
        == "scales of a row are 12 powers of two apart; 11 fit into 8-bit weights"
    )


@pytest.mark.parametrize("spec", ["int4:group=128", "int3:group=64", "nvfp4", "fp8:group=128"])
def test_a_row_of_zeros_is_zeros(spec: str) -> None:
    """Padding of a slice, or a channel that was pruned."""
    packed = anybit.quantize_tensor(torch.randn(16, 256), spec)
    for tensor in packed.tensors().values():
        tensor.view(torch.uint8)[3:4] = 0  # planes are (N, words), scales (N, groups)
    d = decoder(packed.format, "bfloat16")
    assert isinstance(d, Decoder)
    got = emulate(pack(packed, d, REGISTERS), d)[:16, :256] * d.row_scale(packed)[:, None].double()
    assert got[3].count_nonzero() == 0
    assert got.isfinite().all()
