"""EAGLE-3: heads that guess from what goes into three of a model's layers.

Place i has the inputs of these layers at token i, of which `fc` makes a state, and the embedding of
token i + 1. Its layer's attention reads both, each behind a norm of its own; the residual is the
state. The next place of a guess reads the layer's output in place of that state. Logits are of
those tokens alone that the model writes most.

Heads lie in directories of their own, as their authors write them (`midlayer.*`) or the library
speculators does (`layers.0.*`, and the layer's configuration within the head's).
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.checkpoint.architecture import built, check_sizes
from anybit.engine.memory import check_weights
from anybit.engine.models.layers import Block, Decoder, Norms
from anybit.engine.models.llama import Llama, Qwen3
from anybit.engine.models.mtp import Head
from anybit.engine.weights import Checkpoint, Reading
from anybit.errors import InvalidInput
from anybit.files.directory import quantization_of, read_json
from anybit.files.safetensors import WEIGHTS, stored_tensors
from anybit.kernels.attention import Batch
from anybit.kernels.state import LayerState
from anybit.nn.multiplier import Keep

KINDS: dict[str, type[Decoder]] = {"llama": Llama, "qwen3": Qwen3}  # of layers
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_3 = "an EAGLE-3 head"
# What heads are, by words in their config.json, of which the first counts.
HEADS = {
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "eagle3": EAGLE_3,
    "draft_vocab_size": EAGLE_3,
}
UNREAD = ("t2d", "verifier_*")  # what else says, and what trains a head


class Eagle(Head):
    """A head, mixed with the kind of model that its layer is of.

    Args:
        said: Of its config.json.
        model: That it guesses for.
        vocabulary: Of the model.
    """

    norms = Norms(None)

    def __init__(
        self,
        config: PretrainedConfig,
        weights: Checkpoint,
        said: Mapping[str, Any],
        model: Decoder,
        vocabulary: int,
    ):
        nn.Module.__init__(self)
        self.config, self.length, self.vocabulary = config, model.length, vocabulary
        self.needs = layers_of(weights.directory, said, len(model.layers))
        size, each, count = config.hidden_size, model.config.hidden_size, len(self.needs)
        norm = partial(self.norm_of, weights)
        self.norms_residual, self.norms_state = (
            bool(said.get(option)) for option in ("norm_before_residual", "norm_output")
        )
        self.of_all = norm("input_norm", count * each) if said.get("norm_before_fc") else None
        apart = range(count) if said.get("fc_norm") else ()
        self.of_each = nn.ModuleList(norm(f"fc_norm.{i}", each) for i in apart)
        self.fc = weights.linear(["fc"], [size], count * each)
        self.of_embedding = norm("layers.0.input_layernorm")
        self.of_hidden, self.norm = norm("layers.0.hidden_norm"), norm("norm")
        self.lay_out(weights, "layers.0", 0)
        few = int(said.get("draft_vocab_size") or vocabulary)
        self.tokens: Tensor | None = None  # of the model, for each of the few
        if few < vocabulary or "d2t" in weights.stored:
            self.tokens = tokens_of(weights, few, vocabulary)
        self.borrowed = []
        if "embed_tokens.weight" in weights.stored or size != each:
            self.words = weights.embedding("embed_tokens", (vocabulary, size))
        if not hasattr(self, "words") or same(self.words, model.words):
            self.borrowed.append("words")
        if "lm_head.weight" in weights.stored or size != each or few != vocabulary:
            self.lm_head = weights.linear(["lm_head"], [few], size)
        else:
            self.borrowed.append("lm_head")
        self.borrow(model)

    @property
    def attention_options(self) -> dict[str, Any]:
        return super().attention_options | {"width": 2 * self.config.hidden_size}

    def borrow(self, model: Decoder) -> None:
        for name in self.borrowed:
            setattr(self, name, getattr(model, name))

    def kept(self, hidden: Tensor, streams: list[Tensor]) -> Tensor:
        if self.of_each:
            streams = [norm(x, None)[0] for norm, x in zip(self.of_each, streams, strict=True)]
        x = torch.cat(streams, 1)
        state: Tensor = self.fc(x if self.of_all is None else self.of_all(x, None)[0])
        return state

    def step(
        self, words: Tensor, state: Tensor, caches: Iterator[LayerState], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        hidden = self.of_hidden(state, None)[0]
        both = torch.cat([self.of_embedding(words, None)[0], hidden], 1)
        x = hidden if self.norms_residual else state
        (block,) = self.layers
        assert isinstance(block, Block)
        x, delta = block.behind(both, x, self.ropes[0], caches, batch)
        y, x = self.norm(x, delta)
        return y, y if self.norms_state else x

    def logits(self, hidden: Tensor) -> Tensor:
        few: Tensor = self.lm_head(hidden)
        if self.tokens is None:
            return few
        every = few.new_full((len(few), self.vocabulary), float("-inf"))
        return every.index_copy_(1, self.tokens, few)


def same(words: nn.Module, others: nn.Module) -> bool:
    """Whether two tables of embeddings are equal, and none of them in codes."""
    tables = [table.weight for table in (words, others) if isinstance(table, nn.Embedding)]
    return len(tables) == 2 and torch.equal(*tables)


def layers_of(directory: Path, said: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Layers of a model whose inputs a head reads; `count`, which is none, means the last output.

    Publishers name layers either by their inputs or by their outputs, and begin with layer 1 then.
    """
    ids = said.get(IDS) or [2, count // 2, count - 3]
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    layers = tuple(i + (ids[0] == 1) for i in ids) if whole else ()
    if not layers or min(layers) < 0 or max(layers) > count:
        raise InvalidInput(
            f"{directory} reads layers {ids} of a model, and this one has {count}; give a head for "
            "it"
        )
    return layers


def tokens_of(weights: Checkpoint, few: int, vocabulary: int) -> Tensor:
    """The model's tokens that a head's tokens are; a checkpoint has how far they are from there."""
    ahead = weights.tensor("d2t", (few,), torch.long)
    tokens = torch.arange(few, device=ahead.device) + ahead
    if len(tokens.unique()) < few or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise InvalidInput(
            f"{weights.directory}: d2t does not name {few} of {vocabulary} tokens; copy it again"
        )
    return tokens


def kind_of(raw: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """What a directory has beside whole models: a head, in words; None: it has none."""
    said = raw.get("speculators_model_type")
    words = f"{said or [raw.get('architectures'), raw.get('model_type'), [*raw]]}".lower()
    found = next((name for word, name in HEADS.items() if word in words), None)
    if found is None and said:
        return f"a head of the kind {said!r}"
    if found is None and not {"fc.weight", "model.fc.weight"}.isdisjoint(tensors):
        three = "midlayer.hidden_norm.weight" in tensors
        return EAGLE_3 if three else "an EAGLE head of version 1 or 2"
    return found


def head_in(
    directory: Path, model: Decoder, vocabulary: int, dtype: torch.dtype, keep: Keep
) -> Eagle | None:
    """The EAGLE-3 head in a directory; None where that has none.

    Args:
        model: That it guesses for.
        vocabulary: Of the model.

    Raises:
        InvalidInput: It is for another model, or another kind of head.
    """
    raw = read_json(directory / "config.json")
    stored = stored_tensors(directory) if (directory / WEIGHTS).is_file() else {}
    kind = kind_of(raw, stored)
    if kind is None:
        return None
    if kind != EAGLE_3:
        raise InvalidInput(
            f"{directory} has {kind}, which anybit does not run; give an EAGLE-3 head, a smaller "
            "model, 'mtp' or 'ngram'"
        )
    if not stored:
        raise InvalidInput(
            f"{directory} has no {WEIGHTS}; a pickle may run code, so convert one that you trust: "
            f"safetensors.torch.save_file(torch.load(FILE, weights_only=True), {WEIGHTS!r})"
        )
    if model.hosted or type(model).forward is not Decoder.forward:
        raise InvalidInput(
            f"{type(model).__name__} gives no inputs of its layers, which {EAGLE_3} reads; use "
            "'ngram' or a smaller model"
        )
    check_sizes(raw, stored)
    with built(directory):
        given = {key: value for key, value in raw.items() if value is not None}
        said = {**given.get("eagle_config", {}), **given}
        config = layer_of(directory, said)
    theirs = config.vocab_size, said.get("target_hidden_size", config.hidden_size)
    if theirs != (ours := (vocabulary, model.config.hidden_size)):
        raise InvalidInput(
            f"{directory} is for a model of {theirs[0]} tokens and {theirs[1]} channels, and this "
            f"one has {ours[0]} and {ours[1]}; give a head for it"
        )
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    found = Reading(config, set(), named, set(named), set(named), {})
    weights = Checkpoint(directory, model.embed_tokens.device, dtype, found, keep=keep)
    check_weights(directory, weights.least_bytes(), weights.device)
    made: type[Eagle] = type("Eagle", (Eagle, KINDS[config.model_type]), {})
    with torch.inference_mode():
        head = made(config, weights, said, model, vocabulary).eval()
    weights.check_all_read(UNREAD)
    return head


def layer_of(directory: Path, said: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of a head's layer; InvalidInput for one that is not run."""
    layer = dict(said.get("transformer_layer_config", said))
    name, count = layer.pop("model_type", "llama"), layer.pop("num_hidden_layers", 1)
    refused = {
        f"layers like {name}'s": name not in KINDS,
        f"{count} layers": count != 1,
        "the model's last state alone": said.get("use_aux_hidden_state") is False,
        "codes": bool(quantization_of(dict(said), directory)),
    }
    if what := [text for text, given in refused.items() if given]:
        raise InvalidInput(
            f"{directory} is a head of {what[0]}; those of one layer like Llama's or Qwen3's are "
            "run, in 16 bits"
        )
    from transformers import AutoConfig  # it reads the names of all models

    return AutoConfig.for_model(name, num_hidden_layers=1, **layer)
