"""Steps with few tokens as CUDA graphs, or recordings on a CPU: one for each of some sizes.

Each token is a text by itself, which sees what the step writes before it: so one graph takes texts
that are written, drafts, and short prompts. The launches of a prompt without a graph can take the
host longer than its products take the GPU (8B on an H200: up to 1,024 tokens).
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.models.layers import Decoder
from anybit.engine.recording import Recording
from anybit.engine.scheduler import Scheduled

Graph = torch.cuda.CUDAGraph | Recording
SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 1025, 64))
PROMPTS = (16, 32, 48, *range(64, 385, 32))  # rows of a step that reads prompts
# What attention costs there: every row of a prompt reads all tokens before it by itself.
SEEN = PROMPTS[-1] ** 2  # tokens that the rows of prompts read, together
LONGEST = 1 << 14  # tokens of any text; so many rows leave one program for each text


class Rows:
    """What the rows of a step are, in buffers that graphs read, and the graphs of each size.

    A step runs as the next larger size; its unused rows have slot -1 and context 0, so they write
    nothing and see nothing. width: blocks of the longest sequence.
    """

    def __init__(self, sizes: Sequence[int], width: int, block_size: int, device: torch.device):
        self.sizes, self.width, self.block_size = sizes, width, block_size
        self.graphs: dict[int, tuple[Graph, Tensor]] = {}
        # Of every row: token, position, slot and context; blocks. On the host, and on the device.
        pin, most = device.type == "cuda", sizes[-1]
        self.host = [
            torch.zeros(n, dtype=torch.int32, pin_memory=pin) for n in (4 * most, most * width)
        ]
        self.device = [torch.zeros_like(t, device=device) for t in self.host]
        self.copied = torch.cuda.Event() if pin else None  # the host's buffers to the device
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.known: list[tuple[list[int], int]] = [([], 0)] * most  # blocks written to tables

    def size(self, scheduled: list[Scheduled]) -> int:
        """The size that a step runs as."""
        return self.sizes[bisect_left(self.sizes, rows_of(scheduled))]

    def fill(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> None:
        """Write a step to the device. tokens: as `StepGraphs.logits` has them."""
        size = self.size(scheduled)
        if self.copied:
            self.copied.synchronize()  # of the step before, which may still be running
        rows = self.host[0].numpy()[: 4 * size].reshape(4, size)
        tables = self.host[1].numpy().reshape(-1, self.width)
        changed, i = False, 0
        for s in scheduled:
            if s.tokens > 1:
                self._fill_prompt(s, slice(i, i + s.tokens), rows, tables)
                i, changed = i + s.tokens, True
                continue
            blocks = s.seq.blocks
            given = () if tokens is not None else (s.seq.tokens[s.first],)
            for at, token in enumerate((*given, *s.draft) or (0,), s.first):
                slot = blocks[at // self.block_size] * self.block_size + at % self.block_size
                rows[:, i] = token, at, slot, at + 1
                known, count = self.known[i]
                if known is not blocks or count != len(blocks):
                    tables[i, : len(blocks)] = blocks
                    self.known[i], changed = (blocks, len(blocks)), True
                i += 1
        rows[:, i:] = [[0], [0], [-1], [0]]
        for which, count in ((0, 4 * size), (1, size * self.width * changed)):
            self.device[which][:count].copy_(self.host[which][:count], non_blocking=True)
        if self.copied:
            self.copied.record()
        if tokens is not None:
            torch.clamp_min(tokens, 0, out=self.device[0][:i])

    def _fill_prompt(self, s: Scheduled, rows: slice, values: Any, tables: Any) -> None:
        """Write tokens of a prompt to some rows of the host's buffers."""
        at, size = np.arange(s.first, s.first + s.tokens), self.block_size
        blocks = np.array(s.seq.blocks)
        slots = blocks[at // size] * size + at % size
        values[:, rows] = s.seq.tokens[s.first : s.first + s.tokens], at, slots, at + 1
        tables[rows, : len(blocks)] = blocks
        self.known[rows] = [(s.seq.blocks, len(blocks))] * s.tokens

    def batch(self, size: int) -> tuple[Tensor, Batch]:
        """Tokens and the rest of a step of so many rows, as they are on the device."""
        tokens, positions, slots, contexts = self.device[0][: 4 * size].view(4, size)
        return tokens, Batch(
            positions=positions,
            slots=slots,
            tables=self.device[1][: size * self.width].view(size, self.width),
            contexts=contexts,
            starts=self.starts[: size + 1],
            queries=[1] * size,
            lengths=[],
            decodes=size,
        )


class StepGraphs:
    """Replays the model on steps with few tokens.

    Texts that are written have graphs from the first step of a size on, which end in logits;
    prompts from the second on, which end in hidden states: capturing takes longer than a prompt.

    width: blocks of the longest sequence. steady: every step of texts that are written runs as the
    largest. prompts: sizes of steps that read prompts, if any do.
    """

    def __init__(
        self, model: Decoder, caches: list[LayerCache], block_size: int, largest: int, width: int,
        steady: bool = False, prompts: Sequence[int] = (),
    ):  # fmt: skip
        self.model, self.caches = model, caches
        self.sizes = [size for size in SIZES if size < largest and not steady] + [largest]
        device = model.embed_tokens.device
        self.written = Rows(self.sizes, width, block_size, device)
        short = min(width, LONGEST // block_size)
        self.prompts = Rows(prompts, short, block_size, device) if prompts else None
        self.met: set[int] = set()  # sizes of prompts that have run
        self.pool: Any = None

    @property
    def graphs(self) -> dict[int, tuple[Graph, Tensor]]:
        """Of texts that are written, by size."""
        return self.written.graphs

    def replace(self, model: Decoder) -> None:
        """Go on with another model; what was captured knows the old one's memory."""
        self.model = model
        for rows in filter(None, (self.written, self.prompts)):
            rows.graphs.clear()
        self.pool = None  # it ends with the last of its graphs, and torch refuses to capture there

    def can_write(self, scheduled: list[Scheduled]) -> bool:
        """Whether a graph takes a step: one token for each sequence, sampled, and drafts."""
        return sum(s.sampled for s in scheduled) <= self.sizes[-1] and all(
            s.tokens == 1 and s.samples for s in scheduled
        )

    def can_read(self, scheduled: list[Scheduled]) -> bool:
        """Whether a graph takes a step that reads prompts; attention must be quick there."""
        if self.prompts is None or rows_of(scheduled) > self.prompts.sizes[-1]:
            return False
        seen = sum(s.tokens * (s.first + s.tokens) for s in scheduled if s.tokens > 1)
        return seen <= SEEN and max(len(s.seq.blocks) for s in scheduled) <= self.prompts.width

    def logits(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> Tensor:
        """Logits (B, vocabulary) of a step, valid until the next one.

        tokens (B,): on the device, if the host does not know them yet; negative ones run as 0.
        """
        self.written.fill(scheduled, tokens)
        return self._run(scheduled, self.written)

    def hidden(self, scheduled: list[Scheduled]) -> Tensor | None:
        """Hidden states (T, hidden) of a step that reads prompts, valid until the next one.

        None: it is the first of its size, which does not wait for a capture.
        """
        assert self.prompts is not None
        size = self.prompts.size(scheduled)
        if size not in self.met:
            self.met.add(size)
            return None
        self.prompts.fill(scheduled)
        return self._run(scheduled, self.prompts)

    def _run(self, scheduled: list[Scheduled], rows: Rows) -> Tensor:
        size = rows.size(scheduled)
        if size not in rows.graphs:
            rows.graphs[size] = self._capture(rows, size)
        graph, out = rows.graphs[size]
        graph.replay()
        return out[: rows_of(scheduled)]

    def _capture(self, rows: Rows, size: int) -> tuple[Graph, Tensor]:
        work = partial(self._forward, rows, size)
        if not rows.copied:
            recording = Recording(work)
            return recording, recording.out
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles what is not yet; also the batch's own K and V
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = work()
        self.pool = self.pool or graph.pool()
        return graph, out

    def _forward(self, rows: Rows, size: int) -> Tensor:
        tokens, batch = rows.batch(size)
        hidden = self.model(tokens, self.caches, batch)
        return hidden if rows is self.prompts else self.model.logits(hidden)


def rows_of(scheduled: list[Scheduled]) -> int:
    """Tokens of a step."""
    return sum(s.tokens + len(s.draft) for s in scheduled)
