"""Decode steps as CUDA graphs: one for each batch size of a few, captured when first needed."""

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.models.layers import Decoder
from anybit.engine.scheduler import Scheduled

SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 1025, 64))


class DecodeGraphs:
    """Replays the model on batches with one token for each sequence.

    A batch runs as the next larger size that is captured; its unused rows have slot -1 and context
    0, so they write nothing and see nothing. width: blocks of the longest sequence.
    """

    def __init__(
        self, model: Decoder, caches: list[LayerCache], block_size: int, largest: int, width: int
    ):
        self.model, self.caches, self.block_size = model, caches, block_size
        self.sizes = [size for size in SIZES if size < largest] + [largest]
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None
        device = model.embed_tokens.device
        # Token, position and slot of every row; context; blocks: on the host, and on the device.
        pin = device.type == "cuda"
        self.host = (
            torch.zeros(3, largest, dtype=torch.int64, pin_memory=pin),
            torch.zeros(largest, dtype=torch.int32, pin_memory=pin),
            torch.zeros(largest, width, dtype=torch.int32, pin_memory=pin),
        )
        self.device = [torch.zeros_like(t, device=device) for t in self.host]
        self.starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self.rows: list[tuple[list[int], int]] = [([], 0)] * largest  # blocks written to tables

    def can(self, scheduled: list[Scheduled]) -> bool:
        """Whether a step fits a graph: one token for each sequence, all of them sampled."""
        return len(scheduled) <= self.sizes[-1] and all(
            s.tokens == 1 and s.samples for s in scheduled
        )

    def logits(self, scheduled: list[Scheduled]) -> Tensor:
        """Logits (B, vocabulary) of a step, valid until the next one."""
        size = self.sizes[bisect_left(self.sizes, len(scheduled))]
        self._fill(scheduled, size)
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits[: len(scheduled)]

    def _fill(self, scheduled: list[Scheduled], size: int) -> None:
        """Write a batch to the device."""
        rows, contexts, tables = (t.numpy() for t in self.host)
        changed = False
        for i, s in enumerate(scheduled):
            seq, at = s.seq, s.seq.computed
            blocks = seq.blocks
            slot = blocks[at // self.block_size] * self.block_size + at % self.block_size
            rows[:, i] = seq.tokens[at], at, slot
            contexts[i] = at + 1
            known, count = self.rows[i]
            if known is not blocks or count != len(blocks):
                tables[i, : len(blocks)] = blocks
                self.rows[i], changed = (blocks, len(blocks)), True
        rows[:, len(scheduled) : size] = [[0], [0], [-1]]
        contexts[len(scheduled) : size] = 0
        self.device[0][:, :size].copy_(self.host[0][:, :size], non_blocking=True)
        self.device[1][:size].copy_(self.host[1][:size], non_blocking=True)
        if changed:
            self.device[2][:size].copy_(self.host[2][:size], non_blocking=True)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size)  # compiles what is not yet; also the batch's own K and V
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self._forward(size)
        self.pool = self.pool or graph.pool()
        return graph, logits

    def _forward(self, size: int) -> Tensor:
        (tokens, positions, slots), contexts, tables = self.device
        batch = Batch(
            positions=positions[:size],
            slots=slots[:size],
            tables=tables[:size],
            contexts=contexts[:size],
            starts=self.starts[: size + 1],
            queries=[1] * size,
            lengths=[],
            decodes=size,
        )
        return self.model.logits(self.model(tokens[:size], self.caches, batch))
