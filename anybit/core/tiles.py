"""Tiles of 16x16 weights whose values depend on a sequence of codes, and the order of the sequence.

Number p of a sequence lies where an operand of `mma.m16n8k16` has it: lane p / 8 holds 8 weights
that follow each other, columns c, c + 1, c + 8 and c + 9 of row r, and of row r + 8. This is the
order of EXL3 too. Codes are stored in the order of the sequence, row by row of their tile.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 16


class Hashed(NamedTuple):
    """How two bytes of a sequence look up the values of a step; see `formats/trellis_look.py`.

    Attributes:
        rate: Bits a weight.
        width: Weights of a step, 2 or 4.
        low: What the low byte is multiplied by.
        high: What the high byte is.
        spread: What their sum is multiplied by for signs.
    """

    rate: int
    width: int
    low: int
    high: int
    spread: int


@cache
def order(device: torch.device) -> Tensor:
    """Places (256,) of a sequence's weights in a tile that is read row by row."""
    p = torch.arange(SIDE * SIDE, device=device)
    lane, own = p // 8, p % 8
    row = lane // 4 + own // 4 * 8
    column = lane % 4 * 2 + own % 2 + own // 2 % 2 * 8
    return row * SIDE + column


@cache
def places(device: torch.device) -> Tensor:
    """Numbers (256,) in the sequence of a tile's weights, read row by row."""
    return torch.argsort(order(device))


def cut(x: Tensor, columns: int = SIDE) -> Tensor:
    """(N, C) -> (tiles, 16 * columns): tiles of 16 rows, each read row by row."""
    n, count = x.shape
    parts = x.reshape(n // SIDE, SIDE, count // columns, columns).transpose(1, 2)
    return parts.reshape(-1, SIDE * columns)


def join(tiles: Tensor, n: int) -> Tensor:
    """The inverse of `cut`, for n rows."""
    columns = tiles.shape[1] // SIDE
    return tiles.reshape(n // SIDE, -1, SIDE, columns).transpose(1, 2).reshape(n, -1)


def sequences(w: Tensor) -> Tensor:
    """Weights (N, K) -> (tiles, 256), each tile in the order of its sequence."""
    return cut(w).index_select(1, order(w.device))


def from_sequences(values: Tensor, n: int) -> Tensor:
    """The inverse of `sequences`, for n rows."""
    return join(values.index_select(1, places(values.device)), n)
