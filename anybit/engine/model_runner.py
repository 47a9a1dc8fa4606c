"""Runs a step: builds the batch's tensors, calls the model, samples."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.graphs import DecodeGraphs
from anybit.engine.models.layers import Decoder, head_dim
from anybit.engine.sampler import Sampled, sample
from anybit.engine.scheduler import Scheduled


class ModelRunner:
    """A model and its KV cache on one device. graphs: the largest batch to capture; 0: none."""

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        graphs: int = 0,
    ):
        self.model, self.block_size = model, block_size
        self.device = model.embed_tokens.device
        config = model.config
        self.caches = [
            LayerCache.empty(
                blocks,
                config.num_key_value_heads,
                block_size,
                head_dim(config),
                kv_dtype,
                self.device,
                scales,
            )
            for scales in model.kv_scales
        ]
        self.overlaps = self.device.type != "cpu"  # the host goes on while the device works
        capturable = self.overlaps and model.capturable and all(c.fused for c in self.caches)
        self.graphs = None
        if capturable and graphs:
            width = -(-model.rope.cos.shape[0] // block_size)
            self.graphs = DecodeGraphs(model, self.caches, block_size, graphs, width)

    def run(self, scheduled: list[Scheduled]) -> Sampled:
        """One step over sequences, those with one token first.

        Returns a token for each sequence whose end the step reaches, in order.
        """
        return self.launch(scheduled)()

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled]) -> Callable[[], Sampled]:
        """Start a step; the function that is returned waits for its tokens."""
        sampling = [s.seq for s in scheduled if s.samples]
        if self.graphs is not None and self.graphs.can(scheduled):
            logits = self.graphs.logits(scheduled)
        else:
            tokens, batch = self.prepare(scheduled)
            hidden = self.model(tokens, self.caches, batch)
            ends = itertools.accumulate(batch.queries)
            last = [end - 1 for s, end in zip(scheduled, ends, strict=True) if s.samples]
            if not last:
                return lambda: ([], [])
            rows = hidden if len(last) == len(hidden) else hidden[self._tensor(last)]
            logits = self.model.logits(rows)
        return sample(logits, sampling)

    def prepare(self, scheduled: list[Scheduled]) -> tuple[Tensor, Batch]:
        """The step's tokens, and what attention needs to know about them."""
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for s in scheduled:
            first, last = s.seq.computed, s.seq.computed + s.tokens
            tokens += s.seq.tokens[first:last]
            positions += range(first, last)
            slots += [s.seq.blocks[p // size] * size + p % size for p in range(first, last)]
        widest = max(len(s.seq.blocks) for s in scheduled)
        tables = [s.seq.blocks + [0] * (widest - len(s.seq.blocks)) for s in scheduled]
        lengths = [s.seq.computed + s.tokens for s in scheduled]
        queries = [s.tokens for s in scheduled]
        batch = Batch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            tables=self._tensor(tables, torch.int32),
            contexts=self._tensor(lengths, torch.int32),
            starts=self._tensor([0, *itertools.accumulate(queries)], torch.int32),
            queries=queries,
            lengths=lengths,
            decodes=queries.count(1),
        )
        return self._tensor(tokens), batch

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def block_bytes(model: Decoder, block_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one cache block over all layers, scales included."""
    config = model.config
    total = 0
    for scales in model.kv_scales:
        vectors = 2 * block_size * config.num_key_value_heads
        total += vectors * head_dim(config) * kv_dtype.itemsize
        if kv_dtype == torch.int8 and scales is None:
            total += vectors * 4
    return total
