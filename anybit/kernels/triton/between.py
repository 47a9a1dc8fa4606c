"""What lies between products, by Triton's kernels for GPUs."""

import torch
from torch import Tensor

from anybit.kernels.attention import Batch, Scores, gathered, prompts
from anybit.kernels.backend import HALVES, Activations, Pairs
from anybit.kernels.between import AS_IT_IS, Family, Unturned, Wanted, finished
from anybit.kernels.hopper import plain
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.recurrences import Scan
from anybit.kernels.scans import Ragged, Ring, Singles, Texts
from anybit.kernels.triton import (
    activation,
    attention,
    cache,
    likeliest,
    recurrent,
    routing,
    viterbi,
)


class Triton(Family):
    turns = 256

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | Unturned | None,
        weight: Tensor,
        eps: float,
        wanted: Wanted = AS_IT_IS,
    ) -> tuple[Tensor | Activations, Tensor]:
        if isinstance(delta, Unturned) and x.shape[1] > activation.WIDEST:
            delta = delta.turned
        if wanted.activation is None:
            return activation.add_norm(x, delta, weight, eps)
        codes, scale, total, x_sum = activation.quantize(
            x,
            wanted.activation,
            norm=(delta, weight, eps),
            sums=wanted.activation == "int8",
            vector=wanted.vector,
            pairs=wanted.pairs,
        )
        rotated = wanted.vector is not None
        return Activations(codes, scale, total, x.dtype, rotated, wanted.pairs), x_sum

    def silu_mul(
        self, gate: Tensor | Unturned, up: Tensor | Unturned, wanted: Wanted = AS_IT_IS
    ) -> Tensor | Activations:
        kind, vector, rotated, pairs = wanted
        y = up.y if isinstance(up, Unturned) else up
        if vector is None and y.shape[1] > activation.WIDEST:
            gate, up = finished(gate), finished(up)
        if kind is not None:
            made = activation.quantize(
                up, kind, gate=gate, sums=kind == "int8", vector=vector, pairs=pairs
            )
            return Activations(*made[:3], up.dtype, vector is not None, pairs)
        if rotated and vector is not None:
            nothing = y.new_empty(0)
            x = activation.rotate(up, vector, False, gate)
            return Activations(x, nothing, nothing, up.dtype, rotated=True)
        return activation.silu_mul(finished(gate), finished(up))

    def quantize(
        self, x: Tensor, kind: str, pairs: Pairs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return activation.quantize(x, kind, sums=kind == "int8", pairs=pairs)[:3]

    def rotate(self, x: Tensor, vector: Tensor, after: bool) -> Tensor:
        if x.dtype not in (*HALVES, torch.float32) or not vector.is_contiguous():
            return super().rotate(x, vector, after)
        return activation.rotate(x.reshape(-1, x.shape[-1]), vector, after).view(x.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        suits = plain.suits(x, weight)
        return plain.linear(x, weight, bias) if suits else super().linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        suits = plain.suits(x, weight)
        return plain.gated(x, weight, bias) if suits else super().gated(x, weight, bias)

    def likeliest(self, logits: Tensor, invalid: int) -> Tensor:
        if logits.stride(1) != 1:
            return super().likeliest(logits, invalid)
        return likeliest.likeliest(logits, invalid)

    def drawn(
        self, logits: Tensor, best: Tensor, temperature: Tensor, least: Tensor, keys: Tensor
    ) -> Tensor:
        if logits.stride(1) != 1:
            return super().drawn(logits, best, temperature, least, keys)
        return likeliest.drawn(logits, best, temperature, least, keys)

    columns = staticmethod(activation.columns)
    choose = staticmethod(routing.choose)
    sort = staticmethod(routing.sort)
    spread = staticmethod(routing.spread)
    combine = staticmethod(routing.combine)
    clamped = staticmethod(routing.clamped)
    refuse_cache = staticmethod(attention.refuse)
    write = staticmethod(cache.write)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: Batch, scores: Scores, out: Tensor | None = None
    ) -> Tensor:
        if scores.softcap is not None or scores.mask is not None:  # the kernels have none
            return gathered(q, cache, batch, scores, out)
        how, sinks = (scores.scale, scores.window), scores.sinks
        out, n = torch.empty_like(q) if out is None else out, batch.decodes
        if n:
            attention.attend(
                q[:n], cache, *batch.single, *how, out=out[:n], sinks=sinks, owners=batch.owners
            )
        # Torch's kernels are faster for whole prompts. A graph does not know its prompts' lengths.
        if batch.whole and scores.window is None and scores.sinks is None:
            prompts(q, cache, batch, scores, out)
        elif len(batch.queries) > n:
            attention.attend(q, cache, *batch.several, *how, out=out, sinks=sinks, first=n)
        return out

    def recur(
        self,
        scan: Scan,
        states: list[Tensor],
        x: Tensor,
        texts: Texts,
        rows: Tensor,
        seen: Tensor,
        to: Tensor | None,
    ) -> Tensor:
        if recurrent.known(scan) and isinstance(texts, Singles | Ring | Ragged):
            return recurrent.recur(scan, states, x, texts, rows, seen, to)
        return super().recur(scan, states, x, texts, rows, seen, to)

    def refuse_scan(self, scan: Scan) -> str | None:
        return None if recurrent.known(scan) else super().refuse_scan(scan)

    gated_norm = staticmethod(recurrent.gated_norm)
    paths = staticmethod(viterbi.paths)


FAMILY = Triton()
