"""Scales of cells (`cells.py`) as factors of centroids or of their sums, in CuTe DSL.

A block with up to four scales a row has one for all lanes of a product, so the product's sums are
multiplied, in fp32. With more of them the four lanes of a quad hold vectors of different groups:
what is looked up is multiplied instead, and rounded to its dtype.
"""

from typing import Any

from cutlass import Uint32

from anybit.kernels.cute.cells import ROWS, VECTORS, Cells
from anybit.kernels.cute.ptx import half2, half_to_brain, load_shared, prmt

SUMMED = 4  # scales of a row in a block that sums are multiplied with


def fine(cells: Cells) -> bool:
    """Whether centroids are multiplied, not sums."""
    return cells.groups > SUMMED


def pair(word: Uint32, dtype: str) -> tuple[Uint32, Uint32]:
    """Two fp16 scales, each twice, as numbers of `dtype`."""
    if dtype == "bfloat16":
        word = half_to_brain(word)
    return prmt(word, 0x1010), prmt(word, 0x3232)


def of_fragment(scales: Any, lane: Any, groups: int) -> list:
    """Words of a fine block's scales for what lane 4 g + t holds of its codes.

    One for each eight vectors, or two where every vector has its own: for vectors 2 t and 2 t + 1
    of the eight, rows g and g + 8. scales: where those of the block lie.
    """
    at = scales + (lane >> 2) * 4 + (lane & 3) * 2 * groups // VECTORS * (2 * ROWS)
    return [
        load_shared(at, 1, (8 * i + s) * groups // VECTORS * (2 * ROWS), True)[0]
        for i in range(VECTORS // 8)
        for s in range(2 if groups == VECTORS else 1)
    ]


def of_eight(words: list, i: int, dtype: str) -> list:
    """Of the words of `of_fragment`: the pairs of both vectors of eight i."""
    each = len(words) // (VECTORS // 8)
    pairs = [pair(word, dtype) for word in words[i * each : (i + 1) * each]]
    return [pairs[0], pairs[-1]]


def times(words: list, factor: Uint32, dtype: str) -> list:
    """Packed numbers, each multiplied by a factor that is there twice."""
    return [half2("mul.rn", dtype, (word, factor)) for word in words]
