"""Mixtures of experts: every expert's projections as linear layers of their own.

transformers holds the experts of a block in two tensors, gate_up_proj (E, 2 I, H) and down_proj
(E, H, I), for E experts of H hidden and I intermediate channels. Published checkpoints mostly store
each projection of each expert under a name of its own. So does anybit, since an expert is quantized
by the tokens that it sees: `split` makes linear layers of what a model holds, and
a checkpoint of either layout is read as the second one (`checkpoint.layout`).
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybit.kernels.between import outside
from anybit.nn.weight import DecodedWeight

FUSED = ("gate_up_proj", "down_proj")
# Model types whose checkpoints have other names for what transformers calls `mlp` and the gate, up
# and down projections.
MIXTRALS = ("mixtral", "minimax", "minimax_m2")
Layer = Callable[[Tensor], Tensor]
MODEL_NAME, MIXTRAL_NAME = ".mlp.", ".block_sparse_moe."


class Layout(NamedTuple):
    """How a module of transformers holds its experts.

    Attributes:
        layers: The linear layers of one expert by the tensor (experts, N, K) that holds them.
        transposed: Whether that tensor is (experts, K, N).
        biased: Whether there are tensors `<tensor>_bias` (experts, N).
        gate: "plain" for act(gate) * up, "none" for act(up), "own" for the module's `_apply_gate`.
    """

    layers: dict[str, tuple[str, ...]]
    transposed: bool
    biased: bool
    gate: str

    @property
    def tensors(self) -> list[str]:
        """Names of the module's tensors."""
        ends = ("", "_bias") if self.biased else ("",)
        return [name + end for name in self.layers for end in ends]

    @property
    def order(self) -> list[str]:
        """The layers of an expert in the order of computation."""
        return [name for names in self.layers.values() for name in names]

    def cut(self, tensor: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Layers ("7.down_proj") and their parts of a tensor: weights (N, K) or biases (N,)."""
        names = self.layers[tensor.removesuffix("_bias")]
        for e, one in enumerate(whole):
            parts = (one.T if self.transposed and one.ndim == 2 else one).chunk(len(names))
            yield from zip((f"{e}.{name}" for name in names), parts, strict=True)


class Expert(nn.Module):
    """One expert.

    layers: its projections by name, in the order of computation. act: between the first and the
    last. gate: as in `Layout`. own: the module's own `_apply_gate`.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], act: Any, gate: str, own: Any = None):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.names, self.act, self.gate, self.own = tuple(layers), act, gate, own

    def forward(self, x: Tensor) -> Tensor:
        layers = [getattr(self, name) for name in self.names]
        return through(layers, x, self.act, self.gate, self.own)


class Experts(nn.ModuleList):
    """In the place of transformers' module of the same name: the experts, one after the other.

    fused: the module to be replaced. kept: layers ("0.gate_proj") to make a copy of; the others
    share their memory with `fused`.
    """

    def __init__(self, fused: Any, kept: Container[str] = ()):
        super().__init__()
        layout = layout_of(fused)
        assert layout is not None
        self.layout, how = layout, gating(fused, layout)
        found: dict[str, nn.Linear] = {}
        for tensor in layout.tensors:
            for name, part in layout.cut(tensor, fused._parameters[tensor].detach()):
                part = part.clone() if name in kept else part
                if tensor.endswith("_bias"):
                    found[name].bias = nn.Parameter(part, requires_grad=False)
                else:
                    found[name] = linear(part)
        for e in range(len(fused.down_proj)):
            layers = {name: found[f"{e}.{name}"] for name in layout.order}
            self.append(Expert(layers, *how))

    def __getattr__(self, name: str) -> Any:
        layout = self.__dict__.get("layout")
        if layout and name in layout.tensors and name not in self._parameters:
            return self.whole(name)
        return super().__getattr__(name)

    def whole(self, tensor: str) -> Tensor:
        """The tensor of all experts that `fused` had, without memory, for models that look."""
        key = "bias" if tensor.endswith("_bias") else "weight"
        layers = self.layout.layers[tensor.removesuffix("_bias")]

        def one(expert: nn.Module) -> Tensor:
            found = torch.cat([getattr(getattr(expert, layer), key) for layer in layers])
            return found.T if self.layout.transposed and key == "weight" else found

        parts = [getattr(getattr(self[0], layer), key) for layer in layers]
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        shape = shape[::-1] if self.layout.transposed else shape
        return DecodedWeight(
            (len(self), *shape),
            parts[0].dtype,
            parts[0].device,
            lambda: torch.stack([one(expert) for expert in self]),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `routed`."""
        return routed(list(self), *args, **kwargs)


def gating(fused: Any, layout: Layout) -> tuple[Any, str, Any]:
    """An expert's `act`, `gate` and `own`, as in `Expert`."""
    own = None
    if layout.gate == "own":  # it reads settings of the module, and none of its parameters
        settings = {k: v for k, v in vars(fused).items() if not k.startswith("_")}
        own = partial(type(fused)._apply_gate, SimpleNamespace(**settings, **fused._modules))
    return getattr(fused, "act_fn", None), layout.gate, own


def through(layers: Iterable[Layer], x: Tensor, act: Any, gate: str, own: Any) -> Tensor:
    """x (T, H) through the layers of one expert; the others are as in `Expert`."""
    *first, down = layers
    y = [layer(x) for layer in first]
    if gate == "none":
        return down(act(y[0]))
    if gate == "own":
        return down(own(torch.cat(y, -1) if len(y) > 1 else y[0]))
    left, up = y if len(y) > 1 else y[0].chunk(2, -1)
    return down(act(left) * up)


def routed(
    experts: Sequence[Layer],
    hidden_states: Tensor,
    top_k_index: Tensor | None = None,
    top_k_weights: Tensor | None = None,
) -> Tensor:
    """hidden_states (T, H), chosen experts and their weights (T, top_k) -> (T, H).

    Without the latter, as Llama 4 calls it: an equal part of hidden_states for each expert.
    """
    if top_k_index is None or top_k_weights is None:
        parts = hidden_states.chunk(len(experts))
        return torch.cat([one(x) for one, x in zip(experts, parts, strict=True)])
    routing = outside(top_k_index).sort(top_k_index, len(experts))
    rows = outside(hidden_states).spread(hidden_states, routing)
    assert isinstance(rows, Tensor)
    outputs = [
        one(rows[first:last])
        for one, (first, last) in zip(experts, pairwise(routing.starts.tolist()), strict=True)
        if first < last
    ]
    y = torch.cat(outputs) if outputs else rows
    y = outside(y, top_k_weights).combine(y, routing, top_k_weights)
    return y.to(hidden_states.dtype)


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer (N, K) around a weight, without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of transformers' experts that `split` can take apart."""
    return ((n, m) for n, m in model.named_modules() if layout_of(m) is not None)


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds experts in tensors with a dimension for them, in any layout."""
    own = dict(module._parameters)  # of a scripted module, they are no dictionary
    tensors = [own.get(name) for name in ("up_proj", *FUSED)]
    found = [tensor for tensor in tensors if tensor is not None]
    return len(found) == 2 and all(tensor.ndim == 3 for tensor in found)


def layout_of(module: Any) -> Layout | None:
    """The layout of a module that holds experts; None: it is unknown, and they stay dense."""
    if not holds_experts(module):
        return None
    layers: dict[str, tuple[str, ...]] = {name: (name,) for name in FUSED}
    if type(module).__name__ == "Llama4TextExperts":
        return Layout(layers, transposed=True, biased=False, gate="plain")
    known = all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_bias"))
    if getattr(module, "has_post_expert_norm", False) or not known:
        return None
    # What transformers' decorator `use_experts_implementation` says of the module.
    transposed, biased = module.is_transposed, module.has_bias
    if not module.has_gate:
        layers = {name: (name,) for name in ("up_proj", "down_proj")}
        return Layout(layers, transposed, biased, "none")
    plain = module._apply_gate.__func__.__name__ == "_default_apply_gate"
    whole = transposed or biased or not module.is_concatenated
    if not whole:  # nobody publishes the others one by one, with a gate of their own
        gate, up, down = projections(module.config.model_type)
        layers = {FUSED[0]: (gate, up), FUSED[1]: (down,)}
    same = module.gate_up_proj.shape[0] == module.down_proj.shape[0]
    return Layout(layers, transposed, biased, "plain" if plain else "own") if same else None


def expert_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Names and shapes (N, K) of the linear layers that `split` would make of fused experts."""
    return {
        f"{name}.{layer}": shape
        for name, module in fused_experts(model)
        for layer, shape in layers_of(module).items()
    }


def of_all_experts(name: str) -> str:
    """The pattern for a layer of an expert and its like in all others; other names as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def layers_of(module: Any) -> dict[str, tuple[int, int]]:
    """`expert_layers` of one module, by names relative to it."""
    layout = layout_of(module)
    assert layout is not None
    out: dict[str, tuple[int, int]] = {}
    for tensor, names in layout.layers.items():
        count, n, k = module._parameters[tensor].shape
        n, k = (k, n) if layout.transposed else (n, k)
        for e in range(count):
            out |= {f"{e}.{name}": (n // len(names), k) for name in names}
    return out


def split(model: nn.Module, names: Iterable[str] | None = None) -> nn.Module:
    """Take fused experts apart that hold any of the named layers; None: all. Returns the model.

    The named layers share the memory of the fused tensors; others get their own, since they stay.
    """
    wanted = None if names is None else set(names)
    for name, module in list(fused_experts(model)):
        layers = layers_of(module)
        kept = {key for key in layers if wanted is not None and f"{name}.{key}" not in wanted}
        if len(kept) < len(layers):
            model.set_submodule(name, Experts(module, kept))
    return model


# Checkpoints.


def projections(model_type: str | None) -> tuple[str, str, str]:
    """An expert's gate, up and down projection by the names that checkpoints have for them."""
    return ("w1", "w3", "w2") if model_type in MIXTRALS else ("gate_proj", "up_proj", "down_proj")


def published(name: str, model_type: str | None) -> str:
    """A checkpoint's name for a tensor or layer of transformers' model."""
    return name.replace(MODEL_NAME, MIXTRAL_NAME) if model_type in MIXTRALS else name


def unpublished(name: str, model_type: str | None) -> str:
    """transformers' name for a tensor or layer of a checkpoint."""
    return name.replace(MIXTRAL_NAME, MODEL_NAME) if model_type in MIXTRALS else name
