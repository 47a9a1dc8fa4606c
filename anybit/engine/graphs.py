"""Steps as CUDA graphs, or recordings on a CPU: one for each of some numbers of tokens.

A graph holds launches whose grids depend on its size alone. What varies from step to step lies in
memory that the kernels read: each token's position and slot, each sequence's blocks and context.
Sequences with one token come first; those that read a prompt follow, tokens side by side. Without a
graph, launching a prompt takes the host longer than its products take the GPU (8B on an H100: 40 ms
for 512 tokens, of which the GPU works 9).
"""

import copy
import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybit.engine.alike import without_repeats
from anybit.engine.models.layers import Decoder
from anybit.engine.scheduler import MOST_PROMPTS, Scheduled
from anybit.engine.sequence import SamplingParams, Sequence
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Pairs
from anybit.kernels.between import ANSWERS, Repeated, family_of
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.state import LayerState
from anybit.nn import op
from anybit.progress import progress

Graph = torch.cuda.CUDAGraph | Repeated
SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 1025, 64))
# Tokens of a step that reads prompts: at most an eighth of it is padding.
PROMPTS = (16, 32, 48, *range(64, 257, 32), *range(320, 513, 64), *range(640, 2049, 128))
MOST_SINGLE = 256  # sequences with one token, and drafted tokens, beside prompts
EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
SEQUENTIAL = 512  # of them at most through recurrences, which go from token to token
LONGEST = 1 << 14  # tokens of one sequence beside prompts: a single program reads all before it


