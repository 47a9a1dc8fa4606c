"""Runs a step: builds the batch's tensors, calls the model, samples."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.engine.graphs import SEQUENTIAL, StepGraphs, prompt_sizes
from anybit.engine.models.layers import Decoder
from anybit.engine.penalties import penalize
from anybit.engine.prompts import read_prompts
from anybit.engine.sampler import Sampled, masks_of, rows_of, sample
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Row
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Pairs
from anybit.kernels.between import ANSWERS
from anybit.kernels.state import Room, RowStates

# Sequences of a recorded step on a CPU. A larger step spends little of its time between products,
# and a recording keeps all that lies between them.
MOST_RECORDED = 16
RECORDED = (2, 4, 8, 16, 32)  # tokens of recorded steps with prompts
STEADY, STEADY_CPU = 32, 4  # sequences of a steady step


@dataclass(frozen=True)
class Flight:
    """A step that was started. rows: what it samples. tokens: these, on the device.

    wait: waits for them. Without rows there are no tokens. choose: what samples, where that takes
    the tokens of the step before, which the host did not know yet: it starts masks of grammars, and
    returns what waits for them, samples and returns the whole flight.
    """

    scheduled: list[Scheduled]
    rows: list[Row]
    tokens: Tensor | None
    wait: Callable[[], Sampled]
    choose: Callable[[], Callable[[], "Flight"]] | None = None


class Runner(Protocol):
    """Runs steps for the engine. overlaps: whether a step may start before the last one's end.

    reads_prompts: whether it gives log probabilities and hidden states of prompts. repeats: whether
    a text's last token may run twice.
    """

    @property
    def overlaps(self) -> bool: ...

    @property
    def reads_prompts(self) -> bool: ...

    @property
    def repeats(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step over sequences, after `previous` if that still runs."""


