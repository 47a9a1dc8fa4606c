"""The parts of decoder-only language models: norms, MLPs, experts, and what all mixers have."""

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.experts import biases_of, experts_of
from anybit.engine.models.activations import GELU, SILU, activation
from anybit.engine.weights import Dense, Weights
from anybit.kernels.backend import Activations
from anybit.kernels.between import (
    ANSWERS,
    AS_IT_IS,
    Routing,
    Unturned,
    Wanted,
    family_of,
    finished,
    of,
    outside,
)
from anybit.kernels.recurrences import Scan
from anybit.kernels.state import Memory
from anybit.nn.multiplier import Frozen, Multiplier
from anybit.nn.routing import mixture


class NormKind(NamedTuple):
    """What a model does in its norms. wide: round after the product with the weight, not before.

    offset: is added to the weight.
    """

    wide: bool = False
    offset: float = 0.0


PLAIN = NormKind()


class RMSNorm(nn.Module):
    """The norm of x + delta and that sum itself, since every norm ends a residual addition."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, kind: NormKind):
        super().__init__()
        self.weight, self.eps = norm_weight(weights, name, size, kind), eps

    def forward(
        self, x: Tensor, delta: Tensor | Unturned | None, wanted: Wanted = AS_IT_IS
    ) -> tuple[Tensor | Activations, Tensor]:
        return of(x).add_norm(x, delta, self.weight, self.eps, wanted)


class Mixer(nn.Module):
    """What a block expects of what looks at other tokens: attention, or a recurrence.

    in_proj: what its input goes into. gathers: whether no kernel does it. scans: recurrences that
    it has.
    """

    in_proj: nn.Module
    gathers: bool = False
    scans: tuple[Scan, ...] = ()

    @property
    def memory(self) -> Memory:
        """What it remembers of texts."""
        raise NotImplementedError(f"{type(self).__name__}.memory")

    @property
    def last(self) -> nn.Module | None:
        """The layer whose outputs it returns as they are."""
        return None

    def arrange(self, order: Tensor | None) -> None:
        """Bring what belongs to channels of Q's and K's heads into rope's order."""


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up merged.

    names: of the three projections, or of two where the checkpoint holds gate and up merged.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        intermediate: int,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
    ):
        super().__init__()
        self.act = activation_of(config)
        hidden = config.hidden_size
        *first, down = (f"{name}.{part}" for part in names)
        rows = [2 * intermediate // len(first)] * len(first)
        self.gate_up_proj = weights.linear(first, rows, hidden, bias)
        self.down_proj = weights.linear([down], [hidden], intermediate, bias)
        if type(self) is MLP and self.act in SILU:  # others do other things in between
            leave(self.gate_up_proj)

    @property
    def last(self) -> nn.Module | None:
        """The layer whose outputs it returns as they are."""
        return self.down_proj if type(self) is MLP else None

    def forward(self, x: Tensor | Activations) -> Tensor | Unturned:
        first, wanted = self.gate_up_proj, wanted_by(self.down_proj)
        as_it_is = wanted.activation is None and wanted.vector is None
        if isinstance(first, Dense) and isinstance(x, Tensor) and self.act in SILU and as_it_is:
            return self.down_proj(first.gated(x))
        gate, up = first(x).chunk(2, -1)
        return self.down_proj(gated(self.act, gate, up, wanted))


class MoE(nn.Module):
    """A mixture of experts: each token goes through the `top_k` that the router prefers.

    normalize: the chosen experts' weights add up to 1. names: of an expert's projections, gate and
    up merged if there are two. router: its name. bias: of the router and of all projections. gated:
    whether experts have a gate beside up.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: PretrainedConfig,
        experts: int,
        top_k: int,
        intermediate: int,
        normalize: bool,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        router: str = "gate",
        bias: bool = False,
        gated: bool = True,
    ):
        super().__init__()
        self.act = activation_of(config)
        self.experts, self.top_k, self.normalize = experts, top_k, normalize
        hidden = config.hidden_size
        self.gate = weights.router(f"{name}.{router}", experts, hidden, bias)
        *first, down = names
        both = [[f"{name}.experts.{i}.{part}" for part in first] for i in range(experts)]
        last = [[f"{name}.experts.{i}.{down}"] for i in range(experts)]
        rows = [(1 + gated) * intermediate // len(first)] * len(first)
        self.gate_up_projs = experts_of(weights, both, rows, hidden)
        self.down_projs = experts_of(weights, last, [hidden], intermediate)
        self.biases = (
            (biases_of(weights, both, rows), biases_of(weights, last, [hidden])) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x)
        bias = None if self.biases is None else self.biases[1]
        return mixture(
            x, weight, chosen, self.experts, self.gate_up_projs, self.down_projs, self.between, bias
        )

    def between(self, x: Tensor, routing: Routing) -> Tensor | Activations:
        """From gate and up (M, 2 I) to the input of the down projection (M, I)."""
        gate, up = x.chunk(2, -1)
        return gated(self.act, gate, up, wanted_by(self.down_projs))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' weights in fp32 and their indices, both (T, top_k)."""
        logits = self.gate(x)
        return outside(logits).choose(logits, self.top_k, self.normalize)


def norm_weight(weights: Weights, name: str, size: int, kind: NormKind) -> Tensor:
    """A norm's weight (size,), in fp32 where the product with it is rounded last."""
    weight = weights.tensor(f"{name}.weight", (size,))
    return weight.float() + kind.offset if kind.wide else weight + kind.offset


def norm_eps(config: PretrainedConfig) -> float:
    """The epsilon of norms."""
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")  # of its class, not others'
    return float(getattr(config, next(name for name in names if hasattr(type(config), name))))


def activation_of(config: PretrainedConfig) -> str:
    """The name of an MLP's activation function."""
    # Of its class, not others'.
    keys = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
    own = [key for key in keys if hasattr(type(config), key)]
    if not own:  # LFM2 has no choice
        return "silu"
    name = next((found for key in own if (found := getattr(config, key))), None)
    activation(name)
    return str(name)


def gated(
    act: str, gate: Tensor | Unturned, up: Tensor | Unturned, wanted: Wanted = AS_IT_IS
) -> Tensor | Activations:
    """act(gate) * up, as the next layer wants it if that is made on the way."""
    if act in SILU:
        return of(up.y if isinstance(up, Unturned) else up).silu_mul(gate, up, wanted)
    gate, up = finished(gate), finished(up)
    if act == GELU:
        return of(up).gelu_mul(gate, up)
    return activation(act)(gate) * up


def leave(layer: nn.Module | None) -> None:
    """Have a layer leave its outputs' rotation to what reads them, where kernels do that."""
    if isinstance(layer, Multiplier):
        layer.leaves = family_of(layer.device).turns


def wanted_by(layer: nn.Module | None) -> Wanted:
    """How a layer wants its input."""
    if not isinstance(layer, Frozen):
        return AS_IT_IS
    alone = isinstance(layer, Multiplier)  # and not experts
    pairs = ANSWERS.pairs if alone and layer.activation == "int8" else None
    return Wanted(layer.activation, layer.around.rotate_in, alone, pairs)
