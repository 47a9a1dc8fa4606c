"""The Hopper backend: CuTe DSL kernels for H100 and H200 (sm_90a).

A kernel comes from the cache (see `build.py`), else it is compiled into it where the DSL is
installed. Weights are laid out for one activation dtype at load; the first call with another dtype
lays them out once more.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anybit.format import Format, Packed, tensor_shapes
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.build import built, kernel_file, missing_kernels
from anybit.kernels.hopper.decode import K_TILE, Decoder, decoder
from anybit.kernels.hopper.load import Function
from anybit.kernels.hopper.pack import pack
from anybit.kernels.hopper.tiles import ROW_MULTIPLE, Kernel, Tile

OPERANDS = {"int8": "int8", "fp8": "float8_e4m3fn"}  # of activation notations
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def refuse(
    fmt: Format, activation: str | None, shape: tuple[int, int], device: torch.device
) -> str | None:
    n, k = shape
    d = decoder(fmt, operand_of(activation, torch.bfloat16))
    if isinstance(d, str):
        return d
    if k % K_TILE or n % 8:
        return f"K must be a multiple of {K_TILE} and N of 8, not (N, K) = {shape}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs an H100 or H200 (sm_90a), not {torch.cuda.get_device_name(device)}"
    if activation is not None:
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton quantizes its activations; pip install 'anybit[gpu]'"
    outs = [d.operand] if activation is None else NAMES.values()
    kernels = [Kernel(d, t, o) for t in tiles.family(d) for o in outs]
    kernels += [Kernel(d, t, o, grouped=True) for t in tiles.family_grouped(d) for o in outs]
    return missing_kernels([kernel_file(kernel) for kernel in kernels])


def prepare(
    packed: Packed, activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """[blobs, row scale, row zero], then the canonical tensors (not copied).

    The dtype of the blobs names the operand that they decode to.
    """
    dtype = dtype or torch.get_default_dtype()
    dtype = dtype if dtype in NAMES else torch.bfloat16
    return [*layout(packed, operand_of(activation, dtype)), *packed.tensors().values()]


def release(prepared: list[Tensor]) -> list[Tensor] | None:
    return prepared[:3]


def prepare_experts(
    experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """[blobs, row scale, row zero] of all experts' weights, one behind the other.

    Raises ValueError when their formats or shapes differ, or are more than the kernels take.
    """
    if len(experts) > tiles.MOST_EXPERTS:
        raise ValueError(f"{len(experts)} experts; the hopper kernels take {tiles.MOST_EXPERTS}")
    kinds = {(e.format, e.shape) for e in experts}
    if len(kinds) != 1:
        raise ValueError(f"experts must have one format and shape, not {len(kinds)}")
    parts = [prepare(e, activation, dtype)[:3] for e in experts]
    # torch cannot join fp8 tensors; their bytes are the same.
    blobs = torch.cat([p[0].view(torch.uint8) for p in parts]).view(parts[0][0].dtype)
    return [blobs, *(torch.cat([p[i] for p in parts]) for i in (1, 2))]


def layout(packed: Packed, operand: str) -> list[Tensor]:
    """[blobs (row tiles, K tiles, bytes), row scale fp32 and zero int32 (N padded,)]."""
    d = decoder(packed.format, operand)
    if isinstance(d, str):
        raise ValueError(d)
    blobs = pack(packed, d).view(getattr(torch, d.operand))
    missing = -packed.shape[0] % ROW_MULTIPLE
    rows = d.row_scale(packed), d.row_zero(packed).to(blobs.device)
    return [blobs, *(torch.nn.functional.pad(r, (0, missing)).contiguous() for r in rows)]


def operand_of(activation: str | None, dtype: torch.dtype) -> str:
    """What X is in the matrix unit."""
    return NAMES[dtype] if activation is None else OPERANDS[activation]


def linear(
    x: Tensor,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    activation: str | None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x (..., K) in fp16 or bf16 -> (..., n); with a scale, of codes and in `dtype`."""
    dtype = x.dtype if scale is None else dtype
    if dtype not in NAMES:
        raise TypeError(
            f"x is {dtype}; the hopper backend multiplies float16 and bfloat16: call .half() or "
            ".bfloat16() on the model"
        )
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    if scale is not None:
        scale, sums = scale.contiguous(), None if sums is None else sums.contiguous()
        y = multiply(aligned(rows), scale, sums, prepared, bias, fmt, n, dtype)
    elif activation is None:
        if prepared[0].dtype != rows.dtype:
            prepared = other_layout(prepared, fmt, (n, k), rows.dtype)
        y = multiply(aligned(rows), None, None, prepared, bias, fmt, n, x.dtype)
    else:
        from anybit.kernels.triton.activation import quantize

        codes, scale, sums = quantize(rows, activation, sums=activation == "int8")[:3]
        y = multiply(codes, scale, sums, prepared, bias, fmt, n, x.dtype)
    return y.view(*x.shape[:-1], n)


