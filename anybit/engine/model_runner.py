"""Runs a step: builds the batch's tensors, calls the model, samples."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.graphs import DecodeGraphs
from anybit.engine.models.layers import Decoder
from anybit.engine.prompts import read_prompts
from anybit.engine.sampler import Sampled, sample
from anybit.engine.scheduler import Scheduled

# Sequences of a recorded step on a CPU. A larger step spends little of its time between products.
MOST_RECORDED = 4
STEADY = 32  # of a steady step on a GPU


@dataclass(frozen=True)
class Flight:
    """A step that was started. tokens: on the device, of the sequences that sample.

    wait: waits for them. None if there are none.
    """

    scheduled: list[Scheduled]
    tokens: Tensor | None
    wait: Callable[[], Sampled]


class Runner(Protocol):
    """Runs steps for the engine. overlaps: whether a step may start before the last one's end.

    reads_prompts: whether it gives log probabilities and hidden states of prompts.
    """

    @property
    def overlaps(self) -> bool: ...

    @property
    def reads_prompts(self) -> bool: ...

    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step over sequences, after `previous` if that still runs."""


class ModelRunner:
    """A model and its KV cache on one device.

    graphs: the largest batch to capture; 0: none. steady: decode steps are all of the same shape.

    Attributes:
        rows: Texts that a steady decode step writes at once.
    """

    reads_prompts = True

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        graphs: int = 0,
        steady: bool = False,
    ):
        self.model, self.block_size = model, block_size
        self.device = model.embed_tokens.device
        self.caches = [
            LayerCache.empty(blocks, heads, block_size, dim, kv_dtype, self.device, scales)
            for (heads, dim), scales in zip(model.cache_shapes, model.kv_scales, strict=True)
        ]
        self.overlaps = self.device.type != "cpu"  # the host goes on while the device works
        by_kernels = all(c.fused or c.native for c in self.caches)
        self.graphs = None
        if model.capturable and by_kernels and graphs:
            if not self.overlaps:
                graphs = min(graphs, MOST_RECORDED)
            elif steady:
                graphs = min(graphs, STEADY)
            width = -(-model.length // block_size)
            self.graphs = DecodeGraphs(model, self.caches, block_size, graphs, width, steady)
        self.rows = graphs if self.graphs else 1

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step over sequences, those with one token first.

        A token is sampled for each sequence whose end the step reaches, in order. previous: a step
        that still runs, whose tokens this one continues; it has sampled for all its sequences.
        """
        # Kernels, streams and graphs are those of the current device, which is a thread's own.
        with torch.accelerator.device_index(self.device.index):
            sampling = [s.seq for s in scheduled if s.samples]
            given = None if previous is None else self._continued(scheduled, previous)
            reading = any(s.reads_prompt for s in scheduled)
            adapters = self.model.adapters
            adapted = adapters is not None and adapters.select(scheduled, self.device)
            by_graph = self.graphs is not None and not reading and not adapted
            if by_graph and self.graphs.can(scheduled):
                logits = self.graphs.logits(scheduled, given)
            else:
                tokens, batch = self.prepare(scheduled, given)
                hidden = self.model(tokens, self.caches, batch)
                if reading:
                    read_prompts(self.model, hidden, scheduled)
                ends = itertools.accumulate(batch.queries)
                last = [end - 1 for s, end in zip(scheduled, ends, strict=True) if s.samples]
                if not last:
                    return Flight(scheduled, None, lambda: ([], []))
                rows = hidden if len(last) == len(hidden) else hidden[self._tensor(last)]
                logits = self.model.logits(rows)
            return Flight(scheduled, *sample(logits, sampling))

    def replace(self, model: Decoder) -> None:
        """Go on with another model of the same shapes, on the same cache."""
        self.model = model
        if self.graphs is not None:  # they know the old one's memory
            self.graphs.model = model
            self.graphs.graphs.clear()

    def _continued(self, scheduled: list[Scheduled], previous: Flight) -> Tensor:
        """The tokens that a step samples, INVALID among them, for the sequences that go on."""
        assert previous.tokens is not None
        if len(scheduled) == len(previous.scheduled):
            return previous.tokens
        rows = {s.seq: i for i, s in enumerate(previous.scheduled)}
        return previous.tokens[self._tensor([rows[s.seq] for s in scheduled])]

    def prepare(
        self, scheduled: list[Scheduled], given: Tensor | None = None
    ) -> tuple[Tensor, Batch]:
        """The step's tokens, and what attention needs to know about them.

        given: the tokens, if the host does not know them yet.
        """
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for s in scheduled:
            first, last = s.first, s.first + s.tokens
            tokens += s.seq.tokens[first:last]
            positions += range(first, last)
            slots += [s.seq.blocks[p // size] * size + p % size for p in range(first, last)]
        widest = max(len(s.seq.blocks) for s in scheduled)
        tables = [s.seq.blocks + [0] * (widest - len(s.seq.blocks)) for s in scheduled]
        lengths = [s.first + s.tokens for s in scheduled]
        queries = [s.tokens for s in scheduled]
        batch = Batch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            tables=self._tensor(tables),
            contexts=self._tensor(lengths),
            starts=self._tensor([0, *itertools.accumulate(queries)]),
            queries=queries,
            lengths=lengths,
            decodes=queries.count(1),
        )
        # INVALID runs as any other; nobody will read what comes of it.
        return self._tensor(tokens) if given is None else given.clamp_min(0), batch

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)


def block_bytes(model: Decoder, block_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one cache block over all layers, scales included."""
    total = 0
    for (heads, dim), scales in zip(model.cache_shapes, model.kv_scales, strict=True):
        vectors = 2 * block_size * heads
        total += vectors * dim * kv_dtype.itemsize
        if kv_dtype == torch.int8 and scales is None:
            total += vectors * 4
    return total
