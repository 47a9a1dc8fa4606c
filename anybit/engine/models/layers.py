"""The parts that decoder-only language models are made of; each model's file says which."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anybit.engine.attention import Batch, LayerCache, attention
from anybit.engine.experts import OneByOne, experts_of
from anybit.engine.fused import add_norm, silu_mul
from anybit.engine.weights import Weights
from anybit.ops import Tokens

ACTIVATIONS = ("silu", "swish")  # two names of one function


class RMSNorm(nn.Module):
    """The norm of x + delta and that sum itself, since every norm ends a residual addition."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = weights.tensor(f"{name}.weight", (size,)), eps

    def forward(
        self, x: Tensor, delta: Tensor | None, activation: str | None
    ) -> tuple[Tensor | Tokens, Tensor]:
        return add_norm(x, delta, self.weight, self.eps, activation)


class Rope(nn.Module):
    """Rotary embedding: the cosines and sines of every position, in fp32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: PretrainedConfig, length: int, device: torch.device):
        super().__init__()
        parameters = config.rope_parameters
        kind = parameters["rope_type"]
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"rope type {kind!r} changes with a text's length, which a KV cache cannot follow; "
                "known: default, linear, llama3, yarn"
            )
        if kind == "default":
            dim = head_dim(config)
            frequency = parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
            factor = 1.0
        else:
            frequency, factor = ROPE_INIT_FUNCTIONS[kind](config)
        angle = torch.arange(length).float()[:, None] * frequency.float()
        self.register_buffer("cos", (angle.cos() * factor).to(device))
        self.register_buffer("sin", (angle.sin() * factor).to(device))


class Attention(nn.Module):
    """Grouped-query attention with one merged projection for Q, K and V.

    bias: of the Q, K and V projections; output_bias: of the output's. qk_norm: RMSNorm over each
    head of Q and K. window: tokens that a token sees, itself included.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ):
        super().__init__()
        hidden, dim = config.hidden_size, head_dim(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.dim, self.window = heads, dim, window
        names = [f"{name}.{part}_proj" for part in "qkv"]
        rows = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv_proj = weights.linear(names, rows, hidden, bias)
        self.o_proj = weights.linear([f"{name}.o_proj"], [hidden], heads * dim, output_bias)
        self.norms = None
        if qk_norm:
            q, k = (weights.tensor(f"{name}.{part}_norm.weight", (dim,)) for part in "qk")
            self.norms = (q, k, config.rms_norm_eps)
        self.scales = weights.kv_scales(name, (kv_heads, dim))

    def forward(self, x: Tensor | Tokens, rope: Rope, cache: LayerCache, batch: Batch) -> Tensor:
        tables, scale = (rope.cos, rope.sin), self.dim**-0.5
        qkv = self.qkv_proj(x)
        out = attention(qkv, self.heads, cache, batch, tables, scale, self.window, self.norms)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up merged. names: of the three projections."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        intermediate: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
    ):
        super().__init__()
        check_activation(config)
        hidden = config.hidden_size
        gate, up, down = (f"{name}.{part}" for part in names)
        self.gate_up_proj = weights.linear([gate, up], [intermediate] * 2, hidden, bias)
        self.down_proj = weights.linear([down], [hidden], intermediate, bias)

    def forward(self, x: Tensor | Tokens) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu_mul(gate, up, notation(self.down_proj)))


class MoE(nn.Module):
    """A mixture of experts: each token goes through the `top_k` that the router prefers.

    normalize: the chosen experts' weights add up to 1. names: of an expert's three projections.
    """

    ids: Tensor

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        experts: int,
        top_k: int,
        intermediate: int,
        normalize: bool,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ):
        super().__init__()
        check_activation(config)
        self.top_k, self.normalize, hidden = top_k, normalize, config.hidden_size
        self.gate = weights.linear([f"{name}.gate"], [experts], hidden)
        gate, up, down = ([f"{name}.experts.{i}.{part}" for i in range(experts)] for part in names)
        both = [list(pair) for pair in zip(gate, up, strict=True)]
        self.gate_up_projs = experts_of(weights, both, [intermediate] * 2, hidden)
        self.down_projs = experts_of(weights, [[name] for name in down], [hidden], intermediate)
        ids = torch.arange(experts + 1, device=weights.device)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).float().softmax(-1)
        weight, chosen = probs.topk(self.top_k, -1)
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(expert, self.ids, out_int32=True)
        gate, up = self.gate_up_projs(x[order // self.top_k], starts).chunk(2, -1)
        out = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        out[order] = self.down_projs(silu_mul(gate, up), starts)
        return (out.view(*chosen.shape, -1) * weight[..., None].to(x.dtype)).sum(1)


class Block(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and around a residual.

    Adding to the residual stream x is left to the next norm, which takes what is to be added.
    """

    def __init__(
        self, weights: Weights, name: str, config: PretrainedConfig, attention: Attention,
        mlp: nn.Module,
    ):  # fmt: skip
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(weights, f"{name}.input_layernorm", size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(
            weights, f"{name}.post_attention_layernorm", size, eps
        )
        self.mlp = mlp

    def forward(
        self, x: Tensor, delta: Tensor | None, rope: Rope, cache: LayerCache, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        y, x = self.input_layernorm(x, delta, notation(self.self_attn.qkv_proj))
        y = self.self_attn(y, rope, cache, batch)
        first = getattr(self.mlp, "gate_up_proj", None)  # a router wants its input as it is
        y, x = self.post_attention_layernorm(x, y, notation(first))
        return x, self.mlp(y)


class Decoder(nn.Module):
    """A decoder-only language model. A subclass says what a layer is (`block`)."""

    def __init__(self, config: PretrainedConfig, weights: Weights, length: int):
        super().__init__()
        self.config = config
        size, vocabulary = config.hidden_size, config.vocab_size
        self.embed_tokens = weights.tensor("model.embed_tokens.weight", (vocabulary, size))
        blocks = [
            self.block(weights, f"model.layers.{i}", i) for i in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(blocks)
        self.kv_scales = [block.self_attn.scales for block in blocks]
        self.norm = RMSNorm(weights, "model.norm", size, config.rms_norm_eps)
        self.lm_head = weights.head("lm_head", self.embed_tokens, config.tie_word_embeddings)
        self.rope = Rope(config, length, weights.device)

    def block(self, weights: Weights, name: str, index: int) -> Block:
        raise NotImplementedError(f"{type(self).__name__}.block")

    def forward(self, tokens: Tensor, caches: list[LayerCache], batch: Batch) -> Tensor:
        """Tokens (T,) -> hidden states (T, hidden); their K and V go into the caches."""
        x, delta = F.embedding(tokens, self.embed_tokens), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, delta = layer(x, delta, self.rope, cache, batch)
        return self.norm(x, delta, None)[0]

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the forward pass: nothing in it waits for the device."""
        return not any(isinstance(module, OneByOne) for module in self.modules())

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, hidden) -> logits (B, vocabulary)."""
        return self.lm_head(hidden)


def check_activation(config: PretrainedConfig) -> None:
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act={config.hidden_act!r} is unknown; known: {', '.join(ACTIVATIONS)}"
        )


def notation(layer: nn.Module | None) -> str | None:
    """In what a layer wants its input quantized; None for the model's dtype."""
    return getattr(layer, "activation", None)


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config: PretrainedConfig, index: int) -> int | None:
    """The sliding window of a layer, or None when it sees everything."""
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None
