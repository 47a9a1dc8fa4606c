"""When a weight is decoded once for a product of many tokens, and how that is multiplied."""

import math
from dataclasses import replace
from functools import cache

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import ROWS
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.hopper.tiles import FIXED, choose, cycles, fits_once, fitted, may_copy

BYTES = Decoder("uint8", tuple(range(8)), middle=128)  # of a weight's copy in bytes
DECODED = 256 << 20  # bytes of a decoded copy, or of a part of it, at most
WRITTEN = 0.886  # of what the memory can bring, written as a decoded copy
# Multiply-adds a cycle of a multiprocessor in the library's product with a decoded copy.
MULTIPLIED = 0.75 * 2048


def decoded_rows(k: int) -> int:
    """Rows of a weight that are decoded at a time."""
    return max(1, DECODED // (2 * k * ROWS)) * ROWS


def copies(decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> bool:
    """Whether a decoded copy and its product take less time.

    16-bit copies are multiplied by the library, bytes by a kernel of this family. The main loop
    decodes again for every tile of tokens.
    """
    if m <= 64 or not may_copy(decoder):
        return False
    written = decoder.slot // 8 * n * k / (WRITTEN * chip.read)
    decoded = n * k / 2048 * (4 * decoder.instructions + 200) / (4 * chip.multiprocessors)
    copied = FIXED + max(written, decoded)
    own = cycles(choose(decoder, m, n, k, chip), decoder, m, n, k, chip)
    if decoder.slot == 8:
        copied += cycles(choose_copied(m, n, k, chip), BYTES, m, n, k, chip)
        # Of decoders whose loops were timed, copies took a tenth less than this says.
        return own > (0.94 if decoder.hidden else 1.1) * copied
    products = m * n * k / chip.multiprocessors
    waves = n * m / (128 * 128 * chip.multiprocessors)  # of the library's tiles
    copied += FIXED + products / MULTIPLIED * math.ceil(waves) / waves
    return 1.1 * own > copied  # the model is a tenth low for slow decoders and many tokens


@cache
def copied_tiles() -> tuple[Tile, ...]:
    """Tiles for the product of a copy in bytes."""
    tiles = [Tile(128), Tile(128, rows=256)]
    return tuple(fitted(t, BYTES) for t in (*tiles, *(replace(t, shared=True) for t in tiles)))


def choose_copied(m: int, n: int, k: int, chip: Chip = H200) -> Tile:
    """The tile for the product of a copy in bytes."""
    fit = [t for t in copied_tiles() if fits_once(t, BYTES, m, n, k, chip)]
    return min(fit, key=lambda t: cycles(t, BYTES, m, n, k, chip))
