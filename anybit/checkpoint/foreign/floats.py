"""Small floating-point weights with scales, in the layouts that all tools share.

    W[n, k] = element[n, k] * scale[n // rows, k // columns]

Elements of 8 bits are a tensor of float8 (N, K); of 4 bits (e2m1) two to a byte, the first in the
low half (N, K / 2); of 6 bits four to three bytes. Scales are one number, or one for each row, each
group of a row or each block of rows and columns: floats, or e8m0 where they are bytes, or e4m3 with
a number for the whole weight beside them (NVFP4). These are the planes of our own formats, so
elements are moved as they are.
"""

import math

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import FLOATS, Layer, Part
from anybit.checkpoint.foreign.bitfields import unpack
from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.planes import pack
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.formats.microscaling import NVFP4, Microscaling
from anybit.formats.minifloat import Minifloat

FP8 = {torch.float8_e4m3fn: (4, 3), torch.float8_e5m2: (5, 2)}
BYTES = (torch.uint8, torch.int8)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
NAN = 255  # of e8m0
PIECE = 1 << 18  # bytes that are checked at a time: temporaries stay in the cache
BLOCK = (128, 128)  # where neither the config nor the shape says another


def float_layer(
    part: Part,
    weight: str,
    scale: str,
    *,
    element: tuple[int, int] = (2, 1),
    block: tuple[int, int] | None = None,
    number: str | None = None,
    divide: bool = False,
) -> Layer:
    """A layer of small floats.

    Args:
        part: Its tensors.
        weight: The name of its elements, below the layer's.
        scale: The name of its scales.
        element: X and Y of eXmY where the elements are bytes and not of a float8 dtype.
        block: Rows and columns that share a scale; None: as the scales' shape says.
        number: The name of NVFP4's number for the whole weight, where there is one.
        divide: Scales are divided by that number.

    Raises:
        InvalidInput: Shapes or dtypes do not fit each other, or a scale is not positive and finite.
    """
    packed = part.find(weight, (*FP8, *BYTES))
    element = FP8.get(packed.torch_dtype, element)
    bits = 1 + sum(element)
    name = f"{part.name}.{weight}"
    n, k = shape_of(packed, bits, name)
    scales = part.find(scale, (*FLOATS, *POWERS, torch.float8_e4m3fn))
    tall, wide = blocks_of(part.name, scales, (n, k), block)
    checked(scales, f"{part.name}.{scale}")
    one = number_of(part, number, scales, n)
    fmt = format_of(element, scales, min(wide, k), k, divide)

    def whole() -> Tensor:
        """Scales (N, groups)."""
        read = scales.read().reshape(-(-n // tall), -(-k // wide))
        if read.dtype == torch.uint8:
            read = read.view(torch.float8_e8m0fnu)
        return read if tall == 1 else read.repeat_interleave(tall, 0)[:n]

    def read() -> Packed:
        grid = {"scale": whole().contiguous()}
        if one is not None:
            grid["row_scale"] = one.read().reshape(-1, 1).expand(n, 1).contiguous()
        return Packed(fmt, (n, k), planes(packed.read(), fmt, (n, k), name), grid)

    def decode() -> Tensor:
        codes = packed.read().view(torch.uint8).reshape(n, k)
        columns = torch.arange(k) // wide
        return fmt.values(codes, {}) * whole().float()[:, columns]

    if k % wide and wide < k:
        if bits != 8:
            raise InvalidInput(f"{part.name}: K={k} is no multiple of a group of {wide}")
        reason = f"K={k} is no multiple of the block of {wide}"
        return Layer((n, k), tuple(part.used), None, decode, reason)
    dtypes = {"scale": scales.torch_dtype} if scales.torch_dtype in FLOATS else {}
    return Layer((n, k), tuple(part.used), fmt, read, dtypes=dtypes)


def shape_of(packed: Stored, bits: int, name: str) -> tuple[int, int]:
    """(N, K) of stored elements."""
    rows, *bytes_of_row = packed.shape or (0,)
    size = math.prod(bytes_of_row)  # GPT-OSS counts the bytes of a group apart
    if len(bytes_of_row) not in (1, 2) or size * 8 % bits or not packed.nbytes:
        raise InvalidInput(f"{name}: {packed.shape} is no shape of a weight (N, K) of {bits} bits")
    return rows, size * 8 // bits


def number_of(part: Part, key: str | None, scales: Stored, rows: int) -> Stored | None:
    """NVFP4's number for the whole weight, or for each row; None for other scales."""
    one = part.find(key, (torch.float32,)) if key and part.has(key) else None
    if one is not None:
        if one.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
            raise InvalidInput(f"{part.name}.{key}: one number is expected, not {one.shape}")
        checked(one, f"{part.name}.{key}")
    if (scales.torch_dtype == torch.float8_e4m3fn) != (one is not None):
        raise InvalidInput(
            f"{part.name}: scales of {scales.dtype} {'with' if one else 'without'} a number for "
            "the whole weight are no layout that anybit knows"
        )
    return one


def blocks_of(
    name: str, scales: Stored, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns that share a scale, by the config or by the scales' shape."""
    n, k = shape
    size = [*scales.shape]
    if len(size) == 4 and size[1] == size[3] == 1:
        size = [size[0], size[2]]
    if block is not None:
        tall, wide = block
    elif all(s == 1 for s in size):
        tall, wide = n, k
    elif size in ([n], [n, 1]):
        tall, wide = 1, k
    elif len(size) == 2 and size[0] == n and k % max(1, size[1]) == 0:
        tall, wide = 1, k // max(1, size[1])
    else:
        tall, wide = BLOCK
    whole = scales.nbytes // scales.torch_dtype.itemsize
    if tall < 1 or wide < 1 or whole != -(-n // tall) * -(-k // wide):
        raise InvalidInput(
            f"{name}: scales of {scales.shape} do not fit a weight of {shape} in rows, groups or "
            f"blocks of {block or BLOCK}"
        )
    return tall, wide


def format_of(element: tuple[int, int], scales: Stored, group: int, k: int, divide: bool) -> Format:
    """The format of elements with such scales."""
    if scales.torch_dtype in POWERS:
        return Microscaling(*element, group=group)
    if scales.torch_dtype == torch.float8_e4m3fn:
        return NVFP4(*element, group=group, divide=divide)
    return Minifloat(*element, group=0 if group == k else group)


def checked(scales: Stored, name: str) -> None:
    """Raise InvalidInput where a scale is not positive and finite."""
    checked_numbers(scales.read(), name)


def checked_numbers(read: Tensor, name: str) -> None:
    """The same of scales that were read."""
    if read.dtype in POWERS:
        bad = read.view(torch.uint8) == NAN
    else:
        numbers = read.float()
        bad = ~(numbers.isfinite() & (numbers > 0))
    if bad.any():
        count, first = int(bad.sum()), int(bad.flatten().nonzero()[0])
        value = float(read.flatten()[first : first + 1].float())
        raise InvalidInput(
            f"{name}: {count} scales are not positive and finite, the first is {value:g} at "
            f"{first}; the checkpoint is damaged, copy it again"
        )


def planes(data: Tensor, fmt: Format, shape: tuple[int, int], name: str) -> tuple[Tensor, ...]:
    """Stored elements as the planes of our formats, whose bits lie in the same order.

    Raises:
        InvalidInput: A number of 8 bits is NaN or infinite.
    """
    n, k = shape
    data = data.view(torch.uint8).reshape(n, -1)
    assert isinstance(fmt, Minifloat)
    parts = data.flatten().split(PIECE) if fmt.bits == 8 else ()
    if any(int((part & 0x7F).max()) > fmt.largest_code for part in parts):
        raise InvalidInput(f"{name}: holds NaN or inf; the checkpoint is damaged, copy it again")
    if fmt.bits in (4, 8) and data.shape[1] % 4 == 0:
        return (data.view(torch.int32),)
    words = torch.nn.functional.pad(data, (0, -data.shape[1] % 4)).view(torch.int32)
    return pack(unpack(words, fmt.bits, k), fmt.bits)
