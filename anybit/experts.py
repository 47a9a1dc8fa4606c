"""Mixtures of experts: every expert's projections as linear layers of their own.

transformers holds the experts of a block in two tensors, gate_up_proj (E, 2 I, H) and down_proj
(E, H, I), for E experts of H hidden and I intermediate channels. Published checkpoints mostly store
each projection of each expert under a name of its own. So does anybit, since an expert is quantized
by the tokens that it sees: `split` makes linear layers of what a model holds, and
`published_tensors` shows both layouts of files as the second one.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybit.files import Stored, read_json, stored_tensors

FUSED = ("gate_up_proj", "down_proj")
# Model types whose checkpoints have other names for what transformers calls `mlp` and the gate, up
# and down projections.
MIXTRALS = ("mixtral", "minimax", "minimax_m2")
MODEL_NAME, MIXTRAL_NAME = ".mlp.", ".block_sparse_moe."


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)). layers: the projections by name, in the order gate, up, down."""

    def __init__(self, layers: Mapping[str, nn.Linear], act: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.names, self.act = tuple(layers), act

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act(gate(x)) * up(x))


class Experts(nn.ModuleList):
    """In the place of transformers' module of the same name: the experts, one after the other.

    fused: the module to be replaced. kept: layers ("0.gate_proj") to make a copy of; the others
    share their memory with `fused`.
    """

    def __init__(self, fused: Any, kept: Container[str] = ()):
        super().__init__()
        names = projections(fused.config.model_type)
        for e in range(len(fused.down_proj)):
            gate_up, down = fused.gate_up_proj.detach()[e], fused.down_proj.detach()[e]
            weights = dict(zip(names, (*gate_up.chunk(2), down), strict=True))
            layers = {
                name: linear(weight.clone() if f"{e}.{name}" in kept else weight)
                for name, weight in weights.items()
            }
            self.append(Expert(layers, fused.act_fn))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, H), chosen experts and their weights (T, top_k) -> (T, H)."""
        out, top_k = torch.zeros_like(hidden_states), top_k_index.shape[1]
        expert, order = top_k_index.flatten().sort(stable=True)
        ids = torch.arange(len(self) + 1, device=expert.device)
        for e, (first, last) in enumerate(pairwise(torch.searchsorted(expert, ids).tolist())):
            if first < last:
                chosen = order[first:last]
                tokens = chosen // top_k
                y = self[e](hidden_states[tokens]) * top_k_weights.flatten()[chosen, None]
                out.index_add_(0, tokens, y.to(out.dtype))
        return out


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer (N, K) around a weight, without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of transformers' experts that `split` can take apart."""
    return ((n, m) for n, m in model.named_modules() if is_fused(m) and is_plain(m))


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds experts in two tensors, in any of transformers' layouts."""
    tensors = [module._parameters.get(name) for name in FUSED]
    return all(tensor is not None and tensor.ndim == 3 for tensor in tensors)


def is_plain(module: Any) -> bool:
    """Whether it is the layout that most models have: no bias, not transposed, act(gate) * up."""
    usual = {"has_gate": True, "is_concatenated": True}
    unusual = dict.fromkeys(("has_bias", "is_transposed", "has_post_expert_norm"), False)
    flags = (usual | unusual).items()
    gate = getattr(type(module), "_apply_gate", None)
    return (
        hasattr(module, "config")
        and all(getattr(module, name, value) == value for name, value in flags)
        and getattr(gate, "__name__", "") == "_default_apply_gate"
        and module.gate_up_proj.shape[1] == 2 * module.down_proj.shape[2]
    )


def expert_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Names and shapes (N, K) of the linear layers that `split` would make of fused experts."""
    return {
        f"{name}.{layer}": shape
        for name, module in fused_experts(model)
        for layer, shape in layers_of(module).items()
    }


@contextmanager
def taken_apart(model: nn.Module) -> Iterator[None]:
    """Inside, all fused experts are apart, with the memory of the fused tensors."""
    before = dict(fused_experts(model))
    split(model)
    try:
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def of_all_experts(name: str) -> str:
    """The pattern for a layer of an expert and its like in all others; other names as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def layers_of(module: Any) -> dict[str, tuple[int, int]]:
    """`expert_layers` of one module, by names relative to it."""
    count, hidden, intermediate = module.down_proj.shape
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    named = dict(zip(projections(module.config.model_type), shapes, strict=True))
    return {f"{e}.{name}": shape for e in range(count) for name, shape in named.items()}


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


def published_tensors(directory: Path) -> dict[str, Stored]:
    """`files.stored_tensors` by the names of published checkpoints: experts one by one.

    A projection of an expert is a contiguous part of the tensor that holds all of them.
    """
    stored = stored_tensors(directory)
    model_type = read_json(directory / "config.json").get("model_type")
    gate, up, down = projections(model_type)
    out = {}
    for name, tensor in stored.items():
        layer, _, key = name.rpartition(".")
        if key not in FUSED or not layer.endswith(".experts") or len(tensor.shape) != 3:
            out[published(name, model_type)] = tensor
            continue
        names = (gate, up) if key == "gate_up_proj" else (down,)
        for e, whole in enumerate(parts(tensor, tensor.shape[0])):
            one = whole._replace(shape=whole.shape[1:])
            for projection, part in zip(names, parts(one, len(names)), strict=True):
                out[published(f"{layer}.{e}.{projection}.weight", model_type)] = part
    return out


def parts(tensor: Stored, count: int) -> list[Stored]:
    """A stored tensor cut along its first dimension into equal parts."""
    rows, size = tensor.shape[0] // count, tensor.nbytes // count
    if rows * count != tensor.shape[0]:
        raise ValueError(
            f"{tensor.file}: experts of shape {tensor.shape} have no gate and up projection of "
            "equal size"
        )
    return [
        tensor._replace(shape=(rows, *tensor.shape[1:]), start=tensor.start + i * size, nbytes=size)
        for i in range(count)
    ]
