"""Heads that guess the token after next: a decoder layer beside a model.

Place i of such a head has what the model keeps of token i and the embedding of token i + 1, and
gives a hidden state from which an output makes logits of token i + 2. With a state of its own in
place of what the model keeps, it goes on to further tokens.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models.layers import Decoder, mixers_of
from anybit.engine.weights import Checkpoint, Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.state import Hidden, HiddenStates, LayerState


class Head(Decoder):
    """A head in general, mixed with a kind of model for its blocks, norms and rope.

    needs: layers of the model whose inputs it reads, beside the hidden state.
    """

    needs: tuple[int, ...] = ()

    def lay_out(self, weights: Weights, name: str, index: int) -> None:
        """Make the layer of a name as the kind of model has its layer `index`."""
        self.layers = nn.ModuleList([self.block(weights, name, index)])
        self.ropes = [self.rope_of_layers(self.length, weights.device)[index]]
        for mixer in mixers_of(self.layers):
            mixer.arrange(self.ropes[0].order)
        states = Hidden(self.config.hidden_size, weights.dtype)
        self.memories = [*(m.memory for m in mixers_of(self.layers)), states]

    def borrow(self, model: Decoder) -> None:
        """Take embeddings and output from the model."""
        self.words, self.lm_head = model.words, model.lm_head

    def kept(self, hidden: Tensor, streams: list[Tensor]) -> Tensor:
        """What the model keeps of tokens for this head, in the model's own step.

        streams: inputs of the layers that it needs.
        """
        return hidden

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        *caches, kept = states
        assert isinstance(kept, HiddenStates)
        y, state = self.step(self.words(tokens), kept.read(batch.slots), iter(caches), batch)
        kept.write(batch.slots, state)
        return y

    def step(
        self, words: Tensor, state: Tensor, caches: Iterator[LayerState], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """What the output reads, and the state for the next place."""
        raise NotImplementedError(f"{type(self).__name__}.step")


def remembering(model: Decoder, head: Head) -> Decoder:
    """The same model, which keeps of all tokens what a head reads."""
    again = copy.copy(model)
    again.keep, again.read = head.kept, head.needs
    again.memories = [*model.memories, head.memories[-1]]
    return again


class Mtp(Head):
    """The head that a model's own checkpoint has: its hidden states and embeddings, projected."""

    def __init__(self, config: PretrainedConfig, weights: Weights, length: int):
        nn.Module.__init__(self)
        names = self.further(config)
        assert names is not None
        self.config, self.length = config, length
        size, at = config.hidden_size, names.prefix
        self.of_embedding, self.of_hidden, self.norm = (
            self.norm_of(weights, f"{at}.{name}")
            for name in (names.embedding, names.hidden, names.norm)
        )
        self.project = weights.linear([f"{at}.{names.project}"], [size], 2 * size)
        self.lay_out(weights, names.layer, names.like)

    def step(
        self, words: Tensor, state: Tensor, caches: Iterator[LayerState], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        parts = (self.of_embedding, words), (self.of_hidden, state)
        x = self.project(torch.cat([norm(part, None)[0] for norm, part in parts], 1))
        x, delta = self.layers[0](x, None, self.ropes[0], caches, batch)
        y: Tensor = self.norm(x, delta)[0]
        return y, y


def head_of(kind: type[Decoder], config: PretrainedConfig, weights: Checkpoint, length: int) -> Mtp:
    """The head that a checkpoint has for further tokens, quantized as a layer of the model is.

    Raises:
        InvalidInput: There is none, or its tensors do not fit the model.
    """
    names = kind.further(config)
    if names is None:
        raise InvalidInput(
            f"draft='mtp': no head for further tokens is known for {kind.__name__}; "
            "use 'ngram' or a smaller model"
        )
    if not any(name.startswith(f"{names.prefix}.") for name in weights.stored):
        raise InvalidInput(
            f"draft='mtp': {weights.directory} has no tensors {names.prefix}.*; take files that "
            "hold the head, or another draft"
        )
    weights.as_layer(names.layer, f"{kind.prefix}.layers.{names.like}")
    made: type[Mtp] = type("Mtp", (Mtp, kind), {})
    return made(config, weights, length).eval()
