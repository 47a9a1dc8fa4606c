"""What layers remember of texts: caches of tokens, and recurrent states of whole texts.

A `Memory` says what one layer needs, and makes the empty `LayerState` of an engine. K and V are one
kind (`anybit.kernels.kv.cache`); states that every token changes are the other.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anybit.kernels.attention import Batch
from anybit.kernels.kv.format import KvFormat, zeros
from anybit.kernels.scans import Texts, joined

# From states (n, ...) and inputs (T, N) of n texts to outputs (T, M) and new states.
Scan = Callable[[list[Tensor], Tensor, Texts], tuple[Tensor, list[Tensor]]]


class Room(NamedTuple):
    """What an engine has for all its texts.

    Attributes:
        blocks: Of tokens, of which each text holds some.
        block_size: Tokens of a block.
        rows: Of states, of which each text holds one.
        kv: How K and V are kept.
        device: Where.
        kept: Of the rows, those for states at ends of prefixes.
    """

    blocks: int
    block_size: int
    rows: int
    kv: KvFormat
    device: torch.device
    kept: int = 0


class LayerState(Protocol):
    """What one layer remembers of all texts."""

    @property
    def nbytes(self) -> int:
        """Bytes of what grows with blocks and rows."""

    @property
    def by_kernels(self) -> bool:
        """Whether steps of single tokens look at nothing on the host, so that graphs hold them."""


class Memory(Protocol):
    """What a layer needs to remember."""

    def empty(self, room: Room) -> LayerState:
        """Nothing remembered yet.

        Raises:
            Unsupported: K and V cannot be kept so.
        """


class Recurrence(NamedTuple):
    """States of fixed size, which every token of a text changes.

    Attributes:
        states: Shape and dtype of each, for one text.
    """

    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def empty(self, room: Room) -> "RowStates":
        return RowStates(
            [zeros((room.rows, *shape), dtype, room.device) for shape, dtype in self.states]
        )


class RowStates:
    """Recurrent states of one layer.

    Attributes:
        states: (rows, ...) each. A text begins with zeros, whatever its row holds.
    """

    by_kernels = True

    def __init__(self, states: list[Tensor]):
        self.states = states

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give rows what other rows hold."""
        for state in self.states:
            state[targets] = state.index_select(0, sources)

    def advance(self, scan: Scan, x: Tensor, batch: Batch, which: slice = slice(None)) -> Tensor:
        """Outputs (T, M) for inputs (T, N) of a step, each text's from its own states on.

        which: of the states the scan takes.
        """
        out = []
        for texts, rows, first, tokens, to in batch.runs:
            going = first > 0
            before = [
                torch.where(going.view(-1, *[1] * (s.ndim - 1)), s.index_select(0, rows), 0)
                for s in self.states[which]
            ]
            y, after = scan(before, x[tokens], texts)
            out.append(y)
            for state, new in zip(self.states[which], after, strict=True):
                state[to] = new.to(state.dtype)
        return joined(out)
