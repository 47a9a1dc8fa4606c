"""Models of Mamba layers: pure, or beside attention (Bamba, Granite 4, Nemotron-H, Jamba)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models import UnknownModel
from anybit.engine.models.activations import activation
from anybit.engine.models.deepseek import MoEV3
from anybit.engine.models.granite import Granite
from anybit.engine.models.layers import ATTENTION_BIAS, Biases, Decoder, Norms
from anybit.engine.models.llama import Llama
from anybit.engine.models.parts import (
    MLP,
    Mixer,
    MoE,
    NormKind,
    RMSNorm,
    wanted_by,
)
from anybit.engine.models.recurrent import Mamba1, Mamba2, MambaSizes, mamba2
from anybit.engine.models.rope import NoRope, Rope, head_dim
from anybit.engine.weights import Weights
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Activations
from anybit.kernels.between import Routing
from anybit.kernels.state import LayerState

ATTENTION = ("full_attention", "attention")  # layer types; transformers has renamed them
MAMBA = ("linear_attention", "mamba")


def is_mamba(kind: str) -> bool:
    if kind not in (*ATTENTION, *MAMBA):
        raise UnknownModel(f"layer type {kind!r} is unknown")
    return kind in MAMBA


class Bamba(Llama):
    mlp_name = "feed_forward"
    norm_name = "final_layernorm"
    norms = Norms("input_layernorm", None, "pre_ff_layernorm", None)

    rope_options = {"partial": True}

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        if is_mamba(c.layers_block_type[index]):
            return mamba2(weights, f"{name}.mamba", c, int(c.mamba_expand * c.hidden_size))
        return super().mixer(weights, name, index)


class Jamba(Llama):
    """Mamba 1 and attention without positions; experts in some layers."""

    mlp_name = "feed_forward"
    norm_name = "final_layernorm"
    norms = Norms("input_layernorm", None, "pre_ff_layernorm", None)
    biases = Biases()

    rope_class = NoRope

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        if is_mamba(self.config.layers_block_type[index]):
            return Mamba1(weights, f"{name}.mamba", self.config)
        return super().mixer(weights, name, index)

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c, experts = self.config, self.config.layers_num_experts[index]
        if experts == 1:
            return super().mlp(weights, name, index)
        return MoE(
            weights,
            name,
            c,
            experts,
            c.num_experts_per_tok,
            c.intermediate_size,
            normalize=False,
            router="router",
        )


class ExpertsAndShared(nn.Module):
    """A mixture of experts, and an MLP that every token goes through."""

    def __init__(self, experts: nn.Module, shared: nn.Module):
        super().__init__()
        self.experts, self.shared = experts, shared

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared(x)


class GraniteHybrid(Granite):
    """Granite 4: Granite with Mamba 2 in most layers, mostly without positions."""

    @property
    def rope_class(self) -> type[Rope]:
        return Rope if self.config.position_embedding_type == "rope" else NoRope

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        c = self.config
        if is_mamba(c.layer_types[index]):
            return mamba2(weights, f"{name}.mamba", c, int(c.mamba_expand * c.hidden_size))
        return super().mixer(weights, name, index)

    mlp_name = ""  # there are two

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c = self.config
        experts, each = c.num_local_experts, c.num_experts_per_tok
        names = ("input_linear", "output_linear")
        shared = MLP(weights, f"{name}shared_mlp", c, c.shared_intermediate_size, names)
        if not experts:
            return shared
        moe = MoE(
            weights,
            f"{name}block_sparse_moe",
            c,
            experts,
            each,
            c.intermediate_size,
            normalize=True,
            router="router.layer",
        )
        return ExpertsAndShared(moe, shared)


class FalconMLP(MLP):
    """An MLP with multipliers of the gate and of the output."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__(
            weights, name, config, config.intermediate_size, bias=bool(config.mlp_bias)
        )
        self.of_gate, self.of_output = config.mlp_multipliers

    def forward(self, x: Tensor | Activations) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        y = activation(self.act)(gate * self.of_gate) * up
        return self.down_proj(y) * self.of_output


