"""CPU kernels for any format, compiled by LLVM for the processor at hand.

Weights stay as many bits as they are stored in. Up to `FEW` activations are multiplied by rows
that are decoded in registers; more by tiles that are decoded into the cache. bf16 activations are
multiplied in bf16 where the processor can, the others in fp32, and int8 ones in integers, exactly.

With many activations, weights in groups are rounded to the activation's dtype after their scale is
applied, as in a checkpoint of that dtype.
"""

import logging
import threading
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.kernels import dense, reference
from anybit.kernels.backend import Activations, Backend, LayerSpec, Prepared
from anybit.kernels.native import activations, build, fused, gemm, gemv
from anybit.kernels.native import table as probing
from anybit.kernels.native.decode import BLOCK, RUN, Codes, Operand, Table, Vectors
from anybit.kernels.native.isa import Isa, isa
from anybit.kernels.native.layout import blocks_of, lay_out

log = logging.getLogger(__name__)

own_layout = True

FEW = 4  # activations that are multiplied by registers
MANY = 512  # activations whose sums fit into the cache beside a tile
FORMS = ("", "plain", "scaled")
NONE = 1 << 20  # of a number that a layout lacks
LARGEST_K = 1 << 16  # products of two bytes add up to less than 2**31
SECTION = 1 << 10  # bytes of a table
SECTIONS = (torch.bfloat16, torch.float16, torch.float32)  # after bf16 numbers: fp32 of each dtype


def refuse(layer: LayerSpec) -> str | None:
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed: pip install 'anybit[cpu]'"
    if isa() is None:
        return "the processor has no AVX2, or ONEDNN_MAX_CPU_ISA forbids it"
    if build.parallel() is None:
        return "torch here does not run on GNU's OpenMP, whose threads the kernels share"
    return _refuse_format(layer.format, layer.shape[1])


@cache
def _refuse_format(fmt: Format, k: int) -> str | None:
    vectors = _is_vectors(fmt)
    if vectors and (fmt.width > RUN or RUN % fmt.width):
        return f"vectors of {fmt.width} weights do not lie on borders of {RUN}"
    if fmt.bits > 8 and not vectors:
        return "its codes have more than 8 bits"
    if k > LARGEST_K:
        return f"K={k} is larger than {LARGEST_K}"
    w = torch.randn(2, k, generator=torch.Generator().manual_seed(0))
    grid = fmt.fit(w)
    try:
        probing.probe(Packed.from_codes(fmt, (2, k), fmt.encode(w, grid), grid))
    except probing.NoTable as error:
        return str(error)
    return None


def decodes(activation: str | None) -> bool:
    return False


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
    try:
        table = probing.probe(packed)
    except probing.NoTable as error:
        log.warning("%s: the CPU kernels do not multiply such a weight: %s", fmt.spec, error)
        other = _other(decoded).prepare(packed, activation, dtype, decoded)
        return other._replace(layout=(torch.tensor([int(decoded)]), *other.layout))
    none = NONE if table.first is None else table.first
    facts = [fmt.bits, none, table.group, FORMS.index(table.form), int(table.whole)]
    more = blocks_of(k) * BLOCK // table.group if table.group else 0
    layout = (
        torch.tensor(facts),
        _vector_codes(packed) if _is_vectors(fmt) else lay_out(packed.planes, fmt.bits, k, level),
        _padded(table.scale, more),
        _padded(table.offset, more),
        table.row.contiguous(),
        _tables(table, fmt.bits, level),
    )
    return Prepared(fmt, packed.shape, activation, layout, dtype)


def _other(decoded: bool) -> Backend:
    """What multiplies a weight that is no table."""
    return dense if decoded else reference


def _padded(numbers: Tensor | None, groups: int) -> Tensor:
    """Whole blocks of groups, and numbers behind the last that a vector may touch."""
    if numbers is None:
        return torch.empty(0, dtype=torch.float16)
    numbers = pad(numbers, (0, groups - numbers.shape[1])).flatten()
    return pad(numbers, (0, 16))


def _is_vectors(fmt: Format) -> bool:
    """Whether codes stand for several weights, or are added up."""
    return fmt.width > 1 or fmt.books > 1


def _vector_codes(packed: Packed) -> Tensor:
    """Codes (N, codes of whole blocks), one after the other."""
    fmt, k = packed.format, packed.shape[1]
    codes = packed.codes()
    if fmt.bits > 8:
        codes = codes.to(torch.uint16).view(torch.int16)
    return pad(codes, (0, fmt.code_count(blocks_of(k) * BLOCK) - codes.shape[1]))


