"""Layers that keep a state for each text: short convolutions, Mamba 2, the gated delta rule."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models import UnknownModel
from anybit.engine.models.activations import activation
from anybit.engine.models.parts import Mixer, norm_eps
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Activations
from anybit.kernels.between import of, rms_norm
from anybit.kernels.recurrences import Act, Convolution, DeltaRule, StateSpace
from anybit.kernels.scans import Texts, selective
from anybit.kernels.state import Recurrence, RowStates


def convolution(
    weights: Weights, name: str, channels: int, size: int, bias: bool, act: Act | None = None
) -> Convolution:
    """A sum over each token and the `size` - 1 before it. act: what follows it."""
    if size < 1:
        raise InvalidInput(f"config.json: a convolution of {size} tokens; it has at least 1")
    if size == 1:
        raise UnknownModel("a convolution of single tokens is unknown")
    weight = weights.tensor(f"{name}.weight", (channels, 1, size))[:, 0].contiguous()
    return Convolution(weight, weights.tensor(f"{name}.bias", (channels,)) if bias else None, act)


class ShortConv(Mixer):
    """LFM2's: a convolution between two gates."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        size, bias = config.hidden_size, bool(config.conv_bias)
        self.in_proj = weights.linear([f"{name}.in_proj"], [3 * size], size, bias)
        self.conv = convolution(weights, f"{name}.conv", size, config.conv_L_cache, bias)
        self.scans = (self.conv,)
        self.out_proj = weights.linear([f"{name}.out_proj"], [size], size, bias)

    @property
    def memory(self) -> Recurrence:
        size, dtype = len(self.conv.weight), self.conv.weight.dtype
        return Recurrence((self.conv.window,), ((size, dtype),))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, 1)
        return self.out_proj(after * state.advance(self.conv, before * x, batch))


class GatedNorm(nn.Module):
    """RMSNorm of groups of channels, with a gate of its input or of its output.

    groups: None: there is no norm. shared: whether all groups have the same weight.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        size: int,
        groups: int | None,
        eps: float,
        gate_first: bool,
        shared: bool = False,
    ):
        super().__init__()
        self.groups, self.eps, self.gate_first, self.weight = groups or 1, eps, gate_first, None
        if groups is not None:
            own = size // groups if shared else size
            self.weight = weights.tensor(f"{name}.weight", (own,)).view(-1, size // groups)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x (T, N) in fp32, in the dtype of the gate."""
        return of(x).gated_norm(x, gate, self.weight, self.groups, self.eps, self.gate_first)


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
        norm: Whether there is one before the output's projection.
        gate_first: Whether the gate comes before that norm.
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
        limits = tuple(config.time_step_limit)
        if limits != (0.0, float("inf")):
            raise UnknownModel(f"time steps within {limits} are unknown")
        hidden = config.hidden_size
        self.parts = [inner, groups * states, groups * states, heads]  # x, B, C, time steps
        mixed = sum(self.parts[:3])
        self.in_proj = weights.linear([f"{name}.in_proj"], [inner + mixed + heads], hidden, bias[0])
        conv = convolution(weights, f"{name}.conv1d", mixed, window, bias[1], activation(act))
        a, d, dt_bias = (
            weights.tensor(f"{name}.{part}", (heads,), torch.float32).view(groups, -1)
            for part in ("A_log", "D", "dt_bias")
        )
        self.scan = StateSpace(conv, -a.exp(), d, dt_bias, dim, states)
        self.scans = (self.scan,)
        self.norm = GatedNorm(
            weights, f"{name}.norm", inner, groups if norm else None, norm_eps(config), gate_first
        )
        self.out_proj = weights.linear([f"{name}.out_proj"], [hidden], inner, bias[2])
        self.scale = None
        if scales is not None and set(scales) != {1.0}:
            each = torch.tensor(scales, dtype=weights.dtype, device=weights.device)
            counts = torch.tensor([inner, *self.parts], device=weights.device)
            self.scale = each.repeat_interleave(counts, output_size=inner + mixed + heads)

    @property
    def memory(self) -> Recurrence:
        scan, conv = self.scan, self.scan.conv
        state = (*scan.a.shape, scan.dim, scan.states), torch.float32
        return Recurrence((conv.window, state), ((sum(self.parts), conv.weight.dtype),))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        found = self.in_proj(x)
        found = found if self.scale is None else found * self.scale
        gate, rest = found.tensor_split([self.parts[0]], 1)
        return self.out_proj(self.norm(state.advance(self.scan, rest, batch), gate))


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
    return Mamba2(weights, name, c, sizes, inner, c.hidden_act, **given)