class ModelRunner:
    """A model and what its layers remember, on one device.

    graphs: the largest batch to capture; 0: none. tokens: of a step, at most. steady: decode steps
    are all of the same shape. drafts: whether steps may have drafted tokens.

    Attributes:
        rows: Texts that a steady decode step writes at once.
    """

    reads_prompts = True

    def __init__(
        self,
        model: Decoder,
        room: Room,
        graphs: int = 0,
        tokens: int = 2048,
        steady: bool = False,
        drafts: bool = False,
    ):
        self.model, self.block_size, self.device = model, room.block_size, room.device
        self.states = [memory.empty(room) for memory in model.memories]
        self.overlaps = self.device.type != "cpu"  # the host goes on while the device works
        by_kernels = all(state.by_kernels for state in self.states)
        self.graphs = None
        if model.capturable and by_kernels and graphs:
            if steady:
                graphs = min(graphs, STEADY if self.overlaps else STEADY_CPU)
            elif not self.overlaps:
                graphs = min(graphs, MOST_RECORDED)
            size, width = room.block_size, -(-model.length // room.block_size)
            reads = not steady
            if model.recurrent:  # a graph knows no pieces that scans cut texts into
                reads, tokens = reads and model.ragged, min(tokens, SEQUENTIAL)
            sizes = (prompt_sizes(tokens) if self.overlaps else RECORDED) if reads else ()
            self.graphs = StepGraphs(
                model, self.states, size, graphs, width, steady, sizes, drafts and self.overlaps
            )
        self.rows = graphs if self.graphs else 1
        # A steady prompt is read in chunks of one size.
        self.repeats = not (model.recurrent or steady)

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step over sequences, those with one token first.

        A token is sampled for each sequence whose end the step reaches, in order, and for each
        drafted token. previous: a step that still runs; this one continues the tokens that it has
        sampled for all its sequences, or has none of these. Where a grammar reads those tokens
        first, sampling is left for later.
        """
        # Kernels, streams and graphs are those of the current device, which is a thread's own.
        with torch.accelerator.device_index(self.device.index):
            given = None if previous is None else self._continued(scheduled, previous)
            logits = self.logits(scheduled, given)
            if logits is None:
                return Flight(scheduled, [], None, lambda: ([], []))
            rows = rows_of(scheduled)
            adjusted = penalize(logits, rows, given)
            if previous and any(s.seq.matcher for s in scheduled):
                later = partial(self._masked, scheduled, rows, logits, adjusted)
                return Flight(scheduled, [], None, lambda: ([], []), later)
            return Flight(scheduled, rows, *sample(logits, rows, adjusted))

    @torch.inference_mode()
    def _masked(
        self, scheduled: list[Scheduled], rows: list[Row], logits: Tensor, adjusted: Tensor
    ) -> Callable[[], Flight]:
        """Start the masks of a step whose model has been started; what samples then."""
        masks = masks_of(logits, rows)

        @torch.inference_mode()
        def chosen() -> Flight:
            with torch.accelerator.device_index(self.device.index):
                return Flight(scheduled, rows, *sample(logits, rows, adjusted, masks))

        return chosen

    def logits(self, scheduled: list[Scheduled], given: Tensor | None = None) -> Tensor | None:
        """Run a step: logits (B, vocabulary) of what it samples, valid until the next step.

        given: the tokens, if the host does not know them yet.
        """
        begin = [(s.begin, s.seq.row) for s in scheduled if s.begin]
        for state in self.states if begin else ():
            if isinstance(state, RowStates):
                state.copy(*self.tensor(begin).T)
        reading = any(s.reads_prompt for s in scheduled)
        adapters = self.model.adapters
        adapted = adapters is not None and adapters.select(scheduled, self.device)
        graphs = None if reading or adapted else self.graphs
        if graphs is not None and graphs.can_write(scheduled):
            return graphs.logits(scheduled, given)
        replayed = None
        if graphs is not None and given is None and graphs.reads and graphs.can_read(scheduled):
            replayed = graphs
            hidden = graphs.hidden(scheduled)
        else:
            tokens, batch = self.prepare(scheduled, given)
            with ANSWERS.within(batch.pairs() if self.model.exact_answers else None):
                hidden = self.model(tokens, self.states, batch)
        if reading:
            read_prompts(self.model, hidden, scheduled)
        last: list[int] = []
        end = 0
        for s in scheduled:
            end += s.tokens + len(s.draft)
            last += range(end - s.sampled, end)
        count = len(last)
        if not last:
            return None
        if replayed is not None:
            logits = replayed.head(hidden, last)
            if logits is not None:
                return logits
        size = count
        if graphs is not None and self.overlaps:  # the head has run with as many rows
            size = graphs.written.size_of(count)
        last += [0] * (size - count)
        rows = hidden if size == count == len(hidden) else hidden[self.tensor(last)]
        pairs = None
        if self.model.exact_answers:
            pairs = Pairs(self.tensor([len(rows)]), len(rows), 2 * len(rows))
        with ANSWERS.within(pairs):
            return self.model.logits(rows)[:count]

    @torch.inference_mode()
    def replace(self, model: Decoder) -> None:
        """Go on with another model of the same shapes, on the same cache."""
        self.model = model
        if self.graphs is not None:
            self.graphs.replace(model)

    def _continued(self, scheduled: list[Scheduled], previous: Flight) -> Tensor | None:
        """The tokens that a step samples, INVALID among them, for the sequences that go on.

        None if the next step has none of them, whose tokens the host knows.
        """
        if all(s.seq is not scheduled[0].seq for s in previous.scheduled):
            return None
        assert previous.tokens is not None
        if len(scheduled) == len(previous.scheduled):
            return previous.tokens
        rows = {s.seq: i for i, s in enumerate(previous.scheduled)}
        return previous.tokens[self.tensor([rows[s.seq] for s in scheduled])]

    def prepare(
        self, scheduled: list[Scheduled], given: Tensor | None = None
    ) -> tuple[Tensor, Batch]:
        """The step's tokens, and what attention needs to know about them.

        given: the tokens, if the host does not know them yet.
        """
        size = self.block_size
        widest = max(len(s.seq.blocks) for s in scheduled)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        lengths: list[int] = []
        queries: list[int] = []
        rows: list[int] = []
        stay: list[int] = []
        kept: dict[int, dict[int, int]] = {}
        for s in scheduled:
            if s.kept:
                kept[len(queries)] = {at - s.first: row for at, row in s.kept}
            first, last = s.first, s.first + s.tokens + len(s.draft)
            tokens += [*s.seq.tokens[first : first + s.tokens], *s.draft]
            positions += range(first, last)
            slots += [s.seq.blocks[p // size] * size + p % size for p in range(first, last)]
            # A drafted token is a text by itself, which sees what the step writes before it.
            texts = 1 + len(s.draft)
            tables += [s.seq.blocks + [0] * (widest - len(s.seq.blocks))] * texts
            lengths += range(last - texts + 1, last + 1)
            queries += [s.tokens] + [1] * len(s.draft)
            rows += [s.seq.row] * texts
            stay += [first - s.guessed] * texts
        batch = Batch(
            positions=self.tensor(positions),
            slots=self.tensor(slots),
            tables=self.tensor(tables),
            contexts=self.tensor(lengths),
            starts=self.tensor([0, *itertools.accumulate(queries)]),
            queries=queries,
            lengths=lengths,
            decodes=queries.count(1),
            rows=self.tensor(rows),
            stay=self.tensor(stay),
            kept=kept,
        )
        # INVALID runs as any other; nobody will read what comes of it.
        return self.tensor(tokens) if given is None else given.clamp_min(0), batch

    def tensor(self, values: list[Any]) -> Tensor:
        """Integers on the device, without waiting for it."""
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)


def state_bytes(model: Decoder, room: Room) -> int:
    """Bytes of what a model's layers remember in a room, without taking them."""
    room = room._replace(device=torch.device("meta"))
    return sum(memory.empty(room).nbytes for memory in model.memories)
