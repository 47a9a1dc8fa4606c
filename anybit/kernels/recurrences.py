"""The recurrences that layers have: of which inputs and parameters their scans are made.

Each is a function of states and inputs, the definition in plain torch; kernels for single tokens
know them by their classes, and leave an activation other than SiLU to the definition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.kernels.scans import Texts, convolved, delta_rule, state_space

Act = Callable[[Tensor], Tensor]
# From states (n, ...) and inputs (T, N) of n texts to outputs (T, M) and new states.
Scan = Callable[[list[Tensor], Tensor, Texts], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True, eq=False)
class Convolution:
    """A sum over each token and the few before it, for each channel by itself.

    Attributes:
        weight: (C, K), as `convolved` has it.
        bias: (C,) or None.
        act: What follows.
    """

    weight: Tensor
    bias: Tensor | None
    act: Act | None = None

    @property
    def window(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what it keeps of a text."""
        channels, size = self.weight.shape
        return (size - 1, channels), self.weight.dtype

    def pieces(self, window: Tensor, x: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
        """Outputs in pieces (P, L, C), and windows."""
        out, window = convolved(window, x, self.weight, self.bias, texts)
        return out if self.act is None else self.act(out), window

    def __call__(
        self, states: list[Tensor], x: Tensor, texts: Texts
    ) -> tuple[Tensor, list[Tensor]]:
        out, window = self.pieces(states[0], x, texts)
        return texts.flat(out), [window]


@dataclass(frozen=True, eq=False)
class StateSpace:
    """Mamba 2: from x, B, C and time steps (T, N) to outputs (T, heads * dim) in fp32.

    Attributes:
        conv: Of x, B and C.
        a: Negative numbers, (groups, heads of a group) fp32.
        d: As a.
        dt_bias: As a.
        dim: Channels of a head.
        states: Of a channel.
    """

    conv: Convolution
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    dim: int
    states: int

    @property
    def width(self) -> int:
        """M."""
        return self.a.numel() * self.dim

    def __call__(
        self, states: list[Tensor], x: Tensor, texts: Texts
    ) -> tuple[Tensor, list[Tensor]]:
        groups, each = self.a.shape
        heads = groups * each
        mixed, dt = x.tensor_split([x.shape[1] - heads], 1)
        mixed, window = self.conv.pieces(states[0], mixed, texts)
        parts = mixed.split([heads * self.dim, *[groups * self.states] * 2], 2)
        x, b, c = (t.float().unflatten(2, (groups, -1)) for t in parts)
        x = x.unflatten(3, (-1, self.dim))
        dt = texts.pieces(dt).float().unflatten(2, (groups, -1))
        dt = F.softplus(dt + self.dt_bias)
        out, state = state_space(states[1], x, dt, self.a, b, c, texts)
        return texts.flat((out + x * self.d[..., None]).flatten(2)), [window, state]


@dataclass(frozen=True, eq=False)
class DeltaRule:
    """The gated delta rule: from Q, K, V, b and a (T, N) to outputs (T, v_heads * v_dim) in fp32.

    Attributes:
        conv: Of Q, K and V.
        a: Negative numbers, (v_heads,) fp32.
        dt_bias: As a.
        heads: Of Q and K.
        dim: Their channels.
        v_dim: Channels of V's heads.
    """

    conv: Convolution
    a: Tensor
    dt_bias: Tensor
    heads: int
    dim: int
    v_dim: int

    @property
    def width(self) -> int:
        """M."""
        return len(self.a) * self.v_dim

    def __call__(
        self, states: list[Tensor], x: Tensor, texts: Texts
    ) -> tuple[Tensor, list[Tensor]]:
        v_heads, own = len(self.a), self.heads * self.dim
        mixed, strengths = x.tensor_split([x.shape[1] - 2 * v_heads], 1)
        mixed, window = self.conv.pieces(states[0], mixed, texts)
        parts = mixed.float().split([own, own, v_heads * self.v_dim], 2)
        dims = self.dim, self.dim, self.v_dim
        q, k, v = (t.unflatten(2, (-1, n)) for t, n in zip(parts, dims, strict=True))
        q, k = (
            (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
                v_heads // self.heads, 2
            )
            for t in (q, k)
        )
        b, a = texts.pieces(strengths).float().chunk(2, 2)
        decay = self.a * F.softplus(a + self.dt_bias)
        q = q * self.dim**-0.5
        out, state = delta_rule(states[1], q, k, v, decay, b.sigmoid(), texts)
        return texts.flat(out.flatten(2)), [window, state]


def taken(states: list[Tensor], rows: Tensor, seen: Tensor) -> list[Tensor]:
    """States of rows that have seen so many tokens: zeros where these are none."""
    going = seen > 0
    return [
        torch.where(going.view(-1, *[1] * (s.ndim - 1)), s.index_select(0, rows), 0) for s in states
    ]


def write(states: list[Tensor], rows: Tensor, new: list[Tensor]) -> None:
    for state, own in zip(states, new, strict=True):
        state[rows] = own.to(state.dtype)