def linear_experts(
    x: Tensor,
    prepared: list[Tensor],
    starts: Tensor,
    fmt: Format,
    n: int,
    activation: str | None,
) -> Tensor:
    """x (M, K) in fp16 or bf16, sorted by expert -> (M, n), for weights of `prepare_experts`."""
    dtype, scale, sums = x.dtype, None, None
    if activation is not None:
        from anybit.kernels.triton.activation import quantize

        x, scale, sums = quantize(x, activation, sums=activation == "int8")[:3]
    elif x.dtype != prepared[0].dtype:
        raise TypeError(
            f"x is {x.dtype}, and the experts' weights are laid out for {prepared[0].dtype}: give "
            "`prepare_experts` the dtype of x"
        )
    return multiply(aligned(x), scale, sums, prepared, None, fmt, n, dtype, starts=starts)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy, contiguous and on whole 16 bytes: what the copy engine reads."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def multiply(
    x: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    prepared: list[Tensor],
    bias: Tensor | None,
    fmt: Format,
    n: int,
    dtype: torch.dtype,
    tile: Tile | None = None,
    overlap: bool | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """One launch: x (M, K) as the matrix unit takes it -> (M, n) in `dtype`.

    scale (M,) fp32 and sums (M,) int32 belong to quantized tokens. tile: instead of the table's.
    overlap: programmatic dependent launch, or not; None leaves it to `tiles.overlaps`. starts
    (experts + 1,) int32, on the device: tokens starts[e] to starts[e + 1] meet the weights of
    expert e; `prepared` is `prepare_experts`'s then, and there is no bias.
    """
    m, k = x.shape
    device = x.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiply(
                x, scale, sums, prepared, bias, fmt, n, dtype, tile, overlap, starts
            )  # fmt: skip
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return y
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    experts = 0 if starts is None else len(starts) - 1
    function, grid, best = chosen(fmt, x.dtype, m, n, k, dtype, device, tile, experts)
    blobs, row_scale, row_zero = prepared[:3]
    function.launch(
        x,
        (
            blobs.data_ptr(),
            row_scale.data_ptr(),
            row_zero.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if starts is None else starts.data_ptr(),
        ),
        n,
        grid,
        best if overlap is None else overlap,
        experts,
    )
    return y


@cache
def chosen(
    fmt: Format,
    x_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: int,
    tile: Tile | None,
    experts: int,
) -> tuple[Function, int, bool]:
    """The loaded kernel for a problem, its grid, and whether launches should overlap."""
    d = decoder_for(fmt, x_dtype)
    if tile is None:
        tile = tiles.choose(d, m, n, k) if not experts else tiles.choose_grouped(d, m, experts)
    tile = tiles.fitted(tile, d)
    function = loaded(Kernel(d, tile, NAMES[dtype], grouped=experts > 0), device)
    return function, tiles.grid(tile, m, n, experts), tiles.overlaps(tile, d, m, n, experts)


@cache
def loaded(kernel: Kernel, device: int) -> Function:
    """A kernel on a device."""
    path = built(kernel)
    with torch.cuda.device(device):
        return Function(path, device)


@cache
def decoder_for(fmt: Format, x_dtype: torch.dtype) -> Decoder:
    d = decoder(fmt, str(x_dtype).removeprefix("torch."))
    if isinstance(d, str):
        raise ValueError(d)
    return d


_others: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def other_layout(
    prepared: list[Tensor], fmt: Format, shape: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """The layout for an activation dtype that `prepare` did not foresee; made once."""
    blobs = prepared[0]
    if len(prepared) == 3:
        raise TypeError(
            f"x is {dtype}, and the weights are laid out for {blobs.dtype} alone, since their "
            f"canonical tensors were released: make the layer with dtype={dtype}"
        )
    if blobs not in _others:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the weights are laid out for {blobs.dtype}, and x is {dtype}: call the layer "
                "once before capturing a CUDA graph, or build it under torch.set_default_dtype"
            )
        tensors = dict(zip(tensor_shapes(fmt, shape), prepared[3:], strict=True))
        _others[blobs] = layout(Packed.from_tensors(fmt, shape, tensors), NAMES[dtype])
    return _others[blobs]


def read_floor(d: Decoder, n: int, k: int) -> int:
    """Bytes of packed weights that a product must read."""
    return math.ceil(n / 128) * (k // K_TILE) * d.blob_bytes
