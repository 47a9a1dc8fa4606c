"""What lies between products, by kernels that LLVM compiles for the processor."""

import torch
from torch import Tensor

from anybit.kernels.attention import Batch, Scores, gathered, prompts
from anybit.kernels.backend import Activations
from anybit.kernels.between import AS_IT_IS, Family, Unturned, Wanted, finished
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.native import attention, cache, dense, fused, rotation, viterbi
from anybit.kernels.native.recording import Recording


class Native(Family):
    side_by_side = False

    def about(self) -> str:
        return f"`native` compiles for {fused.level().name}"

    def runs_on(self, device: torch.device) -> bool:
        return fused.able()

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | Unturned | None,
        weight: Tensor,
        eps: float,
        wanted: Wanted = AS_IT_IS,
    ) -> tuple[Tensor | Activations, Tensor]:
        delta = None if delta is None else finished(delta)
        if not (fused.suits(x) if delta is None else fused.suits(x, delta)):
            return super().add_norm(x, delta, weight, eps)
        return fused.add_norm(x, delta, weight, eps)

    def silu_mul(
        self, gate: Tensor | Unturned, up: Tensor | Unturned, wanted: Wanted = AS_IT_IS
    ) -> Tensor | Activations:
        gate, up = finished(gate), finished(up)
        suits = fused.suits(up, gate)
        return fused.silu_mul(gate, up) if suits else super().silu_mul(gate, up)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        suits = fused.suits(up, gate)
        return fused.gelu_mul(gate, up) if suits else super().gelu_mul(gate, up)

    def rotate(self, x: Tensor, vector: Tensor, after: bool) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if not fused.suits(tokens) or not vector.is_contiguous():
            return super().rotate(x, vector, after)
        return rotation.rotate(tokens, vector, after).view(x.shape)

    placed = staticmethod(dense.placed)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        suits = dense.suits(x, weight)
        return dense.linear(x, weight, bias) if suits else super().linear(x, weight, bias)

    refuse_cache = staticmethod(cache.refuse)
    write = staticmethod(cache.write)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: Batch, scores: Scores, out: Tensor | None = None
    ) -> Tensor:
        if scores.mask is not None:  # the kernels have none
            return gathered(q, cache, batch, scores, out)
        n, longest = batch.decodes, batch.tables.shape[1] * cache.k.shape[2]
        out = torch.empty_like(q) if out is None else out
        if n:
            attention.attend(q[:n], cache, batch.single, longest, scores, out[:n])
        if n == len(batch.queries):
            return out
        if len(q) <= attention.MOST_TOKENS:
            return attention.attend(q, cache, batch.several, longest, scores, out)
        prompts(q, cache, batch, scores, out)
        return out

    record = staticmethod(Recording)

    paths = staticmethod(viterbi.paths)


FAMILY = Native()
