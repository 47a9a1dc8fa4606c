"""EXL3 checkpoints (exllamav3): trellis codes of 1 to 8 bits, rotated.

    W^T = diag(suh) H V H diag(svh)

H is blockwise Hadamard of 128, and V our `trellis` of one of EXL3's three codes, with scales of 1.
A tile's 256 codes are a string of bits in words of 32, high bits first, as `trellis[k, n]` of
(K / 16, N / 16). Old checkpoints have signs of one bit, `su` and `sv`, instead of `suh` and `svh`.
"""

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import ANY, Given, Layer, Part
from anybit.core.packed import Packed
from anybit.core.tiles import SIDE, join
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.formats.trellis import Trellis

BLOCK = 128
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}  # tensors that name a code hold its own


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an EXL3 checkpoint. Each one says itself how it is stored."""
    return {part.name: layer(part) for part in given.parts("trellis")}


def layer(part: Part) -> Layer:
    trellis = part.find("trellis", (torch.int16,), (ANY, ANY, ANY))
    rows, columns, size = trellis.shape
    n, k = columns * SIDE, rows * SIDE
    if size % SIDE or not 1 <= size // SIDE <= 8:
        raise InvalidInput(f"{part.name}.trellis: {size} words a tile are no whole bits, 1 to 8")
    if n % BLOCK or k % BLOCK:
        raise InvalidInput(f"{part.name}: a weight of {(n, k)} has no blocks of {BLOCK} to rotate")
    fmt = Trellis(size // SIDE, code(part), rotate="kn")
    left, right = vector(part, "su", k), vector(part, "sv", n)

    def read() -> Packed:
        grid = {
            "scale": torch.ones(n, 1, dtype=torch.float16),
            "rotate_in": numbers(left),
            "rotate_out": numbers(right)[:, None],
        }
        codes = unpacked(trellis.read(), fmt.bits).transpose(0, 1).reshape(-1, SIDE * SIDE)
        return Packed.from_codes(fmt, (n, k), join(codes, n), grid)

    return Layer((n, k), tuple(part.used), fmt, read)


def code(part: Part) -> str:
    """Our name of the layer's code."""
    found = "3inst"
    for name, multiplier in MULTIPLIERS.items():
        if part.has(name):
            number = int(part.find(name, (torch.int32,), ()).read()) & 0xFFFFFFFF
            if number != multiplier or found != "3inst":
                raise InvalidInput(
                    f"{part.name}.{name}: {number:#x} is no known code, only {multiplier:#x} is"
                )
            found = name
    return found


def vector(part: Part, name: str, size: int) -> Stored:
    """The numbers of one side, or their signs."""
    if part.has(f"{name}h"):
        return part.find(f"{name}h", (torch.float16,), (size,))
    return part.find(name, (torch.int16,), (size // 16,))


def numbers(stored: Stored) -> Tensor:
    """fp16 (size,); a bit that is set stands for -1, low bits first."""
    found = stored.read()
    if found.dtype == torch.float16:
        return found
    return 1 - (found[:, None] >> torch.arange(16) & 1).flatten().half() * 2


def unpacked(trellis: Tensor, bits: int) -> Tensor:
    """(K / 16, N / 16, 16 * bits) int16 -> codes (K / 16, N / 16, 256) uint8."""
    words = trellis.contiguous().view(torch.int32).unflatten(-1, (8, bits)).long() & 0xFFFFFFFF
    codes = torch.empty(*words.shape[:3], 32, dtype=torch.uint8)
    for i in range(32):  # of the codes that `bits` words hold
        at, end = i * bits // 32, (i + 1) * bits
        pair = words[..., at] << 32 | words[..., (end - 1) // 32]
        codes[..., i] = pair >> (-end % 32) & (1 << bits) - 1
    return codes.flatten(2)
