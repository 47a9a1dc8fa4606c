"""Rows of tokens whose outputs are added up: `backend.Pairs`, as kernels see them.

An output is a product plus an offset in one instruction, in a pair or not: so other tokens' outputs
have the same bits whether there are pairs or not, and in rows of either parity.
"""

from typing import Any

import cutlass
from cutlass import Float32
from cutlass.cutlass_dsl import select_


def offset_of_second(offset: Any, joined: Any) -> Any:
    """What is added to the product of an odd row: nothing if it is a second one's."""
    return Float32(select_(joined, Float32(0.0), offset))


def added_up(pair: list, joined: Any) -> list:
    """Outputs of an even row and the next one: the first gets the second if they are a token's."""
    return [Float32(select_(joined, pair[0] + pair[1], pair[0])), pair[1]]


def row_of_y(row: Any, count: Any) -> tuple[Any, Any]:
    """Where the outputs of a row of tokens go, and whether they do: not those of a second row."""
    return row - cutlass.min((row + 1) // 2, count), (row >= 2 * count) | (row % 2 == 0)