class FalconBlock(nn.Module):
    """Mamba 2 and attention side by side, then an MLP."""

    def __init__(self, model: Decoder, weights: Weights, name: str, attention: Mixer):
        super().__init__()
        c = model.config
        inner = int(c.mamba_expand * c.hidden_size) if c.mamba_d_ssm is None else c.mamba_d_ssm
        self.mamba = mamba2(
            weights,
            f"{name}.mamba",
            c,
            inner,
            norm=bool(c.mamba_rms_norm),
            gate_first=not c.mamba_norm_before_gate,
            scales=tuple(c.ssm_multipliers),
            bias=(bool(c.mamba_proj_bias), bool(c.mamba_conv_bias), bool(c.projectors_bias)),
        )
        self.self_attn = attention
        self.mlp = FalconMLP(weights, f"{name}.feed_forward", c)
        self.mixer_norm, self.mlp_norm = (
            model.norm_of(weights, f"{name}.{norm}")
            for norm in ("input_layernorm", "pre_ff_layernorm")
        )
        self.of_mamba = c.ssm_in_multiplier, c.ssm_out_multiplier
        self.of_attention = c.attention_in_multiplier, c.attention_out_multiplier

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rope,
        states: Iterator[LayerState],
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        y, x = self.mixer_norm(x, delta)
        pairs = (self.mamba, self.of_mamba), (self.self_attn, self.of_attention)
        a, b = (
            mixer(y * before, rope, next(states), batch) * after for mixer, (before, after) in pairs
        )
        y, x = self.mlp_norm(x, a + b)
        return x, self.mlp(y)


class FalconH1(Decoder):
    norm_name = "final_layernorm"
    biases = ATTENTION_BIAS

    @property
    def attention_options(self) -> dict[str, Any]:
        c = self.config
        return {"scale": head_dim(c) ** -0.5 * c.key_multiplier}  # of K, that is

    @property
    def embedding_scale(self) -> float:
        return float(self.config.embedding_multiplier)

    def block(self, weights: Weights, name: str, index: int) -> nn.Module:
        attention = self.attention(weights, f"{name}.self_attn", index)
        return FalconBlock(self, weights, name, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.config.lm_head_multiplier


class Single(nn.Module):
    """A norm, and one thing behind it: attention, Mamba 2, an MLP or experts."""

    def __init__(self, norm: RMSNorm, mixer: nn.Module):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rope,
        states: Iterator[LayerState],
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        y, x = self.norm(x, delta, wanted_by(getattr(self.mixer, "in_proj", None)))
        if isinstance(self.mixer, Mixer):
            return x, self.mixer(y, rope, next(states), batch)
        return x, self.mixer(y)


class PureMamba2(Decoder):
    """Mamba 2 alone. Sums of the residuals have the model's dtype, whatever residual_in_fp32 is."""

    prefix = "backbone"
    words_name = "embeddings"
    norm_name = "norm_f"

    rope_class = NoRope

    def block(self, weights: Weights, name: str, index: int) -> nn.Module:
        c, bias = self.config, bool(self.config.use_bias)
        sizes = MambaSizes(c.num_heads, c.head_dim, c.n_groups, c.state_size, c.conv_kernel)
        mixer = Mamba2(
            weights,
            f"{name}.mixer",
            c,
            sizes,
            int(c.expand * c.hidden_size),
            c.hidden_act,
            (bias, bool(c.use_conv_bias), bias),
        )
        return Single(self.norm_of(weights, f"{name}.norm"), mixer)


class Ungated(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig, intermediate: int):
        super().__init__()
        hidden, bias = config.hidden_size, bool(config.mlp_bias)
        self.in_proj = weights.linear([f"{name}.up_proj"], [intermediate], hidden, bias)
        self.down_proj = weights.linear([f"{name}.down_proj"], [hidden], intermediate, bias)
        self.act = activation(config.mlp_hidden_act)

    def forward(self, x: Tensor | Activations) -> Tensor:
        return self.down_proj(self.act(self.in_proj(x)))


class UngatedMoE(MoEV3):
    """Nemotron-H's experts have no gates; they are chosen as DeepSeek-V3's are."""

    gated = False

    def shared_experts(self, weights: Weights, name: str, config: PretrainedConfig) -> nn.Module:
        return Ungated(weights, name, config, config.moe_shared_expert_intermediate_size)

    def between(self, x: Tensor, routing: Routing) -> Tensor:
        return activation(self.act)(x)


class NemotronH(Decoder):
    prefix, base_name = "backbone", "model"
    words_name = "embeddings"
    norm_name = "norm_f"
    norm_kind = NormKind(wide=True)
    biases = ATTENTION_BIAS

    rope_class = NoRope

    def block(self, weights: Weights, name: str, index: int) -> nn.Module:
        mixer = self.part(weights, f"{name}.mixer", index)
        return Single(self.norm_of(weights, f"{name}.norm"), mixer)

    def part(self, weights: Weights, name: str, index: int) -> nn.Module:
        """What a layer has behind its norm."""
        c, kind = self.config, self.config.layers_block_type[index]
        if kind == "moe":
            return UngatedMoE(weights, name, c)
        if kind == "mlp":
            return Ungated(weights, name, c, c.intermediate_size)
        if not is_mamba(kind):
            return self.attention(weights, name, index)
        bias = bool(c.use_bias)
        sizes = MambaSizes(
            c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel
        )
        return Mamba2(
            weights,
            name,
            c,
            sizes,
            sizes.heads * sizes.dim,
            c.mamba_hidden_act,
            (bias, bool(c.use_conv_bias), bias),
        )
