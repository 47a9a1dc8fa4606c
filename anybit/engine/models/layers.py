"""Decoder-only language models; each model's file says what differs, and of what it is made."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.experts import OneByOne
from anybit.engine.lora import Adapters
from anybit.engine.models import UnknownModel
from anybit.engine.models.attention import Attention
from anybit.engine.models.parts import (
    MLP,
    PLAIN,
    Mixer,
    NormKind,
    RMSNorm,
    leave,
    norm_eps,
    wanted_by,
)
from anybit.engine.models.rope import Rope
from anybit.engine.weights import Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.backend import Activations
from anybit.kernels.between import Unturned, Wanted, finished, of
from anybit.kernels.kv.cache import Heads
from anybit.kernels.state import HiddenStates, LayerState, Memory, Recurrence


class Biases(NamedTuple):
    """Projections with biases: False or True, or the field of config.json that says it."""

    qkv: bool | str = False
    output: bool | str = False
    mlp: bool | str = False


ATTENTION_BIAS = Biases("attention_bias", "attention_bias")


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


class Block(nn.Module):
    """One decoder layer: attention and MLP, each between norms and around a residual.

    Adding to the residual stream x is left to the next norm, which takes what is to be added.
    model: whose norms it has. multiplier: of what is added.
    """

    def __init__(
        self, model: "Decoder", weights: Weights, name: str, attention: Mixer, mlp: nn.Module
    ):
        super().__init__()
        self.attention_norm, self.after_attention, self.mlp_norm, self.after_mlp = (
            model.norm_of(weights, f"{name}.{norm}") if norm else None for norm in model.norms
        )
        self.self_attn, self.mlp, self.multiplier = attention, mlp, model.residual_multiplier
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
        return self.behind(y, x, rope, states, batch)

    def behind(
        self,
        y: Tensor | Activations,
        x: Tensor,
        rope: Rope,
        states: Iterator[LayerState],
        batch: Batch,
    ) -> tuple[Tensor, Tensor | Unturned]:
        """What comes behind the first norm, which gives y."""
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
    """A decoder-only language model. A subclass says what differs, in fields or in methods.

    length: positions that it is prepared for. memories: what its layers remember, in the order in
    which they run. prefix: of its tensors' names. base_name: transformers' name for it. mlp_name:
    of what lies behind attention. words_name, norm_name: of the embeddings and the last norm.
    norms: of each block. hosted: whether it is transformers' own. exact_answers: whether layers
    with activations of int8 round those of answers to 16 bits. keep: makes what the last of the
    memories keeps of tokens for a head that guesses, of their hidden states and the inputs of the
    layers `read`. biases: which projections have some. windows: whether layers have those of
    config.json. attention_options: of `Attention`. rope_class, rope_options: what rotates Q and K.
    mlp_names: of an MLP's projections.
    """

    exact_answers = False
    keep: Callable[[Tensor, list[Tensor]], Tensor] | None = None
    read: tuple[int, ...] = ()

    hosted: ClassVar[bool] = False
    prefix: ClassVar[str] = "model"
    base_name: ClassVar[str | None] = None  # the same
    mlp_name: ClassVar[str] = "mlp"
    words_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"
    norms: ClassVar[Norms] = Norms()
    norm_kind: ClassVar[NormKind] = PLAIN
    biases: ClassVar[Biases] = Biases()
    windows: ClassVar[bool] = False
    mlp_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
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
        return Block(self, weights, name, mixer, mlp)

    def mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        """What looks at other tokens in the layer `index`, whose name is given."""
        return self.attention(weights, f"{name}.self_attn", index)

    def attention(self, weights: Weights, name: str, index: int) -> Mixer:
        qkv, output = map(self.says, self.biases[:2])
        return Attention(
            weights,
            name,
            self.config,
            qkv,
            output_bias=output,
            window=self.window(index),
            norm=self.norm_kind,
            **self.attention_options,
        )

    def mlp(self, weights: Weights, name: str, index: int) -> nn.Module:
        c, bias = self.config, self.says(self.biases.mlp)
        return MLP(weights, name, c, c.intermediate_size, self.mlp_names, bias)

    def says(self, bias: bool | str) -> bool:
        """Whether there are such biases."""
        return bool(getattr(self.config, bias)) if isinstance(bias, str) else bias

    def window(self, index: int) -> int | None:
        """The sliding window of a layer's attention, or None."""
        return window_of(self.config, index) if self.windows else None

    def norm_of(self, weights: Weights, name: str, size: int | None = None) -> RMSNorm:
        """A norm as this kind of model has them. size: the model's if None."""
        c = self.config
        return RMSNorm(weights, name, size or c.hidden_size, norm_eps(c), self.norm_kind)

    def last_norm(self, weights: Weights) -> nn.Module:
        return self.norm_of(weights, f"{self.prefix}.{self.norm_name}")

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

    @property
    def attention_options(self) -> dict[str, Any]:
        return {}

    @property
    def rope_class(self) -> type[Rope]:
        return Rope

    @property
    def rope_options(self) -> dict[str, Any]:
        return {}

    def rope_of_layers(self, length: int, device: torch.device) -> list[Rope]:
        """Each layer's rotary embedding; the same for all unless config.json says otherwise."""
        c, rope, options = self.config, self.rope_class, self.rope_options
        if rope is Rope and not options:
            kinds = getattr(c, "layer_types", None) or []
            if kinds and all(kind in c.rope_parameters for kind in kinds):
                ropes = {kind: Rope(c, length, device, kind) for kind in set(kinds)}
                return [ropes[kind] for kind in kinds]
        return [rope(c, length, device, **options)] * c.num_hidden_layers

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        """Tokens (T,) -> hidden states (T, hidden); what layers remember goes into the states."""
        x, delta = self.words(tokens), None
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        given, inputs = iter(states), dict[int, Tensor]()
        for i, (layer, rope) in enumerate(zip(self.layers, self.ropes, strict=True)):
            if i in self.read:
                inputs[i] = x if delta is None else x + finished(delta)
            x, delta = layer(x, delta, rope, given, batch)
        hidden: Tensor
        hidden, x = self.norm(x, delta)
        if self.keep is not None:
            last, end = states[-1], len(self.layers)
            assert isinstance(last, HiddenStates)
            inputs[end] = x  # also in place of layers that `without_repeats` leaves out
            last.write(batch.slots, self.keep(hidden, [inputs[min(i, end)] for i in self.read]))
        return hidden

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
