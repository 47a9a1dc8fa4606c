"""Heads that guess the token after next: a decoder layer beside a model, in the same checkpoint.

Place i of such a head has the model's hidden state of token i and the embedding of token i + 1, and
gives a hidden state from which the model's own output makes logits of token i + 2. With that state
in place of the model's, it goes on to further tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models.layers import Decoder, mixers_of
from anybit.engine.models.parts import RMSNorm, norm_eps
from anybit.engine.weights import Checkpoint, Weights
from anybit.errors import InvalidInput
from anybit.kernels.attention import Batch
from anybit.kernels.state import Hidden, HiddenStates, LayerState


class Mtp(Decoder):
    """The head of a kind of model, which `head_of` mixes in for its blocks, norms and rope.

    Its embeddings and output are the model's (`share`).
    """

    def __init__(self, config: PretrainedConfig, weights: Weights, length: int):
        nn.Module.__init__(self)
        names = self.further(config)
        assert names is not None
        self.config, self.length = config, length
        size, at = config.hidden_size, names.prefix
        self.of_embedding, self.of_hidden, self.norm = (
            RMSNorm(weights, f"{at}.{name}", size, norm_eps(config), self.norm_kind)
            for name in (names.embedding, names.hidden, names.norm)
        )
        self.project = weights.linear([f"{at}.{names.project}"], [size], 2 * size)
        self.layers = nn.ModuleList([self.block(weights, names.layer, names.like)])
        self.ropes = [self.rope_of_layers(length, weights.device)[names.like]]
        for mixer in mixers_of(self.layers):
            mixer.arrange(self.ropes[0].order)
        self.memories = [*(m.memory for m in mixers_of(self.layers)), Hidden(size, weights.dtype)]

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        *caches, hidden = states
        assert isinstance(hidden, HiddenStates)
        parts = (self.of_embedding, self.words(tokens)), (self.of_hidden, hidden.read(batch.slots))
        x = self.project(torch.cat([norm(part, None)[0] for norm, part in parts], 1))
        x, delta = self.layers[0](x, None, self.ropes[0], iter(caches), batch)
        y: Tensor = self.norm(x, delta)[0]
        hidden.write(batch.slots, y)
        return y


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
