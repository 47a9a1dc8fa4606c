"""AQLM checkpoints (2x8, 1x16 and others): sums of vectors from codebooks, one scale a row.

    W[n, v j : v (j + 1)] = scales[n] * sum_m codebooks[m, codes[n, j, m], 0, :]

codes are signed and stand for themselves modulo 2**bits.
"""

import torch

from anybit.checkpoint.foreign.base import ANY, FLOATS, Given, Layer, Part, option
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.formats.codebook import Codebook

WIDTHS = (*range(1, 9), 16)


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an AQLM checkpoint."""
    option(given.config, "out_group_size", (1,), "AQLM")
    b = option(given.config, "nbits_per_codebook", WIDTHS, "AQLM", required=True)
    return {part.name: layer(part, b) for part in given.parts("codebooks")}


def layer(part: Part, b: int) -> Layer:
    books = part.find("codebooks", FLOATS, (ANY, 2**b, 1, ANY))
    m, _, _, v = books.shape
    dtype = torch.int8 if b <= 8 else torch.int16
    codes = part.find("codes", (dtype,), (ANY, ANY, m))
    n, k = codes.shape[0], codes.shape[1] * v
    scales = part.find("scales", FLOATS, (n, 1, 1, 1))
    fmt = Codebook(m, v, b)

    def read() -> Packed:
        signed = codes.read().flatten(1)
        low, high = (int(x) for x in signed.aminmax())
        if low < -(2 ** (b - 1)) or high >= 2 ** (b - 1):
            raise InvalidInput(f"{part.name}.codes: {low} to {high} is out of range for {b} bits")
        unsigned = signed.view(torch.uint8) if b <= 8 else signed.int()
        grid = {"scale": scales.read().view(n, 1), "codebook": books.read().view(m, 2**b, v)}
        return Packed.from_codes(fmt, (n, k), unsigned & (2**b - 1), grid)

    dtypes = {"scale": scales.torch_dtype, "codebook": books.torch_dtype}
    return Layer((n, k), tuple(part.used), fmt, read, dtypes=dtypes)
