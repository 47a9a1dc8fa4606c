"""Grouped-query attention of the engine's models."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models.parts import PLAIN, Mixer, NormKind, leave, norm_eps, norm_weight
from anybit.engine.models.rope import Rope, head_dim
from anybit.engine.weights import Weights, bias_of
from anybit.kernels.attention import Batch, Scores
from anybit.kernels.backend import Activations
from anybit.kernels.between import Unturned, finished, of, rms_norm
from anybit.kernels.kv.cache import Heads, LayerCache, rms_of_heads


class Attention(Mixer):
    """Grouped-query attention with one merged projection for Q, K and V.

    Args:
        bias: Of the Q, K and V projections.
        output_bias: Of the output's.
        qk_norm: RMSNorm over each head of Q and K; "whole": over all heads together.
        window: Tokens that a token sees, itself included.
        scale: Of the scores; 1 / sqrt(head_dim) if None.
        softcap: Scores are softcap * tanh(score / softcap).
        names: Of the projections that are merged; a checkpoint may hold them merged already.
        output: Name of the output's projection.
        every_head: Each head of Q has its own K and V, whatever config.json says.
        norm: Kind of qk_norm.
        sinks: Each head has a score for a key without a value.
        norm_names: Of qk_norm, Q's and K's.
        gated: Each head of Q is followed by a gate of the head's output, before a sigmoid.
        width: Of what goes into Q, K and V; the model's if None.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool | str = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        output: str = "o_proj",
        every_head: bool = False,
        norm: NormKind = PLAIN,
        sinks: bool = False,
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        gated: bool = False,
        width: int | None = None,
    ):
        super().__init__()
        hidden, dim = config.hidden_size, head_dim(config)
        heads = config.num_attention_heads
        kv_heads = heads if every_head else config.num_key_value_heads
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        own = weights.tensor(f"{name}.sinks", (heads,)) if sinks else None
        self.scores = Scores(dim**-0.5 if scale is None else scale, window, softcap, own)
        self.gathers, self.gated = softcap is not None, gated  # kernels have no soft caps
        self.columns: Tensor | None = None  # of the projections' outputs, where they move
        self.device, self.dtype = weights.device, weights.dtype
        rows = [(1 + gated) * heads * dim, kv_heads * dim, kv_heads * dim]
        rows = rows if len(names) > 1 else [sum(rows)]
        merged = [f"{name}.{part}" for part in names]
        self.qkv_proj = self.in_proj = weights.linear(merged, rows, width or hidden, bias)
        self.o_proj = weights.linear([f"{name}.{output}"], [hidden], heads * dim, output_bias)
        leave(self.qkv_proj)
        self.norms = self.whole_norms = None
        if qk_norm:
            sizes = (heads * dim, kv_heads * dim) if qk_norm == "whole" else (dim, dim)
            q, k = (
                norm_weight(weights, f"{name}.{part}", size, norm)
                for part, size in zip(norm_names, sizes, strict=True)
            )
            norms = (q, k, norm_eps(config))
            self.norms, self.whole_norms = (None, norms) if qk_norm == "whole" else (norms, None)
        self.scales = weights.kv_scales(name, (kv_heads, dim))

    @property
    def last(self) -> nn.Module:
        return self.o_proj

    @property
    def memory(self) -> Heads:
        added, size, largest = bias_of(self.qkv_proj), self.kv_heads * self.dim, 0.0
        if added is not None and not added.is_meta:
            largest = rms_of_heads(added[-2 * size : -size], self.dim)
        return Heads(self.kv_heads, self.dim, self.scales, largest, self.dtype)

    def forward(
        self, x: Tensor | Activations, rope: Rope, cache: LayerCache, batch: Batch
    ) -> Tensor | Unturned:
        qkv, gate = self.qkv_proj(x), None
        if self.gated or self.whole_norms is not None or self.columns is not None:
            qkv = finished(qkv)
        if self.whole_norms is not None:
            qkv = self._normed(qkv)
        if self.columns is not None:
            qkv = of(qkv).columns(qkv, self.columns)
        if self.gated:
            qkv, gate = qkv.tensor_split([(self.heads + 2 * self.kv_heads) * self.dim], 1)
        tables = (rope.cos, rope.sin)
        out = cache.attend(qkv, self.heads, batch, tables, self.scores, self.norms)
        out = out.flatten(1)
        return self.o_proj(out if gate is None else out * gate.sigmoid())

    def arrange(self, order: Tensor | None) -> None:
        if order is not None or self.gated:  # products of Q and K do not depend on rope's order
            self.columns = self._columns(order)
        if order is not None and self.norms is not None:
            q, k, eps = self.norms
            self.norms = q[order], k[order], eps
        if order is not None and self.scales is not None:
            self.scales = self.scales[0][:, order], self.scales[1]

    def _columns(self, order: Tensor | None) -> Tensor:
        """Where Q and K in rope's order, V and gates are among the projections' outputs."""
        each, dim = 1 + self.gated, self.dim
        sizes = [each * self.heads * dim, self.kv_heads * dim, self.kv_heads * dim]
        places = torch.arange(sum(sizes), dtype=torch.int32, device=self.device).split(sizes)
        (q, gate), k = places[0].view(-1, each, dim).tensor_split([1], 1), places[1].view(-1, dim)
        if order is not None:
            q, k = q[..., order], k[:, order]
        return torch.cat([t.flatten() for t in (q, k, places[2], gate)])

    def _normed(self, qkv: Tensor) -> Tensor:
        """Norm Q and K over all their heads."""
        assert self.whole_norms is not None
        q_weight, k_weight, eps = self.whole_norms
        q, k, v = qkv.split([len(q_weight), len(k_weight), len(k_weight)], 1)
        return torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v], 1)
