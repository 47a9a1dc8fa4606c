"""CPU kernels for any format, compiled by LLVM for the processor at hand.

Weights stay as many bits as they are stored in. Up to `FEW` activations are multiplied by rows
that are decoded in registers; more by tiles that are decoded into the cache. bf16 activations are
multiplied in bf16 where the processor can, the others in fp32, and int8 ones in integers, exactly.

With many activations, weights in groups are rounded to the activation's dtype after their scale is
applied, as in a checkpoint of that dtype.
"""

import logging
import platform
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.kernels import reference
from anybit.kernels.backend import Activations, Backend, LayerSpec, Prepared
from anybit.kernels.native import activations, build, gemm, gemv, memory
from anybit.kernels.native import table as probing
from anybit.kernels.native.decode import Codes, Table, Vectors
from anybit.kernels.native.isa import Isa, isa, levels, why_none
from anybit.kernels.native.layout import lay_out, lay_out_bands
from anybit.kernels.native.operand import BAND, BLOCK, RUN, Operand, laid
from anybit.kernels.native.rows import Signed
from anybit.kernels.native.steps import Coded, Steps
from anybit.kernels.registry import get_backend

log = logging.getLogger(__name__)

FIXED = ("fixed", "split")  # kinds of operands whose tokens are in 16 bits of fixed point
FEW = 4  # activations that are multiplied by registers
MANY = 512  # activations whose sums fit into the cache beside a tile
LARGEST_K = 1 << 16  # products of two bytes add up to less than 2**31
SERIAL = 1 << 18  # products that one thread makes sooner than two would be woken
SECTION = 1 << 10  # bytes of a table
WHOLE = probing.Facts(8, -128, whole=1)  # whole numbers from -128 on, a scale a row
SECTIONS = (  # kinds of operands, dtypes of activations
    ("bf16", torch.bfloat16),
    ("fp32", torch.bfloat16),
    ("fp32", torch.float16),
    ("fp32", torch.float32),
)


def refuse(layer: LayerSpec) -> str | None:
    if not levels():
        return (
            "compiles kernels for 64-bit x86, and 64-bit Arm on Linux and macOS; this process has "
            f"{sys.maxsize.bit_length() + 1} bits on {platform.machine()}, {sys.platform}"
        )
    if isa() is None:
        return why_none()
    if build.parallel() is None:
        return "found no OpenMP with GNU's functions in torch/lib: install torch's wheel"
    k = layer.shape[1]
    if layer.activation == "int8" and k > LARGEST_K:
        return f"K={k}: products of int8 are summed in 32 bits up to K={LARGEST_K}"
    return _refuse_format(layer.format, k)


