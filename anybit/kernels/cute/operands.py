"""What products of scalar formats share: the layout of weights, and the operand that X becomes."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput, InvalidType
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.between import of
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.pack import REGISTERS, ROW_MULTIPLE, pack

SPANS = 256  # of experts, which a kernel counts at once: spans of 1 up to 256, of 2 up to 512
OPERANDS = {"int8": "int8", "fp8": "float8_e4m3fn"}  # of activation notations
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
WHOLE = 8  # outputs of a token that kernels store at once


def refuse_format(layer: LayerSpec) -> str | None:
    """Why no kernel multiplies a layer of this format, or None."""
    for dtype in NAMES if layer.dtype is None else [layer.dtype]:
        d = decoder(layer.format, operand_of(layer.activation, dtype))
        if isinstance(d, str):
            return d
        if layer.octaves > d.octaves:
            return (
                f"scales of a row are {layer.octaves} powers of two apart; {d.octaves} fit into "
                "8-bit weights"
            )
    return None


def prepare(packed: Packed, activation: str | None, dtype: torch.dtype | None = None) -> Prepared:
    """The layout is [blobs, row scale, row zero]; blobs have the dtype that they decode to."""
    dtype = dtype or torch.get_default_dtype()
    dtype = dtype if dtype in NAMES else torch.bfloat16
    tensors = tuple(layout(packed, operand_of(activation, dtype)))
    made_for = None if activation else dtype
    return Prepared(packed.format, packed.shape, activation, tensors, made_for)


def prepare_experts(
    experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
) -> Prepared:
    """The layouts of all experts' weights, one behind the other."""
    kinds = {(e.format, e.shape) for e in experts}
    if len(kinds) != 1:
        raise InvalidInput(f"experts must have one format and shape, not {len(kinds)}")
    parts = [prepare(e, activation, dtype) for e in experts]
    blobs, *rows = zip(*(p.layout for p in parts), strict=True)
    # torch cannot join fp8 tensors; their bytes are the same.
    joined = torch.cat([b.view(torch.uint8) for b in blobs]).view(blobs[0].dtype)
    table = parts[0].layout[3:]  # one for all
    return parts[0]._replace(layout=(joined, *(torch.cat(r) for r in rows[:2]), *table))


def layout(packed: Packed, operand: str) -> list[Tensor]:
    """[blobs (row tiles, K tiles, bytes), row scale fp32 and zero int32 (N padded,)].

    Decoders that look weights up have a table (256,) int32 behind them.
    """
    d = decoder(packed.format, operand)
    if isinstance(d, str):
        raise InvalidInput(d)
    blobs = pack(packed, d, REGISTERS).view(getattr(torch, d.operand))
    missing = -packed.shape[0] % ROW_MULTIPLE
    rows = d.row_scale(packed), d.row_zero(packed).to(blobs.device)
    padded = (torch.nn.functional.pad(r, (0, missing)).contiguous() for r in rows)
    table = [] if (words := d.table()) is None else [words.to(blobs.device)]
    return [blobs, *padded, *table]


def operand_of(activation: str | None, dtype: torch.dtype) -> str:
    """What X is in the matrix unit."""
    return NAMES[dtype] if activation is None else OPERANDS[activation]


def tokens(
    x: Tensor | Activations, prepared: Prepared
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) as the tensor core takes it, and the scale and sums of quantized activations."""
    if isinstance(x, Activations):
        return aligned(x.codes), x.scale.contiguous(), x.sums.contiguous()
    if prepared.activation is not None:
        codes, scale, sums = of(x).quantize(x, prepared.activation)
        return aligned(codes), scale, sums
    if x.dtype != prepared.layout[0].dtype:
        raise InvalidType(
            f"x is {x.dtype}, and the weights are laid out for {prepared.layout[0].dtype}: give "
            "`prepare` the dtype of x"
        )
    return aligned(x), None, None


def aligned(x: Tensor) -> Tensor:
    """x (M, K), or a copy, contiguous and in rows of whole 16 bytes: what the copy engine reads."""
    size = x.element_size()
    if missing := -x.shape[1] * size % 16:  # as bytes, since torch pads no fp8 numbers
        return torch.nn.functional.pad(x.contiguous().view(torch.uint8), (0, missing)).view(x.dtype)
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def whole(n: int) -> int:
    """Outputs of a token as kernels store them; the weight's rows are padded further."""
    return -(-n // WHOLE) * WHOLE


def offsets(bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | None:
    """A bias (..., N) in the dtype of y, for n outputs, contiguous."""
    if bias is None:
        return None
    bias, missing = bias.to(dtype).contiguous(), n - bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, missing)) if missing else bias


def cut(y: Tensor, n: int) -> Tensor:
    """The first n outputs of each token."""
    return y if y.shape[1] == n else y[:, :n].contiguous()


@cache
def decoder_for(fmt: Format, x_dtype: torch.dtype) -> Decoder:
    d = decoder(fmt, str(x_dtype).removeprefix("torch."))
    if isinstance(d, str):
        raise InvalidInput(d)
    return d
