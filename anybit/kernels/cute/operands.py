"""What products of scalar formats share: the layout of weights, and the operand that X becomes."""

from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput, InvalidType
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.cute.decode import K_TILE, Decoder, decoder
from anybit.kernels.cute.pack import ROW_MULTIPLE, pack

OPERANDS = {"int8": "int8", "fp8": "float8_e4m3fn"}  # of activation notations
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def refuse_format(layer: LayerSpec) -> str | None:
    """Why no kernel multiplies a layer of this format and shape, or None."""
    n, k = layer.shape
    for dtype in NAMES if layer.dtype is None else [layer.dtype]:
        d = decoder(layer.format, operand_of(layer.activation, dtype))
        if isinstance(d, str):
            return d
        if layer.octaves > d.octaves:
            return (
                f"scales of a row are {layer.octaves} powers of two apart; {d.octaves} fit into "
                "8-bit weights"
            )
    if k % K_TILE or n % 8:
        return f"K must be a multiple of {K_TILE} and N of 8, not (N, K) = {layer.shape}"
    if layer.activation is not None:
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton quantizes its activations; pip install 'anybit[gpu]'"
    return None


def prepare(packed: Packed, activation: str | None, dtype: torch.dtype | None = None) -> Prepared:
    """The layout is [blobs, row scale, row zero]; blobs have the dtype that they decode to."""
    dtype = dtype or torch.get_default_dtype()
    dtype = dtype if dtype in NAMES else torch.bfloat16
    tensors = tuple(layout(packed, operand_of(activation, dtype)))
    made_for = None if activation else dtype
    return Prepared(packed.format, packed.shape, activation, tensors, made_for)


def layout(packed: Packed, operand: str) -> list[Tensor]:
    """[blobs (row tiles, K tiles, bytes), row scale fp32 and zero int32 (N padded,)]."""
    d = decoder(packed.format, operand)
    if isinstance(d, str):
        raise InvalidInput(d)
    blobs = pack(packed, d).view(getattr(torch, d.operand))
    missing = -packed.shape[0] % ROW_MULTIPLE
    rows = d.row_scale(packed), d.row_zero(packed).to(blobs.device)
    return [blobs, *(torch.nn.functional.pad(r, (0, missing)).contiguous() for r in rows)]


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
        from anybit.kernels.triton.activation import quantize

        codes, scale, sums, _ = quantize(x, prepared.activation, sums=prepared.activation == "int8")
        return codes, scale, sums
    if x.dtype != prepared.layout[0].dtype:
        raise InvalidType(
            f"x is {x.dtype}, and the weights are laid out for {prepared.layout[0].dtype}: give "
            "`prepare` the dtype of x"
        )
    return aligned(x), None, None


def aligned(x: Tensor) -> Tensor:
    """x, or a copy, contiguous and on whole 16 bytes: what the copy engine reads."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def decoder_for(fmt: Format, x_dtype: torch.dtype) -> Decoder:
    d = decoder(fmt, str(x_dtype).removeprefix("torch."))
    if isinstance(d, str):
        raise InvalidInput(d)
    return d
