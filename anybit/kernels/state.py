"""What layers remember of texts: caches of tokens, and recurrent states of whole texts.

A `Memory` says what one layer needs, and makes the empty `LayerState` of an engine. K and V are one
kind (`anybit.kernels.kv.cache`); states that every token changes are the other.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anybit.kernels.attention import Batch, Run
from anybit.kernels.between import of
from anybit.kernels.kv.format import KvFormat, zeros
from anybit.kernels.recurrences import Scan
from anybit.kernels.scans import Ragged, Ring, Singles, joined


class Room(NamedTuple):
    """What an engine has for all its texts.

    Attributes:
        blocks: Of tokens, of which each text holds some.
        block_size: Tokens of a block.
        rows: Of states, of which each text holds one.
        kv: How K and V are kept.
        device: Where.
        kept: Of the rows, those for states at ends of prefixes.
        back: Tokens that a text may lose again after a step, since they were guessed, at most; 0:
            none are guessed.
    """

    blocks: int
    block_size: int
    rows: int
    kv: KvFormat
    device: torch.device
    kept: int = 0
    back: int = 0


class LayerState(Protocol):
    """What one layer remembers of all texts."""

    @property
    def nbytes(self) -> int:
        """Bytes, of which some may be there without blocks and rows."""

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
        inputs: Numbers of a token and their dtype, of each scan. If there are several scans, each
            has a state.
    """

    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inputs: tuple[tuple[int, torch.dtype], ...]

    def empty(self, room: Room) -> "RowStates":
        states = [zeros((room.rows, *shape), dtype, room.device) for shape, dtype in self.states]
        if not room.back:
            return RowStates(states)
        return RowStates(states, [Late.empty(room, *each) for each in self.inputs])


class RowStates:
    """Recurrent states of one layer.

    Attributes:
        states: (rows, ...) each. A text begins with zeros, whatever its row holds.
        late: Of each scan, inputs that the states have not seen, where they may be taken back.
    """

    by_kernels = True

    def __init__(self, states: list[Tensor], late: "list[Late] | None" = None):
        self.states, self.late = states, late or []

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.states, *(late.inputs for late in self.late)))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give rows what other rows hold, whose states have seen all inputs."""
        for state in (*self.states, *(late.seen for late in self.late)):
            state[targets] = state.index_select(0, sources)

    def advance(self, scan: Scan, x: Tensor, batch: Batch, part: int | None = None) -> Tensor:
        """Outputs (T, M) for inputs (T, N) of a step, each text's from its own states on.

        part: which scan of the layer this is, if there are several.
        """
        states = self.states if part is None else self.states[part : part + 1]
        late = self.late[part or 0] if self.late else None
        out = []
        for run in batch.runs:
            own = x[run.tokens]
            if late is None:
                y = of(x).recur(scan, states, own, run.texts, run.rows, run.first, run.to)
            else:
                y = late.advance(states, scan, own, run)
            out.append(y)
        return joined(out)


class Hidden(NamedTuple):
    """A vector of every token: hidden states of a model, for a head that guesses what follows."""

    size: int
    dtype: torch.dtype

    def empty(self, room: Room) -> "HiddenStates":
        # One more takes what tokens without a slot write, who have -1.
        shape = (room.blocks * room.block_size + 1, self.size)
        return HiddenStates(zeros(shape, self.dtype, room.device))


class HiddenStates:
    """Vectors (slots + 1, size) by slots of tokens."""

    by_kernels = True

    def __init__(self, values: Tensor):
        self.values = values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def read(self, slots: Tensor) -> Tensor:
        return self.values.index_select(0, slots % len(self.values))

    def write(self, slots: Tensor, values: Tensor) -> None:
        self.values[slots] = values


class Late(NamedTuple):
    """The latest inputs of texts whose tokens may be taken back, beside states without them.

    A step brings states up to the tokens that stay whatever comes of it, by the inputs that were
    kept, and then runs its own tokens from there: single ones without changing the states, each as
    a text by itself. So nothing has to be undone, and each row is as small as a few inputs.

    Attributes:
        inputs: (rows, 2 * back, N), each token's at its position modulo that many.
        seen: Tokens that the states of a row have seen, int32 (rows,).
        back: Of one row, tokens that the states may lack before a step, or that it may add.
    """

    inputs: Tensor
    seen: Tensor
    back: int

    @classmethod
    def empty(cls, room: Room, numbers: int, dtype: torch.dtype) -> "Late":
        inputs = zeros((room.rows, 2 * room.back, numbers), dtype, room.device)
        return cls(inputs, zeros((room.rows,), torch.int32, room.device), room.back)

    def advance(self, states: list[Tensor], scan: Scan, x: Tensor, run: Run) -> Tensor:
        """Outputs (T, M) of some texts."""
        rows, stay, recur = run.rows, run.stay, of(x).recur
        # A row's last text may have seen more.
        seen = torch.minimum(self.seen.index_select(0, rows), stay)
        before = Ring(rows, seen, stay, self.back)
        if not isinstance(run.texts, Singles):
            recur(scan, states, self.inputs, before, rows, seen, rows)
            y = recur(scan, states, x, run.texts, rows, stay, run.to)
            if isinstance(run.texts, Ragged):
                for to, passed in run.texts.passed(rows):
                    self.seen[to] = stay + passed
                return y
            text, _, passed = run.texts.ends
            self.seen[run.to] = stay[text] + passed
            return y
        step = run.texts.late.get(self.back) or Guessed.of(run, self.inputs.shape[1], self.back)
        run.texts.late[self.back] = step
        recur(scan, states, self.inputs, before, rows, seen, step.to)
        self.seen[rows] = stay
        self.inputs.flatten(0, 1)[step.places] = x
        y = recur(scan, states, self.inputs, step.texts, rows, stay, None)
        return y.index_select(0, step.last)


class Guessed(NamedTuple):
    """What a step with single tokens is to layers whose tokens may be taken back.

    Attributes:
        texts: The inputs behind those that stay, to each token itself.
        last: Where the outputs of these tokens are among those of all texts.
        places: Of the tokens in the ring.
        to: Rows that get states: the first of a text's tokens, which lie side by side, writes them.
    """

    texts: Ring
    last: Tensor
    places: Tensor
    to: Tensor

    @classmethod
    def of(cls, run: Run, size: int, back: int) -> "Guessed":
        rows, first, stay = run.rows, run.first, run.stay
        own = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
        other = torch.cat([rows.new_zeros(1), rows[:-1]])
        return cls(
            Ring(rows, stay, first + 1, back),
            own * back + first - stay,
            rows * size + first % size,
            torch.where(rows == other, 0, rows),
        )
