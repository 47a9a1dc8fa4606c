"""The parts that decoder-only language models are made of; each model's file says which."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.experts import OneByOne, biases_of, experts_of
from anybit.engine.lora import Adapters
from anybit.engine.models import UnknownModel
from anybit.engine.models.activations import GELU, SILU, activation
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Dense, Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
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
from anybit.kernels.kv.cache import Heads
from anybit.kernels.recurrences import Scan
from anybit.kernels.state import Hidden, HiddenStates, LayerState, Memory, Recurrence
from anybit.nn.multiplier import Frozen, Multiplier
from anybit.nn.routing import mixture


class NormKind(NamedTuple):
    """What a model does in its norms. wide: round after the product with the weight, not before.

    offset: is added to the weight.
    """

    wide: bool = False
    offset: float = 0.0


class Further(NamedTuple):
    """Names of what guesses further tokens, in a checkpoint: an MTP head, see `mtp.py`.

    prefix: of all its tensors. layer: its decoder layer. embedding, hidden: norms of its inputs.
    project: from both to the layer's input. norm: behind the layer. like: the layer of the model
    that it is like.
    """

    prefix: str
    layer: str
    embedding: str
    hidden: str
    project: str
    norm: str
    like: int


class Norms(NamedTuple):
    """Names of a block's norms: of what goes into and what comes out of attention and MLP.

    As Llama has them by default.
    """

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


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
        self.gate = weights.linear([f"{name}.{router}"], [experts], hidden, bias)
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


class Block(nn.Module):
    """One decoder layer: attention and MLP, each between norms and around a residual.

    Adding to the residual stream x is left to the next norm, which takes what is to be added.
    multiplier: of what is added.
    """

    def __init__(
        self, weights: Weights, name: str, config: PretrainedConfig, attention: Mixer,
        mlp: nn.Module, norms: Norms, kind: NormKind, multiplier: float,
    ):  # fmt: skip
        super().__init__()
        size, eps = config.hidden_size, norm_eps(config)
        self.attention_norm, self.after_attention, self.mlp_norm, self.after_mlp = (
            RMSNorm(weights, f"{name}.{norm}", size, eps, kind) if norm else None for norm in norms
        )
        self.self_attn, self.mlp, self.multiplier = attention, mlp, multiplier
        if self.after_attention is None:
            leave(attention.last)
        if self.after_mlp is None:
            leave(getattr(mlp, "last", None))

    def forward(
        self,
        x: Tensor,
        delta: Tensor | Unturned | None,
        rope: Rope,
        states: Iterator[LayerState],
        batch: Batch,
    ) -> tuple[Tensor, Tensor | Unturned]:
        y, x = self._before(self.attention_norm, x, delta, wanted_by(self.self_attn.in_proj))
        out = self._after(self.after_attention, self.self_attn(y, rope, next(states), batch))
        first = getattr(self.mlp, "gate_up_proj", None)  # a router wants its input as it is
        y, x = self._before(self.mlp_norm, x, out, wanted_by(first))
        return x, self._after(self.after_mlp, self.mlp(y))

    def _before(
        self, norm: RMSNorm | None, x: Tensor, delta: Tensor | Unturned | None, wanted: Wanted
    ) -> tuple[Tensor | Activations, Tensor]:
        if norm is not None:
            return norm(x, delta, wanted)
        x = x if delta is None else x + finished(delta)
        return x, x

    def _after(self, norm: RMSNorm | None, y: Tensor | Unturned) -> Tensor | Unturned:
        if norm is not None:
            y = norm(y, None)[0]
        return y if self.multiplier == 1 else finished(y) * self.multiplier


class Decoder(nn.Module):
    """A decoder-only language model. A subclass says what is its own: `attention` or `block`.

    length: positions that it is prepared for. memories: what its layers remember, in the order in
    which they run. prefix: of its tensors' names. mlp_name: of what lies behind attention.
    words_name, norm_name: of the embeddings and the last norm. norms: of each block. hosted:
    whether it is transformers' own. exact_answers: whether layers with activations of int8 round
    those of answers to 16 bits. remembers: whether hidden states are kept, in the last of the
    memories.
    """

    exact_answers = False
    remembers = False

    hosted: ClassVar[bool] = False
    prefix: ClassVar[str] = "model"
    mlp_name: ClassVar[str] = "mlp"
    words_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"
    norms: ClassVar[Norms] = Norms()
    norm_kind: ClassVar[NormKind] = PLAIN
    adapters: Adapters | None = None
    memories: Sequence[Memory]

    def __init__(self, config: PretrainedConfig, weights: Weights, length: int):
        super().__init__()
        self.config, self.length, self.adapters = config, length, weights.adapters
        vocabulary, layers = config.vocab_size, config.num_hidden_layers
        if not layers:
            raise InvalidInput("config.json: num_hidden_layers is 0; a model has at least 1")
        self.ropes = self.rope_of_layers(length, weights.device)
        self.words = weights.embedding(
            f"{self.prefix}.{self.words_name}", (vocabulary, self.embedding_size)
        )
        blocks = [self.block(weights, f"{self.prefix}.layers.{i}", i) for i in range(layers)]
        self.layers = nn.ModuleList(blocks)
        for block, rope in zip(blocks, self.ropes, strict=True):
            for mixer in mixers_of(block):
                mixer.arrange(rope.order)
        self.memories = [mixer.memory for mixer in mixers_of(self.layers)]
        self.norm = self.last_norm(weights)
        self.lm_head = weights.head("lm_head", self.words, config.tie_word_embeddings)

    def block(self, weights: Weights, name: str, index: int) -> nn.Module:
        """The layer `index`."""
        mixer = self.mixer(weights, name, index)
        mlp = self.mlp(weights, f"{name}.{self.mlp_name}", index)
        return Block(
            weights,
            name,
            self.config,
            mixer,
            mlp,
            self.norms,
            self.norm_kind,
            self.residual_multiplier,
        )

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        """What looks at other tokens in the layer `index`, whose name is given."""
        return self.attention(weights, f"{name}.self_attn", index)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        raise NotImplementedError(f"{type(self).__name__}.attention")

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        return MLP(weights, name, self.config, self.config.intermediate_size)

    def last_norm(self, weights: Weights) -> nn.Module:
        c = self.config
        return RMSNorm(
            weights, f"{self.prefix}.{self.norm_name}", c.hidden_size, norm_eps(c), self.norm_kind
        )

    @property
    def embed_tokens(self) -> Tensor:
        """The embeddings' weight (vocabulary, size), decoded where an operation asks for more than
        its shape, dtype or device."""
        return self.words.weight

    @property
    def embedding_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return 1.0

    @property
    def residual_multiplier(self) -> float:
        """What attention and MLP add is multiplied by."""
        return 1.0

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        """Each layer's rotary embedding; the same for all unless a model says otherwise."""
        kinds = getattr(self.config, "layer_types", None) or []
        if kinds and all(kind in self.config.rope_parameters for kind in kinds):
            ropes = {kind: Rope(self.config, length, device, kind) for kind in set(kinds)}
            return [ropes[kind] for kind in kinds]
        return [Rope(self.config, length, device)] * self.config.num_hidden_layers

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        """Tokens (T,) -> hidden states (T, hidden); what layers remember goes into the states."""
        x, delta = self.words(tokens), None
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        given = iter(states)
        for layer, rope in zip(self.layers, self.ropes, strict=True):
            x, delta = layer(x, delta, rope, given, batch)
        hidden: Tensor = self.norm(x, delta)[0]
        if self.remembers:
            last = states[-1]
            assert isinstance(last, HiddenStates)
            last.write(batch.slots, hidden)
        return hidden

    def remember(self) -> None:
        """Keep hidden states of all tokens from now on."""
        size, dtype = self.config.hidden_size, self.embed_tokens.dtype
        self.memories, self.remembers = [*self.memories, Hidden(size, dtype)], True

    @classmethod
    def further(cls, config: PretrainedConfig) -> Further | None:
        """Names of the head that guesses further tokens; None: no such head is known."""
        return None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the forward pass: nothing in it waits for the device."""
        return not any(
            isinstance(module, OneByOne) or (isinstance(module, Mixer) and module.gathers)
            for module in self.modules()
        )

    @property
    def heads(self) -> list[Heads]:
        """K and V that the model remembers, one for each attention."""
        return [m for m in self.memories if isinstance(m, Heads)]

    @property
    def recurrent(self) -> bool:
        """Whether layers keep states, which tokens change for good."""
        return any(isinstance(m, Recurrence) for m in self.memories)

    @property
    def ragged(self) -> bool:
        """Whether kernels run all recurrences over texts that the device alone knows."""
        family = of(self.embed_tokens)
        return not any(family.refuse_scan(s) for m in mixers_of(self) for s in m.scans)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, hidden) -> logits (B, vocabulary)."""
        return self.lm_head(hidden)


def mixers_of(module: nn.Module) -> list[Mixer]:
    """What looks at other tokens in a module, in the order in which it runs."""
    return [m for m in module.modules() if isinstance(m, Mixer)]


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


def window_of(config: PretrainedConfig, index: int) -> int | None:
    """The sliding window of a layer, or None when it sees everything."""
    kinds, window = (getattr(config, name, None) for name in ("layer_types", "sliding_window"))
    if kinds and kinds[index] == "full_attention":
        return None
    if kinds and kinds[index] != "sliding_attention":
        raise UnknownModel(f"layer type {kinds[index]!r} is unknown")
    if kinds and window is None:
        raise InvalidInput(
            f"config.json: layer_types[{index}] is 'sliding_attention', and there is no "
            "sliding_window; set one, or call the layer 'full_attention'"
        )
    return window or None
