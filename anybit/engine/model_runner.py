"""Runs a step: builds the batch's tensors, calls the model, samples."""

import torch
from torch import Tensor

from anybit.engine.attention import Batch, LayerCache
from anybit.engine.models.layers import Decoder, head_dim
from anybit.engine.sampler import sample
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Logprob


class ModelRunner:
    """A model and its KV cache on one device."""

    def __init__(self, model: Decoder, blocks: int, block_size: int, kv_dtype: torch.dtype):
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

    @torch.inference_mode()
    def run(self, scheduled: list[Scheduled]) -> tuple[list[int], list[Logprob | None]]:
        """One step over sequences, those with one token first.

        Returns a token for each sequence whose end the step reaches, in order.
        """
        tokens, batch = self.prepare(scheduled)
        hidden = self.model(tokens, self.caches, batch)
        last, at = [], -1
        for s in scheduled:
            at += s.tokens
            if s.samples:
                last.append(at)
        if not last:
            return [], []
        rows = hidden if len(last) == len(hidden) else hidden[self._tensor(last)]
        return sample(self.model.logits(rows), [s.seq for s in scheduled if s.samples])

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
        batch = Batch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            tables=self._tensor(tables, torch.int32),
            contexts=self._tensor(lengths, torch.int32),
            queries=[s.tokens for s in scheduled],
            lengths=lengths,
            decodes=sum(s.tokens == 1 for s in scheduled),
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
