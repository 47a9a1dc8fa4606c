"""New weights for a running engine, quantized as they arrive: for reinforcement learning."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from anybit.checkpoint.architecture import empty_model
from anybit.checkpoint.names import Names, is_merge, known_layout
from anybit.checkpoint.places import name_of
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.engine.models.layers import Decoder
from anybit.engine.weights import IGNORED, Part, Weights
from anybit.errors import InvalidInput, InvalidType
from anybit.nn.linear import check_finite
from anybit.nn.multiplier import Keep
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN

HEAD = "lm_head.weight"


class Arrived(Weights):
    """Dense tensors that a trainer has sent, those of quantized layers as codes already.

    plan: the scheme of each quantized layer, by the checkpoint's names. shares_head: whether the
    head may be made of the embeddings, if no weight of its own has come.
    """

    def __init__(self, model: Decoder, plan: Mapping[str, str], keep: Keep, shares_head: bool):
        super().__init__(model.embed_tokens.device, model.embed_tokens.dtype)
        self.config, self.keep = model.config, keep
        self.plan = {
            self.own(f"{layer}.weight").removesuffix(".weight"): scheme
            for layer, scheme in plan.items()
        }
        words = f"{model.prefix}.{model.words_name}.weight"
        self.repeated = self.own(words) if shares_head else None
        if model.adapters is not None:
            self.adapters = model.adapters.of_new_weights()
        self.held: dict[str, Tensor | Packed] = {}
        self.sent: dict[str, str] = {}  # the names under which those came

    def own(self, name: str) -> str:
        """The model's name for a tensor, of its own names or of a checkpoint's; experts apart."""
        if name in self.table.state:
            return name
        found, converter, _ = self.table.in_model(name)
        if converter is not None and is_merge(converter):
            layer, _, end = name.rpartition(".")
            return f"{name_of(self.table, layer)}.{end}"
        return found if converter is None and found in self.table.state else name

    def take(self, name: str, own: Tensor, sent: str = "") -> None:
        """Keep a tensor that nobody else changes, as codes where the plan says so.

        Args:
            name: In the model or in its checkpoints; tensors of all experts of a block are cut.
            own: The tensor.
            sent: The name under which it came, if that is another.
        """
        name, sent = self.own(name), sent or name
        experts, _, key = name.rpartition(".")
        if experts in self.table.fused and key in known_layout(self.table.fused[experts]).tensors:
            end = "bias" if key.endswith("_bias") else "weight"
            for layer, part in known_layout(self.table.fused[experts]).cut(key, own):
                self.take(f"{experts}.{layer}.{end}", part, sent)
            return
        if name in self.sent and not (name == HEAD and self.sent[name] == self.repeated):
            raise InvalidInput(f"{sent} has come twice")
        self.sent[name] = sent
        if name == self.repeated and HEAD not in self.held:
            self.take(HEAD, own, name)
        scheme = self.plan.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if scheme is None:
            self.held[name] = own
            return
        fmt = parse_scheme(scheme)[0]
        if own.ndim != 2:
            raise InvalidInput(f"{name}: a matrix is wanted, and shape {tuple(own.shape)} came")
        fmt.check(*own.shape)
        self.held[name] = quantize_weight(RTN(), own, fmt)

    @cached_property
    def table(self) -> Names:
        """The names of transformers' model and of its checkpoints."""
        kind = (self.config.architectures or [""])[0]  # a Decoder is made for one
        return Names(empty_model(kind, getattr(transformers, kind), copy.deepcopy(self.config)))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        found = self._pop(name, shape)
        assert isinstance(found, Tensor)
        return found.to(dtype or self.dtype)

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        b = self.tensor(f"{name}.bias", shape[:1]) if bias else None
        scheme = self.plan.get(self.own(f"{name}.weight").removesuffix(".weight"))
        activation = None if scheme is None else parse_scheme(scheme)[1]
        weight = self._pop(f"{name}.weight", shape)
        return weight.to(self.dtype) if isinstance(weight, Tensor) else weight, b, activation

    def coded(self, name: str) -> bool:
        return self.own(f"{name}.weight").removesuffix(".weight") in self.plan

    def _pop(self, name: str, shape: tuple[int, ...]) -> Tensor | Packed:
        own = self.own(name)
        if own not in self.held:
            message = f"tensor {name!r} has not come; send all of the model's"
            for other in self.sent.values():
                if ends := [n for n in (name, own) if other.endswith(f".{n}")]:
                    prefix = other.removesuffix(ends[0])
                    message += f", without the prefix {prefix!r} of {other!r}"
                    break
            raise InvalidInput(message)
        found = self.held.pop(own)
        if tuple(found.shape) != shape:
            raise InvalidInput(f"{name} has shape {tuple(found.shape)}; the model wants {shape}")
        return found


@torch.inference_mode()
def rebuild(
    model: Decoder,
    weights: Iterable[tuple[str, Tensor]],
    plan: Mapping[str, str],
    keep: Keep,
) -> Decoder:
    """The same model with other weights; the one that runs stays as it is.

    Args:
        model: The one that runs.
        weights: Dense tensors by the names of checkpoints, in any order.
        plan: The scheme of each quantized layer.
        keep: As in `anybit.load`.

    Raises:
        InvalidInput: Tensors are missing, left over, of wrong shapes, or hold NaN or inf.
    """
    shares = not model.config.tie_word_embeddings and repeats_embeddings(model)
    source, further = Arrived(model, plan, keep, shares), model.further(model.config)
    for name, tensor in pairs(weights):
        if further and name.startswith(f"{further.prefix}."):  # no part of the model
            continue
        own = tensor.detach().to(model.embed_tokens.device, copy=True)  # a trainer changes its own
        check_finite(own, name)
        source.take(name, own)
    if model.config.tie_word_embeddings:
        source.held.pop(HEAD, None)
    fresh = type(model)(model.config, source, model.length).eval()
    fresh.exact_answers = model.exact_answers
    names = dict.fromkeys(source.sent[name] for name in source.held)
    left = [n for n in names if not any(fnmatchcase(n, pattern) for pattern in IGNORED)]
    if left:
        raise InvalidInput(
            f"{len(left)} tensors have no place in the model, such as {', '.join(left[:3])}; send "
            "them under the names that checkpoints of the model have"
        )
    return fresh


def pairs(weights: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and dense tensors, checked. weights: pairs of them, or a dictionary."""
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidType(f"a pair of a name and a tensor is wanted, and {pair!r:.60} came")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InvalidType(
                f"a pair of a name and a torch.Tensor is wanted, and one of {type(name).__name__} "
                f"{name!r:.60} and {type(tensor).__name__} came"
            )
        if tensor.is_meta:
            raise InvalidInput(f"{name} is on the meta device, without numbers; gather it first")
        if not tensor.is_floating_point():
            raise InvalidInput(f"{name} holds {tensor.dtype}; floats are wanted, and no codes")
        yield name, tensor


def repeats_embeddings(model: Decoder) -> bool:
    """Whether a head of its own says what the embeddings say.

    So it is where a shared head has got codes of its own: config.json then calls it untied, and a
    trainer has no tensor for it. One bit a weight leaves an error of 0.6; others are unlike by 1.4.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = model.embed_tokens
    x = torch.randn(4, embedding.shape[1], generator=generator).to(embedding)
    wanted = F.linear(x, embedding).float()
    return bool((model.lm_head(x).float() - wanted).norm() < 0.8 * wanted.norm())
