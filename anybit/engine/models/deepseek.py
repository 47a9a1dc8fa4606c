"""DeepSeek-V2 and V3: latent attention, and experts chosen by groups. GLM-4.5: the latter."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.core.packed import Packed
from anybit.engine.experts import picked
from anybit.engine.lora import Adapted
from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import Biases, Decoder, Further
from anybit.engine.models.parts import MLP, Mixer, MoE
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch, Scores, rotate
from anybit.kernels.backend import Activations
from anybit.kernels.between import rms_norm
from anybit.kernels.kv.cache import Heads, LayerCache

EXPERT = ("gate_proj", "up_proj", "down_proj")
LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is


class LatentAttention(Mixer):
    """Attention over one latent vector for each token, and a rotated part that heads share.

    The cache holds both as one K head, and the latent alone as V. What expands latents to the K
    and V of every head (`kv_b_proj`) multiplies queries and outputs instead, in the model's dtype.
    """

    gathers = True  # no kernel has such heads

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        c, hidden = config, config.hidden_size
        self.heads, self.latent = c.num_attention_heads, c.kv_lora_rank
        self.rotary, self.plain, self.v_dim = c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
        bias, rank = bool(c.attention_bias), c.q_lora_rank
        rows = self.heads * (self.plain + self.rotary)
        if rank is None and bias:
            raise UnknownModel("attention_bias without q_lora_rank is unknown")
        if c.num_key_value_heads != self.heads:
            raise UnknownModel("heads of Q and K of different numbers are unknown in a latent")
        self.sizes = [rows if rank is None else rank, self.latent, self.rotary]
        first = "q_proj" if rank is None else "q_a_proj"
        self.in_proj = weights.linear(
            [f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"],
            [self.sizes[0], self.latent + self.rotary],
            hidden,
            bias,
        )
        self.q_norm: Tensor | None = None
        self.q_proj: nn.Module = nn.Identity()
        if rank is not None:
            self.q_norm = weights.tensor(f"{name}.q_a_layernorm.weight", (rank,))
            self.q_proj = weights.linear([f"{name}.q_b_proj"], [rows], rank)
        self.norm = weights.tensor(f"{name}.kv_a_layernorm.weight", (self.latent,))
        shape = (self.heads * (self.plain + self.v_dim), self.latent)
        expand = weights.part(f"{name}.kv_b_proj", shape, False)[0]
        if isinstance(expand, Packed):
            expand = expand.dequantize().to(weights.dtype)
        expand = expand.view(self.heads, -1, self.latent)
        self.to_k, self.to_v = expand[:, : self.plain], expand[:, self.plain :]
        self.o_proj = weights.linear([f"{name}.o_proj"], [hidden], self.heads * self.v_dim, bias)
        self.scores = Scores(score_scale(c))

    @property
    def memory(self) -> Heads:
        return Heads(1, self.latent + self.rotary)

    def forward(
        self, x: Tensor | Activations, rope: Rope, cache: LayerCache, batch: Batch
    ) -> Tensor:
        q, latent, shared = self.in_proj(x).split(self.sizes, 1)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm, LATENT_EPS)
        plain, rotary = (
            self.q_proj(q).unflatten(1, (self.heads, -1)).split([self.plain, self.rotary], 2)
        )
        latent = rms_norm(latent, self.norm, LATENT_EPS)
        cos, sin = (table[batch.positions, None] for table in (rope.cos, rope.sin))
        rotary, shared = (
            rotate(t if rope.order is None else t[..., rope.order], cos, sin)
            for t in (rotary, shared[:, None])
        )
        query = torch.cat([torch.einsum("thd,hdl->thl", plain, self.to_k), rotary], 2)
        value = F.pad(latent, (0, self.rotary))
        qkv = torch.cat([query.flatten(1), latent, shared[:, 0], value], 1)
        out = cache.attend(qkv, self.heads, batch, None, self.scores)[..., : self.latent]
        return self.o_proj(torch.einsum("thl,hdl->thd", out, self.to_v).flatten(1))


class GroupedMoE(MoE):
    """Experts of the best groups alone, and shared experts that every token goes through."""

    gated = True  # whether experts are

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        c = config
        super().__init__(
            weights,
            name,
            c,
            c.n_routed_experts,
            c.num_experts_per_tok,
            c.moe_intermediate_size,
            normalize=bool(c.norm_topk_prob),
            names=EXPERT[not self.gated :],
            gated=self.gated,
        )
        if isinstance(self.gate, Adapted):
            raise InvalidInput(
                f"an adapter changes {name}.gate, where the engine takes none; merge it into the "
                "model"
            )
        self.shared = self.shared_experts(weights, f"{name}.shared_experts", c)
        self.groups, self.best, self.factor = c.n_group, c.topk_group, c.routed_scaling_factor

    def shared_experts(self, weights: Weights, name: str, config: PretrainedConfig) -> nn.Module:
        c = config
        size = c.moe_intermediate_size * c.n_shared_experts
        return MLP(weights, name, c, size, bias=mlp_bias(c))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)

    def allowed(self, scores: Tensor, each: int) -> Tensor:
        """Mask of the experts (T, experts) in the best groups, by their `each` best scores."""
        grouped = scores.unflatten(1, (self.groups, -1))
        best = grouped.topk(each, -1).values.sum(-1).topk(self.best, -1).indices
        mask = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return mask[..., None].expand_as(grouped).flatten(1)

    def logits(self, x: Tensor) -> Tensor:
        """Of the router, in fp32."""
        weight = self.gate.weight
        assert isinstance(weight, Tensor)
        return F.linear(x.float(), weight.float())


class MoEV2(GroupedMoE):
    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__(weights, name, config)
        self.limited = config.topk_method == "group_limited_greedy"

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.logits(x).softmax(-1)
        if self.limited:
            scores = scores.masked_fill(~self.allowed(scores, 1), 0)
        weight, chosen = scores.topk(self.top_k, -1)
        return weight * self.factor, chosen


class MoEV3(GroupedMoE):
    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__(weights, name, config)
        bias = f"{name}.gate.e_score_correction_bias"
        self.correction = weights.tensor(bias, (config.n_routed_experts,), torch.float32)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.logits(x).sigmoid()
        choice = scores + self.correction
        choice = choice.masked_fill(~self.allowed(choice, 2), float("-inf"))
        weight, chosen = picked(scores, choice, self.top_k, self.normalize, 1e-20)
        return weight * self.factor, chosen


class DeepseekV2(Decoder):
    moe: type[GroupedMoE] = MoEV2

    @property
    def rope_options(self) -> dict[str, Any]:
        return {"interleaved": getattr(self.config, "rope_interleave", True)}

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        return LatentAttention(weights, name, self.config)

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        if index >= c.first_k_dense_replace:
            return self.moe(weights, name, c)
        return MLP(weights, name, c, c.intermediate_size, bias=mlp_bias(c))


class DeepseekV3(DeepseekV2):
    moe = MoEV3

    @classmethod
    def further(cls, config: PretrainedConfig) -> Further:
        count = config.num_hidden_layers
        names = "enorm", "hnorm", "eh_proj", "shared_head.norm"
        at = f"{cls.prefix}.layers.{count}"
        return Further(at, at, *names, count - 1)


class Glm4Moe(DeepseekV3):
    """GLM-4.5: plain attention, a part of each head rotated."""

    biases = Biases("attention_bias")
    rope_options = {"partial": True}
    attention = Decoder.attention

    @property
    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm": bool(self.config.use_qk_norm)}


def mlp_bias(config: PretrainedConfig) -> bool:
    """Whether MLPs have biases; V2 alone may."""
    return config.model_type == "deepseek_v2" and bool(config.mlp_bias)


def score_scale(config: PretrainedConfig) -> float:
    """What scores are multiplied by; larger with yarn's `mscale_all_dim`."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    exponent = rope.get("mscale_all_dim", 0)
    if rope["rope_type"] != "default" and exponent and rope["factor"] > 1:
        scale *= (0.1 * exponent * math.log(rope["factor"]) + 1) ** 2
    return float(scale)