def _tables(table: probing.Table, bits: int, level: Isa) -> Tensor:
    """The table as the kernels load it: bf16, then fp32 for each dtype of activations.

    Vectors stay fp32 alone, since they are rounded after they are added up.
    """
    values = table.values
    if values.dim() > 1:
        return values.contiguous()
    codes = Codes(bits, table.first)
    out = torch.zeros((1 + len(SECTIONS)) * SECTION, dtype=torch.uint8)
    shuffled = values[torch.tensor(codes.permuted())]
    repeat = max(1, 32 // len(values))
    half = shuffled.to(torch.bfloat16).repeat(repeat).view(torch.uint8)
    out[: len(half)] = half
    looked_up = Table.looked_up(codes, Operand("fp32", level))
    for i, dtype in enumerate(SECTIONS, 1):
        single = (shuffled if looked_up else values).to(dtype).float().repeat(repeat)
        out[i * SECTION : i * SECTION + single.nbytes] = single.view(torch.uint8)
    return out


def _operand(facts: list[int], dtype: torch.dtype, activation: str | None) -> Operand:
    """What is multiplied: whole numbers, or numbers of the activation's dtype."""
    level = isa()
    assert level is not None
    _, _, group, _, whole = facts
    if activation == "int8" and whole:
        return Operand("u8" if level.vnni and group % 64 == 0 else "i16", level)
    return Operand("bf16" if level.bf16 and dtype == torch.bfloat16 else "fp32", level)


def linear(x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N)."""
    facts = prepared.layout[0].tolist()
    if len(facts) == 1:
        own = prepared._replace(layout=prepared.layout[1:])
        return _other(bool(facts[0])).linear(x, own, bias)
    numbers, scale = _numbers(x, prepared.activation)
    operand = _operand(facts, x.dtype, prepared.activation)
    y = numbers.new_empty(
        len(numbers), prepared.shape[0], dtype=torch.float32 if scale is not None else x.dtype
    )
    if not len(numbers):
        return y.to(x.dtype)
    inside = scale is None or operand.whole  # whether the kernel scales and adds the bias
    offset = _zeros(prepared.shape[0]) if bias is None or not inside else bias.float().contiguous()
    size = FEW if len(numbers) <= FEW else MANY
    for part in range(0, len(numbers), size):
        rows = slice(part, part + size)
        token_scale = scale[rows].contiguous() if scale is not None and operand.whole else None
        _multiply(numbers[rows], token_scale, prepared, facts, operand, x.dtype, offset, y[rows])
    if scale is not None and not operand.whole:
        y *= scale[:, None]
        if bias is not None:
            y += bias.float()
    return y.to(x.dtype)


def _numbers(given: Tensor | Activations, activation: str | None) -> tuple[Tensor, Tensor | None]:
    """Activations as the kernels take them, and the scale (M,) of quantized ones."""
    if isinstance(given, Activations):
        x, scale = given.codes, given.scale
    elif activation is None:
        x, scale = given, None
    elif activation == "int8" and fused.suits(given):
        x, scale = fused.quantize_tokens(given)
    else:
        x, scale = reference.quantize_tokens(given, activation)
        scale = scale[:, 0]
    if x.dtype == torch.float8_e4m3fn:
        x = x.to(torch.bfloat16)  # exact
    return x if x.stride(-1) == 1 else x.contiguous(), scale


@cache
def _zeros(n: int) -> Tensor:
    return torch.zeros(n)


def _multiply(
    x: Tensor,
    scale: Tensor | None,
    prepared: Prepared,
    facts: list[int],
    operand: Operand,
    dtype: torch.dtype,
    bias: Tensor,
    y: Tensor,
) -> None:
    """y = x W^T + bias, of few or many activations."""
    bits, first, group, form, _ = facts
    _, w, scales, offsets, row, tables = prepared.layout
    (m, k), n, blocks = x.shape, prepared.shape[0], blocks_of(x.shape[1])
    fmt = prepared.format
    vectors = _is_vectors(fmt)
    codes: Codes | Vectors = Codes(bits, None if first == NONE else first)
    if vectors:
        codes = Vectors(bits, fmt.width, fmt.books, dtype == torch.float16)
    threads = torch.get_num_threads()
    few = m <= FEW
    tokens = (1, 1, 2, 4, 4)[m] if few else gemm.TOKENS
    sums = None
    if operand.whole:
        sums = group if few and form else 0
    elif few and form:
        sums = group
    ready = operand.kind == "bf16" and tokens == 1 and sums is None and k % BLOCK == 0
    if ready and x.dtype == dtype:
        xs, xsum = x, None
    else:
        xs, xsum = activations.pack(x, operand, tokens, sums)
    table = tables.data_ptr()
    if operand.kind == "fp32" and not vectors:
        table += SECTION * (1 + SECTIONS.index(dtype))
    values = {
        "w": w.data_ptr(), "table": table, "scale": scales.data_ptr(),
        "offset": offsets.data_ptr(), "row": row.data_ptr(), "bias": bias.data_ptr(),
        "x": xs.data_ptr(), "xsum": 0 if xsum is None else xsum.data_ptr(),
        "xscale": 0 if scale is None else scale.data_ptr(), "y": y.data_ptr(),
        "n": n, "blocks": blocks, "m": m,
        "shift": 0 if first == NONE else first,
    }  # fmt: skip
    if few:
        kernel = gemv.kernel(gemv.Few(codes, operand, group, FORMS[form], tokens))
        out = y if y.dtype == torch.float32 else y.new_empty(y.shape, dtype=torch.float32)
        values |= {"y": out.data_ptr(), "chunk": max(4, min(64, n // (4 * threads)))}
        kernel([values.get(name, 0) for name in gemv.NAMES], threads)
        if out is not y:
            y.copy_(out)
        return
    decoder = gemm.decoder(gemm.Tile(codes, operand, group, FORMS[form]))
    parts = -(-blocks * operand.itemsize // gemm.PART)
    part = -(-blocks // parts)
    strip = gemm.STRIP if n >= 3 * threads * gemm.STRIP else gemm.STRIP // 4
    room = gemm.room(operand, strip, part, m)
    scratch = _scratch(room * threads)
    if group:
        values["shift"] = -128 if operand.kind == "u8" else 0
    values |= {
        "strip": strip, "part": part, "decode": decoder.address, "scratch": scratch.data_ptr(),
        "room": room,
    }  # fmt: skip
    product = gemm.product(operand, activations.DTYPES[y.dtype])
    product([values.get(name, 0) for name in gemm.NAMES], threads)


_local = threading.local()


def _scratch(size: int) -> Tensor:
    """Memory that a thread's calls share: fresh pages would cost more than small products."""
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < size:
        buffer = _local.buffer = torch.empty(size, dtype=torch.uint8)
    return buffer