class Rows:
    """What the tokens of a step are, in buffers that graphs read, and the graphs of each size.

    A step runs as the next larger size; its unused rows have slot -1, so they write nothing, and
    unused sequences have context 0 and nobody's row of states. single: the most sequences with one
    token. prompts: the most others. width: blocks of the longest sequence. exact: whether sequences
    with one token take two rows of a step that reads prompts. recurrent: whether prompts go through
    recurrences. drafts: whether some tokens are drafted.
    """

    def __init__(
        self, sizes: Items[int], single: int, prompts: int, width: int, block_size: int,
        device: torch.device, exact: bool = False, recurrent: bool = False, drafts: bool = False,
    ):  # fmt: skip
        self.exact, self.drafts = exact, drafts
        self.each = 8 if recurrent else 4  # numbers of a sequence
        self.sizes, self.most, self.prompts = sizes, single, prompts
        self.width, self.block_size = width, block_size
        self.graphs: dict[int, tuple[Graph, Tensor]] = {}
        # Of every token: itself, position and slot; of every sequence: context, row of states,
        # tokens that stay, owner, wanted states (`Ragged`), first token, and blocks. On the host,
        # and on the device.
        pin, lists = device.type == "cuda", single + prompts
        numbers = 3 * sizes[-1] + (self.each + 1) * lists + 1
        self.host = [
            torch.zeros(n, dtype=torch.int32, pin_memory=pin) for n in (numbers, lists * width)
        ]
        self.device = [torch.zeros_like(t, device=device) for t in self.host]
        self.copied = torch.cuda.Event() if pin else None  # the host's buffers to the device
        self.known: list[tuple[list[int], int]] = [([], 0)] * lists  # blocks written to tables

    def size(self, scheduled: list[Scheduled]) -> int:
        """The size that a step runs as."""
        more = single_of(scheduled) if self.exact else 0
        return self.size_of(rows_of(scheduled) + more)

    def size_of(self, rows: int) -> int:
        """The smallest size of so many rows or more; `rows` if there is none."""
        return next(iter(self.sizes[bisect_left(self.sizes, rows) :]), rows)

    def single(self, size: int) -> int:
        """Sequences with one token that a graph takes."""
        return min(size, self.most)

    def parts(self, buffer: Any, size: int) -> tuple[Any, Any, Any]:
        """Of the first buffer: tokens, positions and slots (3, size); contexts, rows of states,
        tokens that stay, owners, and wanted states (4 or 8, sequences); starts."""
        lists, end = self.single(size) + self.prompts, 3 * size
        rows, begin = buffer[:end].reshape(3, size), end + self.each * lists
        numbers = buffer[end:begin].reshape(self.each, lists)
        return rows, numbers, buffer[begin : begin + lists + 1]

    def fill(self, size: int, scheduled: list[Scheduled], tokens: Tensor | None = None) -> None:
        """Write a step to the device. tokens: as `StepGraphs.logits` has them."""
        if self.copied:
            self.copied.synchronize()  # of the step before, which may still be running
        rows, numbers, starts = self.parts(self.host[0].numpy(), size)
        tables = self.host[1].numpy().reshape(-1, self.width)
        changed, i, single = False, 0, self.single(size)
        at_prompt = single
        numbers[:], starts[:single] = 0, np.arange(single)
        numbers[3, :single] = starts[:single]
        singles: list[tuple[int, ...]] = []  # written at once
        for s in scheduled:
            if s.tokens > 1:
                if at_prompt == single:
                    starts[single] = i
                self._fill_prompt(s, slice(i, i + s.tokens), rows, tables[at_prompt])
                i += s.tokens
                numbers[0, at_prompt], starts[at_prompt + 1] = s.first + s.tokens, i
                numbers[1:3, at_prompt] = s.seq.row, s.first
                for n, (at, row) in enumerate(s.kept, 1):  # two at most
                    numbers[2 * n + 2 : 2 * n + 4, at_prompt] = at - s.first, row
                self.known[at_prompt] = ([], 0)
                at_prompt, changed = at_prompt + 1, True
                continue
            blocks, owner = s.seq.blocks, i
            given = () if tokens is not None else (s.seq.tokens[s.first],)
            for at, token in enumerate((*given, *s.draft) or (0,), s.first):
                slot = blocks[at // self.block_size] * self.block_size + at % self.block_size
                stays = s.first - s.guessed
                singles.append((token, at, slot, at + 1, s.seq.row, stays, owner))
                known, count = self.known[i]
                if known is not blocks or count != len(blocks):
                    tables[i, : len(blocks)] = blocks
                    self.known[i], changed = (blocks, len(blocks)), True
                i += 1
        if singles:
            values, count = np.array(singles).T, len(singles)
            rows[:, :count], numbers[:4, :count] = values[:3], values[3:]
        if at_prompt == single:
            starts[single] = i if self.prompts else single
        starts[at_prompt + 1 :] = starts[at_prompt]
        rows[:, i:] = [[0], [0], [-1]]
        lists = numbers.shape[1]
        of_all = 3 * size + (self.each + 1) * lists + 1, lists * self.width * changed
        for which, count in enumerate(of_all):
            self.device[which][:count].copy_(self.host[which][:count], non_blocking=True)
        if self.copied:
            self.copied.record()
        if tokens is not None:
            torch.clamp_min(tokens, 0, out=self.device[0][:i])

    def _fill_prompt(self, s: Scheduled, where: slice, rows: Any, table: Any) -> None:
        """Write tokens of a prompt to some rows of the host's buffers, and its blocks."""
        at, size = np.arange(s.first, s.first + s.tokens), self.block_size
        blocks = np.array(s.seq.blocks)
        slots = blocks[at // size] * size + at % size
        rows[:, where] = s.seq.tokens[s.first : s.first + s.tokens], at, slots
        table[: len(blocks)] = blocks

    def batch(self, size: int) -> tuple[Tensor, Batch]:
        """Tokens and the rest of a step of so many rows, as they are on the device."""
        (tokens, positions, slots), numbers, starts = self.parts(self.device[0], size)
        contexts, states, stay, owners = numbers[:4]
        single, lists = self.single(size), len(contexts)
        # To those who launch, one prompt may be all, and no prompt is whole.
        prompts = [size, *(0,) * (self.prompts - 1)] if self.prompts else []
        return tokens, Batch(
            positions=positions,
            slots=slots,
            tables=self.device[1][: lists * self.width].view(lists, self.width),
            contexts=contexts,
            starts=starts,
            queries=[1] * single + prompts,
            lengths=[0] * lists,
            decodes=single,
            rows=states,
            stay=stay,
            wanted=numbers[4:] if self.each > 4 else None,
            owners=owners[:single] if self.drafts else None,
        )


class Zeros(TorchDispatchMode):
    """Tensors that torch leaves as memory is are zeros inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for that

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), given: Any = None
    ) -> Any:
        out = function(*args, **(given or {}))
        return out.zero_() if function.overloadpacket in EMPTY else out


class StepGraphs:
    """Replays the model on steps.

    Steps in which every sequence has one token end in logits; steps that read prompts end in
    hidden states.

    width: blocks of the longest sequence. steady: every step without prompts runs as the largest.
    prompts: sizes of steps that read prompts, if any do. drafts: whether tokens may be drafted.

    Attributes:
        captures: Graphs that were captured so far.
        reads: Whether steps with prompts run by graphs. On a CPU those of a server do; a call's
            prompts, which wait for nobody, run as they are.
    """

    def __init__(
        self, model: Decoder, states: list[LayerState], block_size: int, largest: int, width: int,
        steady: bool = False, prompts: Items[int] = (), drafts: bool = False,
    ):  # fmt: skip
        self.model, self.states = model, states
        self.sizes = [size for size in SIZES if size < largest and not steady] + [largest]
        device = model.embed_tokens.device
        self.written = Rows(self.sizes, largest, 0, width, block_size, device)
        # Kernels that take a text's tokens together are slower where most texts have a single one.
        # From so many of each on they pay, on an H200.
        kinds = {state.kinds[0] for state in states if isinstance(state, LayerCache)}
        self.together, self.drafted = 2 if kinds <= {"model"} else 3, None
        if drafts and kinds - {"int4"}:  # whose tokens go one by one
            few = [size for size in self.sizes if size > 1] or self.sizes
            self.drafted = Rows(few, largest, 0, width, block_size, device, drafts=True)
        self.prompts = None
        if prompts:
            short = min(width, LONGEST // block_size) if device.type == "cuda" else width
            single = min(MOST_SINGLE, largest)
            self.prompts = Rows(
                prompts,
                single,
                MOST_PROMPTS,
                short,
                block_size,
                device,
                model.exact_answers,
                model.recurrent,
            )
        self.heads: dict[int, tuple[Repeated, Tensor]] = {}  # recorded, and what they read
        self.pool: Any = None
        self.captures = 0
        self.reads = self.written.copied is not None

    @property
    def graphs(self) -> dict[int, tuple[Graph, Tensor]]:
        """Of steps without prompts, by size."""
        return self.written.graphs

    def replace(self, model: Decoder) -> None:
        """Go on with another model; what was captured knows the old one's memory."""
        self.model = model
        self.__dict__.pop("_few", None)
        for rows in filter(None, (self.written, self.drafted, self.prompts)):
            rows.graphs.clear()
        self.heads.clear()
        self.pool = None  # it ends with the last of its graphs, and torch refuses to capture there

    def capture_all(self, show_progress: bool | None = None) -> dict[int, float]:
        """Capture every graph, the largest first, whose memory the others share.

        Returns:
            Seconds of a step that reads a prompt from its beginning, by its size.
        """
        todo, seconds = self._todo(), {}
        with progress("preparing steps", len(todo), show_progress) as step:
            for rows, size in todo:
                rows.fill(size, [])
                self._replay(rows, size)
                if rows is self.prompts:
                    seconds[size] = self._seconds(rows, size, self._prompts_of(size, rows))
                step(1)
        return seconds

    def warm(self) -> None:
        """Run a step of one token: what is made at first use is no part of a recording."""
        self.written.fill(self.sizes[0], [])
        self._forward(self.written, self.sizes[0])

    def unrecorded(self) -> Iterator[Callable[[], object]]:
        """Calls that record what a CPU replays and no step has recorded, those used most first.

        Texts by their number, then prompts. A call that ends in an error has recorded nothing.
        """
        for size in self.sizes:
            if size not in self.written.graphs:
                yield partial(self._record_empty, self.written, size)
        if self.prompts is None or not self.reads:
            return
        for size in self.prompts.sizes:
            if size not in self.prompts.graphs:
                yield partial(self._record_empty, self.prompts, size)
        for size in self.sizes:
            if size not in self.heads:
                yield partial(self._record_empty_head, size)

    def _record_empty(self, rows: Rows, size: int) -> None:
        rows.fill(size, [])
        self._record(rows, size)

    def _record_empty_head(self, size: int) -> None:
        assert self.prompts is not None
        _, hidden = next(iter(self.prompts.graphs.values()))
        self._record_head(size, hidden)

    def _record(self, rows: Rows, size: int) -> Tensor:
        """Run a step and keep it as a recording."""
        rows.graphs[size] = self._capture(rows, size)
        self.captures += 1
        return rows.graphs[size][1]

    def _record_head(self, size: int, hidden: Tensor) -> None:
        """Record logits of so many hidden states such as these."""
        given, pairs = hidden.new_zeros(size, hidden.shape[1]), None
        if self.model.exact_answers:
            pairs = Pairs(torch.tensor([size], dtype=torch.int32), size, 2 * size)

        def work() -> Tensor:
            with ANSWERS.within(pairs):
                return self.model.logits(given)

        self.heads[size] = family_of(hidden.device).record(work, op.FUNCTIONS), given
        self.captures += 1

    def _seconds(self, rows: Rows, size: int, scheduled: list[Scheduled]) -> float:
        """What a step of a captured size takes."""
        rows.fill(size, scheduled)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._replay(rows, size)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def launches(self) -> list[Callable[[], object]]:
        """A call for each graph, the largest first, that launches what the graph holds.

        Layers that launch what others do are left out. Tensors begin with zeros: where a kernel is
        not launched, no index is out of its range.
        """

        def run(rows: Rows, size: int) -> None:
            rows.fill(size, [])
            with Zeros():  # type: ignore[no-untyped-call]
                self._few._forward(rows, size)

        return [partial(run, rows, size) for rows, size in self._todo()]

    @cached_property
    def _few(self) -> "StepGraphs":
        """The same without layers that launch what others do."""
        few = copy.copy(self)
        if not few.model.hosted:
            few.model, few.states = without_repeats(self.model, self.states)
        return few

    def _todo(self) -> list[tuple[Rows, int]]:
        """All graphs, the largest first."""
        every = filter(None, (self.prompts, self.written, self.drafted))
        todo = [(rows, size) for rows in every for size in rows.sizes]
        return sorted(todo, key=lambda pair: -pair[1])

    def _prompts_of(self, size: int, rows: Rows, first: int = 0) -> list[Scheduled]:
        """A step of a size that reads a prompt, or several where texts are shorter than that.

        first: tokens before it.
        """
        longest = min(self.model.length, rows.width * rows.block_size)
        caches = (len(state.k) for state in self.states if isinstance(state, LayerCache))
        blocks = next(caches, 1)
        out = []
        for at in range(0, size, longest)[: rows.prompts]:
            tokens = min(longest, size - at)
            end = first + tokens
            seq = Sequence("", 0, [0] * end, SamplingParams(), end)
            seq.blocks = [i % blocks for i in range(-(-end // rows.block_size))]
            seq.row = 1 if self.model.recurrent else 0
            out.append(Scheduled(seq, first, tokens, True))
        return [s for s in out if s.tokens > 1]

    def can_write(self, scheduled: list[Scheduled]) -> bool:
        """Whether a graph takes a step: one token for each sequence, sampled, and drafts."""
        return sum(s.sampled for s in scheduled) <= self.sizes[-1] and all(
            s.tokens == 1 and s.samples for s in scheduled
        )

    def can_read(self, scheduled: list[Scheduled]) -> bool:
        """Whether a graph takes a step that reads prompts."""
        if self.prompts is None or (size := self.prompts.size(scheduled)) > self.prompts.sizes[-1]:
            return False
        if self.model.recurrent and any(s.draft or s.guessed for s in scheduled):
            return False  # texts of a token each may not change their states for good
        return (
            single_of(scheduled) <= self.prompts.single(size)
            and sum(s.tokens > 1 for s in scheduled) <= self.prompts.prompts
            and max(len(s.seq.blocks) for s in scheduled) <= self.prompts.width
        )

    def logits(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> Tensor:
        """Logits (B, vocabulary) of a step, valid until the next one.

        tokens (B,): on the device, if the host does not know them yet; negative ones run as 0.
        """
        many = rows_of(scheduled) >= self.together * len(scheduled)
        drafted = self.drafted if many else None
        return self._run(scheduled, drafted or self.written, tokens)

    def hidden(self, scheduled: list[Scheduled]) -> Tensor:
        """Hidden states (T, hidden) of a step that reads prompts, valid until the next one."""
        assert self.prompts is not None
        return self._run(scheduled, self.prompts)

    def head(self, hidden: Tensor, rows: list[int]) -> Tensor | None:
        """Logits of some rows of what `hidden` gave, valid until the next ones.

        None where no recording takes so many.
        """
        size = self.written.size_of(len(rows))
        if self.written.copied or size > self.sizes[-1]:
            return None
        if size not in self.heads:
            self._record_head(size, hidden)
        recording, given = self.heads[size]
        torch.index_select(hidden, 0, torch.tensor(rows), out=given[: len(rows)])
        recording.replay()
        return recording.out[: len(rows)]

    def _run(self, scheduled: list[Scheduled], rows: Rows, tokens: Tensor | None = None) -> Tensor:
        size = rows.size(scheduled)
        if size not in rows.graphs and not rows.copied:  # its recording is the step
            rows.fill(size, scheduled, tokens)
            return self._record(rows, size)[: rows_of(scheduled)]
        if size not in rows.graphs:  # it runs before it is captured, and no state advances twice
            rows.fill(size, [])
            self._replay(rows, size)
        rows.fill(size, scheduled, tokens)
        return self._replay(rows, size)[: rows_of(scheduled)]

    def _replay(self, rows: Rows, size: int) -> Tensor:
        if size not in rows.graphs:
            self._record(rows, size)
        graph, out = rows.graphs[size]
        graph.replay()
        return out

    def _capture(self, rows: Rows, size: int) -> tuple[Graph, Tensor]:
        work = partial(self._forward, rows, size)
        if not rows.copied:
            recording = family_of(rows.device[0].device).record(work, op.FUNCTIONS)
            return recording, recording.out
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._few._forward(rows, size)  # loads what a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with no_garbage(), torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            out = work()
        self.pool = self.pool or graph.pool()
        return graph, out

    def _forward(self, rows: Rows, size: int) -> Tensor:
        tokens, batch = rows.batch(size)
        exact, reads = self.model.exact_answers, rows is self.prompts
        with ANSWERS.within(batch.pairs(size if reads else None) if exact else None):
            hidden = self.model(tokens, self.states, batch)
            return hidden if reads else self.model.logits(hidden)


@contextmanager
def no_garbage() -> Iterator[None]:
    """No search for garbage inside: a capture fails where an older engine's memory is freed."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def prompt_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes of steps that read prompts, where a step has so many tokens at most."""
    return PROMPTS[: bisect_left(PROMPTS, tokens) + 1]


def single_of(scheduled: list[Scheduled]) -> int:
    """Tokens that are texts by themselves: one of a sequence, and drafts."""
    return sum(1 + len(s.draft) for s in scheduled if s.tokens == 1)


def rows_of(scheduled: list[Scheduled]) -> int:
    """Tokens of a step."""
    return sum(s.tokens + len(s.draft) for s in scheduled)
