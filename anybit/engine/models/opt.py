"""OPT: learned positions, LayerNorms, and an MLP without a gate."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models.activations import activation
from anybit.engine.models.attention import Attention
from anybit.engine.models.layers import Decoder
from anybit.engine.models.parts import activation_of
from anybit.engine.models.rope import NoRope, Rope
from anybit.engine.weights import Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.state import LayerState

FIRST = 2  # row of the first position's embedding


class LayerNorm(nn.Module):
    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        self.size = (config.hidden_size,)
        self.weight = self.bias = None
        if config.layer_norm_elementwise_affine:
            self.weight = weights.tensor(f"{name}.weight", self.size)
            self.bias = weights.tensor(f"{name}.bias", self.size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.size, self.weight, self.bias)


class OPTBlock(nn.Module):
    """One decoder layer; norms come before attention and MLP, or after the sums with them."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        c, bias = config, bool(config.enable_bias)
        self.first = bool(c.do_layer_norm_before)
        self.act = activation_of(c)
        self.self_attn = Attention(
            weights,
            f"{name}.self_attn",
            c,
            bias,
            output_bias=bias,
            output="out_proj",
            every_head=True,
        )
        self.attention_norm = LayerNorm(weights, f"{name}.self_attn_layer_norm", c)
        self.mlp_norm = LayerNorm(weights, f"{name}.final_layer_norm", c)
        self.fc1 = weights.linear([f"{name}.fc1"], [c.ffn_dim], c.hidden_size, bias)
        self.fc2 = weights.linear([f"{name}.fc2"], [c.hidden_size], c.ffn_dim, bias)

    def forward(self, x: Tensor, rope: Rope, state: LayerState, batch: Batch) -> Tensor:
        y = self.attention_norm(x) if self.first else x
        x = x + self.self_attn(y, rope, state, batch)
        x = x if self.first else self.attention_norm(x)
        y = self.mlp_norm(x) if self.first else x
        x = x + self.fc2(activation(self.act)(self.fc1(y)))
        return x if self.first else self.mlp_norm(x)


class OPT(Decoder):
    prefix = "model.decoder"
    rope_class = NoRope

    def __init__(self, config: PretrainedConfig, weights: Weights, length: int):
        c, known = config, config.max_position_embeddings
        if length > known:
            raise InvalidInput(f"length={length}, and the model has {known} positions")
        super().__init__(config, weights, length)
        size, width = c.hidden_size, c.word_embed_proj_dim
        self.positions = weights.tensor(
            f"{self.prefix}.embed_positions.weight", (known + FIRST, size)
        )
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if width != size:
            self.project_in = weights.linear([f"{self.prefix}.project_in"], [size], width)
            self.project_out = weights.linear([f"{self.prefix}.project_out"], [width], size)

    def block(self, weights: Weights, name: str, index: int) -> OPTBlock:
        return OPTBlock(weights, name, self.config)

    def last_norm(self, weights: Weights) -> nn.Module:
        c = self.config
        if not c.do_layer_norm_before or c._remove_final_layer_norm:
            return nn.Identity()
        return LayerNorm(weights, f"{self.prefix}.final_layer_norm", c)

    @property
    def embedding_size(self) -> int:
        return int(self.config.word_embed_proj_dim)

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        x = self.project_in(self.words(tokens))
        x = x + F.embedding(batch.positions + FIRST, self.positions)
        for layer, rope, state in zip(self.layers, self.ropes, states, strict=True):
            x = layer(x, rope, state, batch)
        return self.project_out(self.norm(x))