class Mamba1(Mixer):
    """Jamba's Mamba 1: channels whose states decay as each token says, and norms within."""

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig):
        super().__init__()
        c, hidden, bias = config, config.hidden_size, bool(config.mamba_proj_bias)
        self.inner = inner = c.mamba_expand * hidden
        self.parts = [c.mamba_dt_rank, c.mamba_d_state, c.mamba_d_state]  # time steps, B, C
        self.in_proj = weights.linear([f"{name}.in_proj"], [2 * inner], hidden, bias)
        self.conv = convolution(
            weights,
            f"{name}.conv1d",
            inner,
            c.mamba_d_conv,
            bool(c.mamba_conv_bias),
            activation(c.hidden_act),
        )
        self.scans = self.conv, self.scan
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
        mixed = state.advance(self.conv, mixed, batch, 0)
        parts = self.x_proj(mixed).split(self.parts, 1)
        step, b, c = (
            rms_norm(part, weight, self.eps) for part, weight in zip(parts, self.norms, strict=True)
        )
        given = torch.cat([t.float() for t in (mixed, self.dt_proj(step), b, c)], 1)
        out = state.advance(self.scan, given, batch, 1) * F.silu(gate.float())
        return self.out_proj(out.to(gate.dtype))

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

    def __init__(self, weights: Weights, name: str, config: PretrainedConfig, together: bool):
        super().__init__()
        c = config
        heads, v_heads, dim, v_dim, window = sizes = DeltaSizes(
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
            c.linear_conv_kernel_dim,
        )
        if v_heads % heads:
            raise InvalidInput(
                f"config.json: {v_heads} heads of V for {heads} of K in the delta rule; each head "
                "of K has as many of V"
            )
        hidden, inner, act = c.hidden_size, v_heads * v_dim, activation(c.hidden_act)
        mixed = 2 * heads * dim + inner
        names, rows = ["qkv", "z", "b", "a"], [mixed, inner, v_heads, v_heads]
        if together:
            names, rows = ["qkvz", "ba"], [mixed + inner, 2 * v_heads]
        self.in_proj = weights.linear([f"{name}.in_proj_{part}" for part in names], rows, hidden)
        order = together_order(sizes) if together else split_order(rows)
        self.columns = order.int().to(weights.device)
        conv = convolution(weights, f"{name}.conv1d", mixed, window, False, act)
        a, dt_bias = (
            weights.tensor(f"{name}.{part}", (v_heads,), torch.float32)
            for part in ("A_log", "dt_bias")
        )
        self.scan = DeltaRule(conv, -a.exp(), dt_bias, heads, dim, v_dim)
        self.scans = (self.scan,)
        self.norm = GatedNorm(
            weights, f"{name}.norm", inner, v_heads, norm_eps(c), gate_first=False, shared=True
        )
        self.out_proj = weights.linear([f"{name}.out_proj"], [hidden], inner)

    @property
    def memory(self) -> Recurrence:
        scan, conv = self.scan, self.scan.conv
        states = conv.window, ((len(scan.a), scan.dim, scan.v_dim), torch.float32)
        inputs = len(conv.weight) + 2 * len(scan.a), conv.weight.dtype
        return Recurrence(states, (inputs,))

    def forward(
        self, x: Tensor | Activations, rope: Rope, state: RowStates, batch: Batch
    ) -> Tensor:
        found = self.in_proj(x)
        found = of(found).columns(found, self.columns)
        given, gate = found.tensor_split([self.memory.inputs[0][0]], 1)
        return self.out_proj(self.norm(state.advance(self.scan, given, batch), gate))


def split_order(rows: list[int]) -> Tensor:
    """Where Q, K and V, b, a and the gate are among outputs of projections of the first, the gate,
    b and a, with so many rows each."""
    qkv, gate, b, a = torch.arange(sum(rows)).split(rows)
    return torch.cat([qkv, b, a, gate])


def together_order(sizes: DeltaSizes) -> Tensor:
    """The same where Q, K, V and gates lie head by head, and then b and a do."""
    heads, v_heads, dim, v_dim, _ = sizes
    each = v_heads // heads
    rows = [dim, dim, each * v_dim, each * v_dim]
    qkvz, ba = torch.arange(heads * (sum(rows) + 2 * each)).split([heads * sum(rows), 2 * v_heads])
    q, k, v, gate = (t.flatten() for t in qkvz.view(heads, -1).split(rows, 1))
    b, a = (t.flatten() for t in ba.view(heads, 2, each).unbind(1))
    return torch.cat([q, k, v, b, a, gate])
