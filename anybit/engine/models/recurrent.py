"""Layers that keep a state for each text: short convolutions, Mamba 2, the gated delta rule."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models import UnknownModel
from anybit.engine.models.activations import activation
from anybit.engine.models.layers import Mixer, norm_eps
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Activations
from anybit.kernels.between import rms_norm
from anybit.kernels.scans import Texts, convolved, delta_rule, selective, state_space
from anybit.kernels.state import Recurrence, RowStates

State = tuple[tuple[int, ...], torch.dtype]


class Convolution(nn.Module):
    """A sum over each token and the few before it, for each channel by itself."""

    def __init__(self, weights: Weights, name: str, channels: int, size: int, bias: bool):
        super().__init__()
        if size < 1:
            raise InvalidInput(f"config.json: a convolution of {size} tokens; it has at least 1")
        if size == 1:
            raise UnknownModel("a convolution of single tokens is unknown")
        self.weight = weights.tensor(f"{name}.weight", (channels, 1, size))[:, 0]
        self.bias = weights.tensor(f"{name}.bias", (channels,)) if bias else None

    @property
    def window(self) -> State:
        """What it keeps of a text."""
        channels, size = self.weight.shape
        return (size - 1, channels), self.weight.dtype

    def forward(self, window: Tensor, x: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
        return convolved(window, x, self.weight, self.bias, texts)


class ShortConv(Mixer):
    """LFM2's: a convolution between two gates."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        size, bias = config.hidden_size, bool(config.conv_bias)
        self.in_proj = weights.linear([f"{name}.in_proj"], [3 * size], size, bias)
        self.conv = Convolution(weights, f"{name}.conv", size, config.conv_L_cache, bias)
        self.out_proj = weights.linear([f"{name}.out_proj"], [size], size, bias)

    @property
    def memory(self) -> Recurrence:
        size, dtype = len(self.conv.weight), self.conv.weight.dtype
        return Recurrence((self.conv.window,), ((size, dtype),))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, 1)
        return self.out_proj(after * state.advance(self.scan, before * x, batch))

    def scan(self, states: list[Tensor], x: Tensor, texts: Texts) -> tuple[Tensor, list[Tensor]]:
        out, window = self.conv(states[0], x, texts)
        return texts.flat(out), [window]