@cache
def _refuse_format(fmt: Format, k: int) -> str | None:
    if fmt.window:
        reason = "a weight depends on neighbouring codes, which its tables of values cannot express"
        return reason if fmt.hashed is None else None
    vectors = _is_vectors(fmt)
    if vectors and (fmt.width > RUN or RUN % fmt.width):
        return f"vectors of {fmt.width} weights do not lie on borders of {RUN}"
    if fmt.bits > 8 and not vectors:
        return "its codes have more than 8 bits"
    w = torch.randn(2, k, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    grid = fmt.fit(w)
    try:
        found = probing.probe(Packed.from_codes(fmt, (2, k), fmt.encode(w, grid), grid))
    except probing.NoTable as error:
        return str(error)
    if found.group and -(-laid(k) // found.group) > gemv.MOST_GROUPS:
        return f"K={k} has more than {gemv.MOST_GROUPS} groups of {found.group}"
    return None


def prepare(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None = None,
    decoded: bool = False,
) -> Prepared:
    """Facts for the kernels, codes in blocks, scales, offsets, row scales, and tables.

    A weight whose grid is unlike what the format makes itself may be no table; another backend's
    layout follows no facts then.
    """
    level = isa()
    assert level is not None
    fmt, (_, k) = packed.format, packed.shape
    if fmt.hashed:
        row, (words,) = packed.grid["scale"].float().flatten(), fmt.tables().values()
        none = torch.empty(0, dtype=torch.float16)
        codes, words = Steps(fmt.hashed).lay_out(packed), Steps.stored(words)
        layout = torch.tensor(WHOLE), codes, none, none, row, words
        return Prepared(fmt, packed.shape, activation, layout, dtype)
    try:
        table = probing.probe(packed)
    except probing.NoTable as error:
        log.warning("%s: the CPU kernels do not multiply such a weight: %s", fmt.spec, error)
        other = _other(decoded).prepare(packed, activation, dtype, decoded)
        return other._replace(layout=(torch.tensor([int(decoded)]), *other.layout))
    more, banded = -(-laid(k) // table.group) if table.group else 0, _is_banded(fmt, level)
    facts, fine = table.facts(fmt.bits), table.fine if banded else None
    scales, offsets = (_padded(t, more, banded) for t in (table.scale, table.offset))
    if fine is not None:
        facts = facts._replace(wide=fine.step.shape[1] // fine.d.shape[1])
        scales = _products(fine.d, fine.step)
        if fine.base is not None and fine.low is not None:
            offsets = _products(-fine.base, fine.low)
    layout = (
        torch.tensor(facts),
        _laid_out(packed, table, level),
        memory.placed(scales),
        memory.placed(offsets),
        table.row.contiguous(),
        _tables(table, fmt.bits, level),
    )
    return Prepared(fmt, packed.shape, activation, layout, dtype)


def _other(decoded: bool) -> Backend:
    """What multiplies a weight that is no table."""
    return get_backend("dense" if decoded else "reference")


def _padded(numbers: Tensor | None, groups: int, banded: bool) -> Tensor:
    """Whole blocks of groups, and numbers behind the last that a vector may touch.

    Of bands (bands, groups, BAND).
    """
    if numbers is None:
        return torch.empty(0, dtype=torch.float16)
    numbers = pad(numbers, (0, groups - numbers.shape[1]))
    if banded:
        numbers = pad(numbers, (0, 0, 0, -len(numbers) % BAND)).view(-1, BAND, groups)
        return numbers.transpose(1, 2).contiguous()
    return pad(numbers.flatten(), (0, 16))


def _products(d: Tensor, step: Tensor) -> Tensor:
    """fp16 (N, blocks) and whole numbers (N, groups) of bands: of each block 16 d, then steps."""
    more, blocks = (0, 0, 0, -len(d) % BAND), d.shape[1]
    halves = pad(d, more).view(-1, BAND, blocks).transpose(1, 2).contiguous()
    steps = pad(step.to(torch.int8), more).view(-1, BAND, step.shape[1]).transpose(1, 2)
    parts = halves.view(torch.int8), steps.reshape(*halves.shape[:2], -1)
    return torch.cat(parts, -1)


def _is_banded(fmt: Format, level: Isa) -> bool:
    """Whether rows of this format's weights lie in the lanes of vectors."""
    return not (level.arm or fmt.hashed or fmt.rows is not None or _is_vectors(fmt))


def _is_vectors(fmt: Format) -> bool:
    """Whether codes stand for several weights, or are added up."""
    return fmt.width > 1 or fmt.books > 1


def _laid_out(packed: Packed, table: probing.Table, level: Isa) -> Tensor:
    """Codes in blocks; of vectors (N, codes of whole blocks), one after the other."""
    fmt, k = packed.format, packed.shape[1]
    if table.rows is not None:
        return _signed(fmt, table.facts(fmt.bits)).lay_out(table.rows, -(-k // BLOCK))
    if not _is_vectors(fmt):
        return (lay_out_bands if _is_banded(fmt, level) else lay_out)(
            packed.planes, fmt.bits, k, level
        )
    codes = packed.codes()
    if fmt.bits > 8:
        codes = codes.to(torch.uint16).view(torch.int16)
    return pad(codes, (0, fmt.code_count(laid(k)) - codes.shape[1]))


def _tables(table: probing.Table, bits: int, level: Isa) -> Tensor:
    """The table as the kernels load it: for bf16 products, then for fp32 ones of each dtype.

    Vectors stay fp32 alone, since they are rounded after they are added up.
    """
    values = table.values
    if values.dim() == 2:
        return Signed.stored(values)
    if values.dim() > 1:
        return values.contiguous()
    out = torch.zeros(len(SECTIONS) * SECTION, dtype=torch.uint8)
    for i, (kind, dtype) in enumerate(SECTIONS):
        codes = _codes(table.facts(bits), dtype)
        some = Table.stored(codes, Operand(kind, level), values.to(dtype))
        out[i * SECTION : i * SECTION + len(some)] = some
    return out


def _signed(fmt: Format, facts: probing.Facts) -> Signed:
    """Codes that are rows of a table."""
    return Signed(facts.bits, fmt.width, bool(facts.signed))


def _codes(facts: probing.Facts, dtype: torch.dtype) -> Codes:
    """Codes of one weight each, multiplied with activations of this dtype."""
    first, half = (None if x == probing.NONE else x for x in (facts.first, facts.half))
    short = bool(facts.short) or dtype == torch.bfloat16
    return Codes(facts.bits, first, bool(facts.signed), short, half)


class Product(NamedTuple):
    """How a layer multiplies a number of activations.

    Attributes:
        operand: what is multiplied.
        tokens: activations that lie side by side.
        sums: columns whose sums the kernel asks for; see `activations.Packing`.
        kernel: of `gemv`, or of `gemm` where there is a decoder.
        decoder: the address of what decodes tiles for it, or 0.
        table: bytes before its table.
        shift: of codes, where they are whole numbers from there on.
        bands: of a strip.
    """

    operand: Operand
    tokens: int
    sums: int | None
    kernel: build.Kernel
    decoder: int
    table: int
    shift: int
    bands: int = 0


@cache
def _product(
    fmt: Format,
    facts: probing.Facts,
    activation: str | None,
    dtype: torch.dtype,
    level: Isa,
    m: int,
    tail: int,
    bands: int,
) -> Product:
    """What multiplies up to m <= FEW activations, or more than that.

    tail: as in `gemv.Few`. bands: of a strip, as in `gemm.product`.
    """
    bits, group, wide, form = facts.bits, facts.group, facts.wide, probing.FORMS[facts.form]
    vectors = _is_vectors(fmt)
    tokens = FEW + 1 if vectors and fmt.hashed is None else m
    operand = _operand(facts, activation, dtype, level, tokens, _is_banded(fmt, level))
    one = _codes(facts, dtype)
    codes: Coded = one
    table = 0
    if fmt.hashed:
        codes = Steps(fmt.hashed)
    elif fmt.rows is not None:
        codes = _signed(fmt, facts)
        table = codes.offset(operand)
    elif vectors:
        codes = Vectors(bits, fmt.width, fmt.books, dtype == torch.float16)
    quantized = activation is not None or operand.kind in FIXED
    to = activations.DTYPES[dtype]
    if not operand.integer and not vectors:
        table = SECTION * SECTIONS.index((operand.kind, dtype))
    shift = one.first or 0
    if operand.kind == "s8" and bits == 8:
        shift += 128
    if m <= FEW:
        asked = form or (operand.kind == "split" and one.first)
        size = operand.span(group) if operand.banded else group
        sums = size if asked else 0 if operand.whole else None
        few = gemv.Few(codes, operand, group, form, m, to, quantized, wide, tail)
        kernel = gemv.kernel(few)
        return Product(operand, 1 if operand.banded else m, sums, kernel, 0, table, shift)
    if group:
        shift = -128 if operand.kind == "u8" else 0
    decoder = gemm.decoder(gemm.Tile(codes, operand, group, form, wide, tail))
    sums = 0 if operand.whole else None
    kernel = gemm.product(operand, to, quantized, bands)
    tokens = 1 if operand.banded else gemm.TOKENS
    return Product(operand, tokens, sums, kernel, decoder.address, table, shift, bands)


def _operand(
    facts: probing.Facts,
    activation: str | None,
    dtype: torch.dtype,
    level: Isa,
    m: int,
    banded: bool,
) -> Operand:
    """What is multiplied with m tokens: whole numbers, or numbers of the activation's dtype."""
    if activation == "int8" and facts.whole:
        # Groups have no shift, which makes up for codes of 8 bits that are 128 less.
        fits = (banded or facts.group % 64 == 0) and not (
            level.byte_operand == "s8" and facts.group and facts.bits == 8
        )
        return Operand(level.byte_operand if level.byte_operand and fits else "i16", level, banded)
    if dtype != torch.bfloat16:
        return Operand("fp32", level, banded)
    if m <= FEW and facts.first != probing.NONE and activation is None and not level.arm:
        # Bytes twice are sooner multiplied than 16 bits, if there are registers for both sums.
        split = banded and level.byte_operand and (m <= 2 or level.bits == 512)
        return Operand("split" if split else "fixed", level, banded)
    return Operand("bf16" if level.bf16 else "fp32", level, banded)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N)."""
    numbers = prepared.layout[0].tolist()
    if len(numbers) == 1:
        own = prepared._replace(layout=prepared.layout[1:])
        return _other(bool(numbers[0])).linear(x, own, bias)
    facts = probing.Facts(*numbers)
    if x.dtype == torch.float64:  # sums are those of fp32
        few = x._replace(dtype=torch.float32) if isinstance(x, Activations) else x.float()
        return linear(few, prepared, bias).double()
    level = isa()
    assert level is not None
    tokens, scale = _numbers(x, prepared.activation, level)
    m, n = len(tokens), prepared.shape[0]
    banded = _is_banded(prepared.format, level)
    y = torch.empty(m, n, dtype=x.dtype)
    offset = _zeros(n) if bias is None else bias.float().contiguous()
    for part in range(0, m, MANY):
        rows = slice(part, part + MANY)
        count = (1, 1, 2, 4, 4)[m - part] if m - part <= FEW else FEW + 1
        tail = 0 if banded else laid(prepared.shape[1]) % BLOCK
        bands = gemm.bands(level, n, torch.get_num_threads()) if banded and count > FEW else 0
        how = prepared.format, facts, prepared.activation, x.dtype, level, count, tail, bands
        token_scale = None if scale is None else scale[rows]
        _multiply(tokens[rows], token_scale, prepared, _product(*how), offset, y[rows])
    return y


def _numbers(
    given: Tensor | Activations, activation: str | None, level: Isa
) -> tuple[Tensor, Tensor | None]:
    """Activations as the kernels take them, and the scale (M,) of quantized ones."""
    if isinstance(given, Activations):
        x, scale = given.codes, given.scale.contiguous()
    elif activation is None:
        x, scale = given, None
    elif activation == "int8":
        return activations.quantize(given if given.stride(-1) == 1 else given.contiguous(), level)
    else:
        x, scale = reference.quantize_tokens(given, activation)
        scale = scale[:, 0].contiguous()
    if x.dtype == torch.float8_e4m3fn:
        x = x.to(torch.bfloat16)  # exact
    return x if x.stride(-1) == 1 else x.contiguous(), scale


@cache
def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float32)


def _multiply(
    x: Tensor,
    scale: Tensor | None,
    prepared: Prepared,
    product: Product,
    bias: Tensor,
    y: Tensor,
) -> None:
    """y = x W^T + bias, of few or many activations."""
    operand, (_, w, scales, offsets, row, tables) = product.operand, prepared.layout
    (m, k), n = x.shape, prepared.shape[0]
    blocks, tail = divmod(laid(k), RUN if operand.banded else BLOCK)
    threads = torch.get_num_threads() if m * n * k > SERIAL else 1
    if operand.kind in FIXED:
        x, scale = activations.fixed(x, operand.isa)
    ready = operand.kind in ("bf16", "fixed") and product.tokens == 1 and k == laid(k)
    ready = ready and x.dtype in (torch.bfloat16, torch.int16) and x.is_contiguous()
    if ready and product.sums is None:
        xs, xsum = x, None
    else:
        xs, xsum = activations.pack(x, operand, product.tokens, product.sums)
    values = {
        "w": w.data_ptr(),
        "table": tables.data_ptr() + product.table,
        "scale": scales.data_ptr(),
        "offset": offsets.data_ptr(),
        "row": row.data_ptr(),
        "bias": bias.data_ptr(),
        "x": xs.data_ptr(),
        "xsum": build.pointer(xsum),
        "xscale": build.pointer(scale),
        "y": y.data_ptr(),
        "n": n,
        "blocks": blocks,
        "m": m,
        "shift": product.shift,
    }
    names: tuple[str, ...] = gemv.NAMES
    if product.decoder:
        names, blocks = gemm.NAMES, blocks + (tail > 0)
        values |= {"blocks": blocks, "vectors": laid(k) // operand.codes * operand.vectors}
        values |= _strips(product, m, n, blocks, threads)
    else:
        many = -(-n // BAND) if operand.banded else n
        values["chunk"] = max(1 if operand.banded else 4, min(256, many // (8 * threads)))
    product.kernel([values.get(name, 0) for name in names], threads)


def _strips(product: Product, m: int, n: int, blocks: int, threads: int) -> dict[str, int]:
    """Into which strips and parts `gemm` cuts a weight of n rows and so many blocks."""
    operand = product.operand
    most, strip = gemm.PART, gemm.STRIP if n >= 3 * threads * gemm.STRIP else gemm.STRIP // 4
    if operand.banded:
        most, strip = gemm.BAND_PART // RUN, product.bands * BAND
    part = -(-blocks // -(-blocks * operand.itemsize // most))
    room = gemm.room(operand, strip, part, m)
    scratch = build.workspace(room * threads).data_ptr()
    return {
        "strip": strip,
        "part": part,
        "decode": product.decoder,
        "scratch": scratch,
        "room": room,
    }
