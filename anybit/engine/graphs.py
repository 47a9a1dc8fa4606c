"""Steps with few tokens as CUDA graphs, or recordings on a CPU: one for each of some sizes.

They are captured when first needed. Each token is a text by itself, which sees what the step writes
before it: so one graph takes texts that are written, drafts, and short prompts. The host spends as
much time on the launches of a prompt that no graph holds as a GPU does on hundreds of tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.models.layers import Decoder
from anybit.engine.recording import Recording
from anybit.engine.scheduler import Scheduled

Graph = torch.cuda.CUDAGraph | Recording
SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 1025, 64))
PROMPTS = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens of a step that reads prompts
SEEN = 1 << 17  # tokens that those of prompts see, each for itself: attention reads so many
LONGEST = 1 << 14  # tokens of the longest text beside them: with many rows one program reads it


class StepGraphs:
    """Replays the model on steps with few tokens.

    A step runs as the next larger size that is captured; its unused rows have slot -1 and context
    0, so they write nothing and see nothing. width: blocks of the longest sequence. steady: every
    batch of texts that are written runs as the largest. prompts: sizes of steps that read prompts.
    """

    def __init__(
        self, model: Decoder, caches: list[LayerCache], block_size: int, largest: int, width: int,
        steady: bool = False, prompts: Sequence[int] = (),
    ):  # fmt: skip
        self.model, self.caches, self.block_size = model, caches, block_size
        self.sizes = [size for size in SIZES if size < largest and not steady] + [largest]
        self.prompts = prompts
        # By size: of texts that are written, with logits; of prompts, with hidden states.
        self.graphs: dict[int, tuple[Graph, Tensor]] = {}
        self.readers: dict[int, tuple[Graph, Tensor]] = {}
        self.pool: Any = None
        device = model.embed_tokens.device
        largest = max(largest, *prompts, 0)
        # Of every row: token, position, slot and context; blocks. On the host, and on the device.
        pin = device.type == "cuda"
        self.host = [
            torch.zeros(n, dtype=torch.int32, pin_memory=pin)
            for n in (4 * largest, largest * width)
        ]
        self.device = [torch.zeros_like(t, device=device) for t in self.host]
        self.width = width
        self.copied = torch.cuda.Event() if pin else None  # the host's buffers to the device
        self.starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self.rows: list[tuple[list[int], int]] = [([], 0)] * largest  # blocks written to tables

    def replace(self, model: Decoder) -> None:
        """Go on with another model; what was captured knows the old one's memory."""
        self.model = model
        self.graphs.clear()
        self.readers.clear()
        self.pool = None  # it ends with the last of its graphs, and torch refuses to capture there

    def can(self, scheduled: list[Scheduled]) -> bool:
        """Whether a step fits a graph: one token for each sequence, sampled, and drafts."""
        return sum(s.sampled for s in scheduled) <= self.sizes[-1] and all(
            s.tokens == 1 and s.samples for s in scheduled
        )

    def can_read(self, scheduled: list[Scheduled]) -> bool:
        """Whether a step that reads prompts fits a graph, and its attention takes little time."""
        if not self.prompts or rows_of(scheduled) > self.prompts[-1]:
            return False
        seen = sum(s.tokens * (s.first + s.tokens) for s in scheduled if s.tokens > 1)
        return seen <= SEEN and max(s.first + s.tokens for s in scheduled) <= LONGEST

    def logits(self, scheduled: list[Scheduled], tokens: Tensor | None = None) -> Tensor:
        """Logits (B, vocabulary) of a step, valid until the next one.

        tokens (B,): on the device, if the host does not know them yet; negative ones run as 0.
        """
        return self._run(scheduled, False, tokens)

    def hidden(self, scheduled: list[Scheduled]) -> Tensor:
        """Hidden states (T, hidden) of a step that reads prompts, valid until the next one."""
        return self._run(scheduled, True)

    def _run(self, scheduled: list[Scheduled], reads: bool, tokens: Tensor | None = None) -> Tensor:
        graphs, sizes = (self.readers, self.prompts) if reads else (self.graphs, self.sizes)
        count = rows_of(scheduled)
        size = sizes[bisect_left(sizes, count)]
        self._fill(scheduled, size, tokens)
        if size not in graphs:
            graphs[size] = self._capture(size, reads)
        graph, out = graphs[size]
        graph.replay()
        return out[:count]

    def _fill(self, scheduled: list[Scheduled], size: int, tokens: Tensor | None) -> None:
        """Write a batch to the device."""
        if self.copied:
            self.copied.synchronize()  # of the step before, which may still be running
        rows = self.host[0].numpy()[: 4 * size].reshape(4, size)
        tables = self.host[1].numpy().reshape(-1, self.width)
        changed, i = False, 0
        for s in scheduled:
            blocks = s.seq.blocks
            given = () if tokens is not None else s.seq.tokens[s.first : s.first + s.tokens]
            for at, token in enumerate((*given, *s.draft) or (0,), s.first):
                slot = blocks[at // self.block_size] * self.block_size + at % self.block_size
                rows[:, i] = token, at, slot, at + 1
                known, count = self.rows[i]
                if known is not blocks or count != len(blocks):
                    tables[i, : len(blocks)] = blocks
                    self.rows[i], changed = (blocks, len(blocks)), True
                i += 1
        rows[:, i:] = [[0], [0], [-1], [0]]
        for which, count in ((0, 4 * size), (1, size * self.width * changed)):
            self.device[which][:count].copy_(self.host[which][:count], non_blocking=True)
        if self.copied:
            self.copied.record()
        if tokens is not None:
            torch.clamp_min(tokens, 0, out=self.device[0][:i])

    def _capture(self, size: int, reads: bool) -> tuple[Graph, Tensor]:
        if self.device[0].device.type == "cpu":
            recording = Recording(partial(self._forward, size, reads))
            return recording, recording.out
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size, reads)  # compiles what is not yet; also the batch's own K and V
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self._forward(size, reads)
        self.pool = self.pool or graph.pool()
        return graph, out

    def _forward(self, size: int, reads: bool) -> Tensor:
        tokens, positions, slots, contexts = self.device[0][: 4 * size].view(4, size)
        batch = Batch(
            positions=positions,
            slots=slots,
            tables=self.device[1][: size * self.width].view(size, self.width),
            contexts=contexts,
            starts=self.starts[: size + 1],
            queries=[1] * size,
            lengths=[],
            decodes=size,
        )
        hidden = self.model(tokens, self.caches, batch)
        return hidden if reads else self.model.logits(hidden)


def rows_of(scheduled: list[Scheduled]) -> int:
    """Tokens of a step."""
    return sum(s.tokens + len(s.draft) for s in scheduled)