class GatedNorm(nn.Module):
    """RMSNorm of groups of channels, with a gate of its input or of its output.

    groups: None: there is no norm. shared: whether all groups have the same weight.
    """

    def __init__(
        self, weights: Weights, name: str, size: int, groups: int | None, eps: float,
        gate_first: bool, shared: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.groups, self.eps, self.gate_first, self.weight = groups, eps, gate_first, None
        if groups is not None:
            own = size // groups if shared else size
            self.weight = weights.tensor(f"{name}.weight", (own,)).view(-1, size // groups)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x (T, N) in fp32, in the dtype of the gate."""
        by = F.silu(gate.float())
        if self.weight is None or self.groups is None:
            return (x * by).to(gate.dtype)
        x = (x * by if self.gate_first else x).unflatten(1, (self.groups, -1))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        x = (x * self.weight.float()).flatten(1)
        return (x if self.gate_first else x * by).to(gate.dtype)


class MambaSizes(NamedTuple):
    """Of a Mamba 2 layer: heads and their channels, groups of heads, channels of B and C, tokens
    of the convolution."""

    heads: int
    dim: int
    groups: int
    states: int
    window: int


class Mamba2(Mixer):
    """Mamba 2: heads whose states decay as each token says.

    Args:
        sizes: Of the layer.
        inner: Channels that all heads have together by what else config.json says.
        act: Behind the convolution.
        bias: Of the input's projection, the convolution, and the output's.
        limits: Of the time steps.
        norm: Whether there is one before the output's projection.
        gate_first: Whether the gate comes before that norm.
        eps: Of the norm.
        scales: Of the projection's outputs: gate, x, B, C, time steps.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        sizes: MambaSizes,
        inner: int,
        act: str,
        bias: tuple[bool, bool, bool],
        limits: tuple[float, float],
        eps: float,
        norm: bool = True,
        gate_first: bool = True,
        scales: tuple[float, ...] | None = None,
    ):
        super().__init__()
        heads, dim, groups, states, window = sizes
        if inner != heads * dim or heads % groups:
            raise InvalidInput(
                f"config.json: {heads} heads of Mamba in {groups} groups, of {dim} channels each "
                f"and {inner} together; groups are equally large, and so are heads"
            )
        if tuple(limits) != (0.0, float("inf")):
            raise UnknownModel(f"time steps within {tuple(limits)} are unknown")
        self.sizes, self.act = sizes, activation(act)
        hidden = config.hidden_size
        self.parts = [inner, groups * states, groups * states, heads]  # x, B, C, time steps
        mixed = sum(self.parts[:3])
        self.in_proj = weights.linear([f"{name}.in_proj"], [inner + mixed + heads], hidden, bias[0])
        self.conv = Convolution(weights, f"{name}.conv1d", mixed, window, bias[1])
        self.a, self.d, self.dt_bias = (
            weights.tensor(f"{name}.{part}", (heads,), torch.float32).view(groups, -1)
            for part in ("A_log", "D", "dt_bias")
        )
        self.a = -self.a.exp()
        self.norm = GatedNorm(
            weights, f"{name}.norm", inner, groups if norm else None, eps, gate_first
        )
        self.out_proj = weights.linear([f"{name}.out_proj"], [hidden], inner, bias[2])
        self.scale = None
        if scales is not None and set(scales) != {1.0}:
            each = torch.tensor(scales, dtype=weights.dtype, device=weights.device)
            counts = torch.tensor([inner, *self.parts], device=weights.device)
            self.scale = each.repeat_interleave(counts, output_size=inner + mixed + heads)

    @property
    def memory(self) -> Recurrence:
        heads, dim, groups, states, _ = self.sizes
        shape = groups, heads // groups, dim, states
        inputs = sum(self.parts), self.conv.weight.dtype
        return Recurrence((self.conv.window, (shape, torch.float32)), (inputs,))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        found = self.in_proj(x)
        found = found if self.scale is None else found * self.scale
        gate, rest = found.tensor_split([self.parts[0]], 1)
        return self.out_proj(self.norm(state.advance(self.scan, rest, batch), gate))

    def scan(self, states: list[Tensor], x: Tensor, texts: Texts) -> tuple[Tensor, list[Tensor]]:
        """From x, B, C and time steps (T, N) to outputs (T, inner) in fp32."""
        mixed, dt = x.split([sum(self.parts[:3]), self.parts[3]], 1)
        mixed, window = self.conv(states[0], mixed, texts)
        groups = self.sizes.groups
        x, b, c = (
            t.float().unflatten(2, (groups, -1)) for t in self.act(mixed).split(self.parts[:3], 2)
        )
        x = x.unflatten(3, (-1, self.sizes.dim))
        dt = texts.pieces(dt).float().unflatten(2, (groups, -1))
        dt = F.softplus(dt + self.dt_bias)
        out, state = state_space(states[1], x, dt, self.a, b, c, texts)
        return texts.flat((out + x * self.d[..., None]).flatten(2)), [window, state]


def mamba2(
    weights: Weights, name: str, config: PretrainedConfig, inner: int, **options: Any
) -> Mamba2:
    """The layer of models whose fields begin with `mamba_`.

    inner: channels that its heads have together. options: as of `Mamba2`.
    """
    c = config
    sizes = MambaSizes(
        c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv
    )
    bias = bool(c.mamba_proj_bias)
    given = {"bias": (bias, bool(c.mamba_conv_bias), bias)} | options
    return Mamba2(
        weights, name, c, sizes, inner, c.hidden_act, limits=c.time_step_limit, eps=norm_eps(c),
        **given,
    )  # fmt: skip


class Mamba1(Mixer):
    """Jamba's Mamba 1: channels whose states decay as each token says, and norms within."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        c, hidden, bias = config, config.hidden_size, bool(config.mamba_proj_bias)
        self.act = activation(c.hidden_act)
        self.inner = inner = c.mamba_expand * hidden
        self.parts = [c.mamba_dt_rank, c.mamba_d_state, c.mamba_d_state]  # time steps, B, C
        self.in_proj = weights.linear([f"{name}.in_proj"], [2 * inner], hidden, bias)
        conv = f"{name}.conv1d"
        self.conv = Convolution(weights, conv, inner, c.mamba_d_conv, bool(c.mamba_conv_bias))
        self.x_proj = weights.linear([f"{name}.x_proj"], [sum(self.parts)], inner)
        self.dt_proj = weights.linear([f"{name}.dt_proj"], [inner], c.mamba_dt_rank)
        self.dt_bias, self.d = (
            weights.tensor(f"{name}.{part}", (inner,), torch.float32)
            for part in ("dt_proj.bias", "D")
        )
        self.a = -weights.tensor(f"{name}.A_log", (inner, c.mamba_d_state), torch.float32).exp()
        self.norms, self.eps = (
            [
                weights.tensor(f"{name}.{part}_layernorm.weight", (size,))
                for part, size in zip(("dt", "b", "c"), self.parts, strict=True)
            ],
            norm_eps(c),
        )
        self.out_proj = weights.linear([f"{name}.out_proj"], [hidden], inner, bias)

    @property
    def memory(self) -> Recurrence:
        states = self.conv.window, (tuple(self.a.shape), torch.float32)
        inputs = 2 * self.inner + sum(self.parts[1:]), torch.float32
        return Recurrence(states, ((self.inner, self.conv.weight.dtype), inputs))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        mixed, gate = self.in_proj(x).chunk(2, 1)
        mixed = self.act(state.advance(self.convolve, mixed, batch, 0))
        parts = self.x_proj(mixed).split(self.parts, 1)
        step, b, c = (
            rms_norm(part, weight, self.eps) for part, weight in zip(parts, self.norms, strict=True)
        )
        given = torch.cat([t.float() for t in (mixed, self.dt_proj(step), b, c)], 1)
        out = state.advance(self.scan, given, batch, 1) * F.silu(gate.float())
        return self.out_proj(out.to(gate.dtype))

    def convolve(
        self, states: list[Tensor], x: Tensor, texts: Texts
    ) -> tuple[Tensor, list[Tensor]]:
        out, window = self.conv(states[0], x, texts)
        return texts.flat(out), [window]

    def scan(self, states: list[Tensor], x: Tensor, texts: Texts) -> tuple[Tensor, list[Tensor]]:
        """From x, time steps, B and C (T, N) to outputs (T, inner), all in fp32."""
        x, dt, b, c = texts.pieces(x).split([self.inner, self.inner, *self.parts[1:]], 2)
        dt = F.softplus(dt + self.dt_bias)
        out, state = selective(states[0], x, dt, self.a, b, c, texts)
        return texts.flat(out + x * self.d), [state]


class DeltaSizes(NamedTuple):
    """Of a layer with the delta rule: heads of Q and K, and of V; their channels; tokens of the
    convolution."""

    heads: int
    v_heads: int
    dim: int
    v_dim: int
    window: int


class GatedDelta(Mixer):
    """Qwen3-Next's gated delta rule.

    together: whether Q, K, V and gates are one projection, head by head, and so are the strengths
    and decays of corrections.
    """

    def __init__(
        self, weights: Weights, name: str, config: PretrainedConfig, sizes: DeltaSizes, act: str,
        eps: float, together: bool,
    ):  # fmt: skip
        super().__init__()
        heads, v_heads, dim, v_dim, window = sizes
        if v_heads % heads:
            raise InvalidInput(
                f"config.json: {v_heads} heads of V for {heads} of K in the delta rule; each head "
                "of K has as many of V"
            )
        self.sizes, self.act, self.together = sizes, activation(act), together
        hidden, inner = config.hidden_size, v_heads * v_dim
        mixed = 2 * heads * dim + inner
        names, rows = ["qkv", "z", "b", "a"], [mixed, inner, v_heads, v_heads]
        if together:
            names, rows = ["qkvz", "ba"], [mixed + inner, 2 * v_heads]
        self.rows = rows
        self.in_proj = weights.linear([f"{name}.in_proj_{part}" for part in names], rows, hidden)
        self.conv = Convolution(weights, f"{name}.conv1d", mixed, window, False)
        self.a, self.dt_bias = (
            weights.tensor(f"{name}.{part}", (v_heads,), torch.float32)
            for part in ("A_log", "dt_bias")
        )
        self.a = -self.a.exp()
        self.norm = GatedNorm(
            weights, f"{name}.norm", inner, v_heads, eps, gate_first=False, shared=True
        )
        self.out_proj = weights.linear([f"{name}.out_proj"], [hidden], inner)

    @property
    def memory(self) -> Recurrence:
        _, v_heads, dim, v_dim, _ = self.sizes
        states = self.conv.window, ((v_heads, dim, v_dim), torch.float32)
        inputs = len(self.conv.weight) + 2 * v_heads, self.conv.weight.dtype
        return Recurrence(states, (inputs,))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        parts = self.in_proj(x).split(self.rows, 1)
        qkv, gate, b, a = self.sorted(*parts) if self.together else parts
        out = state.advance(self.scan, torch.cat([qkv, b, a], 1), batch)
        return self.out_proj(self.norm(out, gate))

    def sorted(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q, K and V, gates, b and a of all heads, from what lies head by head."""
        heads, v_heads, dim, v_dim, _ = self.sizes
        each = v_heads // heads
        q, k, v, gate = qkvz.unflatten(1, (heads, -1)).split(
            [dim, dim, each * v_dim, each * v_dim], 2
        )
        b, a = ba.unflatten(1, (heads, 2, each)).unbind(2)
        qkv = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
        return qkv, gate.flatten(1), b.flatten(1), a.flatten(1)

    def scan(self, states: list[Tensor], x: Tensor, texts: Texts) -> tuple[Tensor, list[Tensor]]:
        """From Q, K, V, b and a (T, N) to outputs (T, inner) in fp32."""
        heads, v_heads, dim, v_dim, _ = self.sizes
        mixed, strengths = x.split([x.shape[1] - 2 * v_heads, 2 * v_heads], 1)
        mixed, window = self.conv(states[0], mixed, texts)
        parts = self.act(mixed).float().split([heads * dim, heads * dim, v_heads * v_dim], 2)
        q, k, v = (t.unflatten(2, (-1, n)) for t, n in zip(parts, (dim, dim, v_dim), strict=True))
        q, k = (
            (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
                v_heads // heads, 2
            )
            for t in (q, k)
        )
        b, a = texts.pieces(strengths).float().chunk(2, 2)
        decay = self.a * F.softplus(a + self.dt_bias)
        out, state = delta_rule(states[1], q * dim**-0.5, k, v, decay, b.sigmoid(), texts)
        return texts.flat(out.flatten(2)), [window, state]
