"""New weights for a running engine, quantized as they arrive: for reinforcement learning."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.engine.lora import Adapters
from anybit.engine.models.layers import Decoder
from anybit.engine.weights import IGNORED, Part, Weights
from anybit.errors import InvalidInput
from anybit.nn.linear import Keep, check_finite
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN


class Arrived(Weights):
    """Dense tensors that a trainer has sent, those of quantized layers as codes already.

    plan: the scheme of each quantized layer, by the checkpoint's names.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, plan: Mapping[str, str], keep: Keep
    ):
        super().__init__(device, dtype)
        self.plan, self.keep = dict(plan), keep
        self.held: dict[str, Tensor | Packed] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor: a copy, since a trainer goes on changing its own."""
        own = tensor.detach().to(self.device, copy=True)
        check_finite(own, name)
        scheme = self.plan.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if scheme is None:
            self.held[name] = own
            return
        fmt = parse_scheme(scheme)[0]
        if own.ndim != 2:
            raise InvalidInput(f"{name}: a matrix is wanted, and shape {tuple(own.shape)} came")
        fmt.check(*own.shape)
        self.held[name] = quantize_weight(RTN(), own.to(self.dtype), fmt)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        found = self._pop(name, shape)
        assert isinstance(found, Tensor)
        return found.to(dtype or self.dtype)

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        b = self.tensor(f"{name}.bias", shape[:1]) if bias else None
        scheme = self.plan.get(name)
        activation = None if scheme is None else parse_scheme(scheme)[1]
        weight = self._pop(f"{name}.weight", shape)
        return weight.to(self.dtype) if isinstance(weight, Tensor) else weight, b, activation

    def _pop(self, name: str, shape: tuple[int, ...]) -> Tensor | Packed:
        if name not in self.held:
            raise InvalidInput(f"tensor {name!r} has not come; send all of the model's")
        found = self.held.pop(name)
        if tuple(found.shape) != shape:
            raise InvalidInput(f"{name} has shape {tuple(found.shape)}; the model wants {shape}")
        return found


@torch.inference_mode()
def again(
    model: Decoder, weights: Iterable[tuple[str, Tensor]], plan: Mapping[str, str], keep: Keep
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
    source = Arrived(model.embed_tokens.device, model.embed_tokens.dtype, plan, keep)
    if model.adapters is not None:
        source.adapters = Adapters(model.adapters.found)
    for name, tensor in weights:
        source.take(name, tensor)
    if model.config.tie_word_embeddings:
        source.held.pop("lm_head.weight", None)
    fresh = type(model)(model.config, source, model.length).eval()
    left = [n for n in source.held if not any(fnmatchcase(n, pattern) for pattern in IGNORED)]
    if left:
        raise InvalidInput(
            f"{len(left)} tensors have no place in the model, such as {', '.join(left[:3])}; send "
            "them under the names that checkpoints of the model have"
        )
    return fresh
