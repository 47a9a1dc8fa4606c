"""The linear layers of a model: dense ones, quantized ones, and how one replaces the other."""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from anybit.errors import InvalidInput, InvalidType, probing
from anybit.nn.embedding import QuantEmbedding, embedding_layers
from anybit.nn.experts import expert_layers, fused_experts, holds_experts, linear, split
from anybit.nn.gates import gates
from anybit.nn.linear import QuantLinear, is_conv1d
from anybit.nn.multiplier import Keep
from anybit.nn.outline import Outline
from anybit.nn.plan import Plan, Spec, plan_of, quantization_config, resolve
from anybit.nn.quantized import Quantized
from anybit.nn.tied import (
    check_ties,
    output_embeddings,
    task_heads,
    tie_again,
    tied_heads,
    tied_layers,
    ties_others,
)

log = logging.getLogger(__name__)
Module = TypeVar("Module", bound=nn.Module)

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x W^T + bias whenever its weight is used, and nothing else.

    Subclasses of nn.Linear with a forward of their own mostly do not: routers of transformers
    return probabilities. Nor does nn.MultiheadAttention's `out_proj`, which is never called, nor a
    layer whose weight a hook makes anew in each call (pruning, the older weight_norm).
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if not isinstance(module, nn.Linear):
        return is_conv1d(module)
    kind, own = type(module), vars(module)
    # A forward of this one module's; accelerate keeps the one that its hooks go around.
    forward = own.get("_old_forward", own.get("forward"))
    if forward is not None and getattr(forward, "__func__", None) is not kind.forward:
        return False
    stored = {*module._parameters, *module._buffers}
    if "weight" not in stored and not is_parametrized(module, "weight"):
        return False
    if kind.__call__ is not nn.Module.__call__:
        return False
    return kind.forward is nn.Linear.forward or multiplies(module)


def multiplies(module: nn.Linear) -> bool:
    """Whether a forward of another class than nn.Linear's computes the same: tried on few numbers.

    In bfloat16, since layers that compute in float32 whatever the model's dtype are more than that.
    """
    if module._buffers or module._modules or module._parameters.keys() != {"weight", "bias"}:
        return False
    other = type(module).__new__(type(module))
    other.__dict__ = vars(module) | {"in_features": 4, "out_features": 5, "training": False}
    with torch.device("cpu"), torch.no_grad():  # the model may be built on the meta device
        random = torch.Generator().manual_seed(0)
        x, w, b = (torch.randn(s, generator=random).bfloat16() for s in ((2, 3, 4), (5, 4), (5,)))
        x[1] *= 1024  # some clamp what is large
        bias = None if module.bias is None else b
        other._parameters = {"weight": w, "bias": bias}  # type: ignore[dict-item]
        try:
            with probing():
                y = type(module).forward(other, x)
        except Exception:  # it wants something else
            return False
        expected = nn.functional.linear(x, w, bias)
    same = isinstance(y, Tensor) and (y.dtype, y.shape) == (expected.dtype, expected.shape)
    return same and torch.allclose(y, expected, rtol=0.02, atol=0.02)


def dense_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes (N, K) of a model's dense linear layers, its experts included."""
    linears = {n: m for n, m in model.named_modules() if is_linear(m)}
    shapes = {n: tuple(weight_of(m).shape) for n, m in linears.items()}
    return shapes | expert_layers(model)


def weight_of(module: nn.Module) -> Tensor:
    """The weight (N, K) of a dense linear layer, in its own memory."""
    weight = cast(Tensor, module.weight)
    return weight.T if is_conv1d(module) else weight


def take_apart(model: nn.Module, names: Iterable[str]) -> None:
    """Make an nn.Linear of each named layer that the model holds in another way, without a copy."""
    names = list(names)
    split(model, names)
    for name in names:
        module = model.get_submodule(name)
        if is_conv1d(module):
            layer = linear(weight_of(module.requires_grad_(False)))
            layer.bias = module.bias  # type: ignore[assignment]
            layer.transposed = True  # type: ignore[assignment]
            replace(model, name, layer)


@contextmanager
def taken_apart(model: nn.Module) -> Iterator[None]:
    """Inside, all layers are nn.Linear, with the memory of what they were."""
    before = dict(fused_experts(model))
    before |= {name: m for name, m in model.named_modules() if is_conv1d(m)}
    take_apart(model, dense_layers(model))
    try:
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def linear_at(parent: nn.Module, name: str) -> nn.Linear:
    """The dense linear layer of this name below a module."""
    return cast(nn.Linear, parent.get_submodule(name))


def linear_schemes(model: nn.Module, spec: Spec | Plan) -> dict[str, str]:
    """Which layers of a model that is not loaded yet are to be quantized, and how.

    Args:
        model: A model on the meta device.
        spec: As in `quantize_`.

    Returns:
        Schemes by layer.

    Raises:
        InvalidInput: As `resolve` does, and for a layer whose weight is tied to another's.
    """
    outline = outline_of(model)
    schemes = outline.schemes(outline.full_plan(spec))
    check_ties(schemes, tied_layers(model), outline.sharing(schemes))
    return schemes


def outline_of(model: nn.Module) -> Outline:
    """What plans go by. model: a dense one; it may be on the meta device."""
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    fused, tied = dict(fused_experts(model)), tied_heads(model)
    return Outline(
        dense_layers(model),
        embedding_layers(model),
        output_embeddings(model) or task_heads(model),
        tied,
        gates(model),
        getattr(model, "config", None),
        more=tuple(n for n, m in linears if not is_linear(m)),
        unknown=tuple(n for n, m in model.named_modules() if holds_experts(m) and n not in fused),
        others=ties_others(model, tied),
    )


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """On an exception, put back all modules, parameters and buffers that were there before.

    Whether the model was in training mode is restored in any case.
    """
    before = [
        (m, dict(m._modules), dict(m._parameters), dict(m._buffers))
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    ]
    training = model.training
    try:
        yield
    except BaseException:
        for module, children, parameters, buffers in before:
            module._modules, module._parameters, module._buffers = children, parameters, buffers
        raise
    finally:
        model.train(training)


def record(model: nn.Module, plan: dict[str, str | None] | None) -> None:
    """Note the plan on a model and in the config of a transformers model; None removes it."""
    model.anybit_formats = plan  # type: ignore[assignment]
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    if hasattr(type(model), "dequantize"):
        if plan is not None:
            model.dequantize = partial(dequantized, model)  # type: ignore[assignment]
            count_weights(model)
        else:  # nor what transformers goes by that has loaded it
            for name in (
                "dequantize",
                "num_parameters",
                "hf_quantizer",
                "is_quantized",
                "quantization_method",
            ):
                vars(model).pop(name, None)
    if plan is not None:  # so that `save_pretrained` writes it too
        config.quantization_config = quantization_config(plan)  # type: ignore[union-attr]
    elif hasattr(config, "quantization_config"):
        del config.quantization_config  # type: ignore[union-attr]
    for module in model.modules():  # some models of transformers branch on this
        config = getattr(module, "config", None)
        if plan is not None and hasattr(config, "to_json_string"):
            config._is_quantized = True  # type: ignore[union-attr]
        elif hasattr(config, "_is_quantized"):
            del config._is_quantized  # type: ignore[union-attr]


def count_weights(model: nn.Module) -> None:
    """Let `num_parameters` of a model of transformers count quantized weights as well."""
    model.num_parameters = partial(num_parameters, model)  # type: ignore[assignment]


def num_parameters(model: nn.Module, only_trainable: bool = False, **options: Any) -> int:
    """`num_parameters` of transformers, which sees no parameter in a quantized weight."""
    kind: Any = type(model)
    count: int = kind.num_parameters(model, only_trainable=only_trainable, **options)
    return count if only_trainable else count + quantized_weights(model)


def quantized_weights(model: nn.Module) -> int:
    """How many weights the quantized layers of a model hold."""
    return sum(math.prod(m.shape) for _, m in quantized_modules(model) if not m.is_copy)


def refuse_adapters(model: nn.Module) -> None:
    """Raise InvalidInput for a model that peft has put adapters on, whose layers hide behind them.

    `peft_config` is on models that peft wraps, and on those that it changes in place.
    """
    if getattr(model, "peft_config", None):
        raise InvalidInput(
            f"{type(model).__name__} has adapters of peft; call merge_and_unload() or unload() "
            "first, and save the adapters by save_pretrained()"
        )


def plan_in(model: nn.Module) -> dict[str, str | None]:
    """The plan that describes a model's quantized layers as they are now."""
    refuse_adapters(model)
    quantized = dict(quantized_modules(model))
    if not quantized:
        raise InvalidInput(f"{type(model).__name__} has no quantized layers; quantize_ it first")
    schemes = {name: layer.scheme for name, layer in quantized.items()}
    shapes, words = dense_layers(model), embedding_layers(model)
    for name, layer in quantized.items():
        (shapes if isinstance(layer, QuantLinear) else words)[name] = layer.shape
    with suppress(InvalidInput):  # a layer was replaced since then
        plan = getattr(model, "anybit_formats", None)
        if plan and resolve(shapes, plan, words) == schemes:
            return plan_of(plan)
    return {"*": None, **schemes}


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule `name`, whose forward hooks it takes over."""
    old = model.get_submodule(name)
    for hooks in HOOKS:
        setattr(module, hooks, getattr(old, hooks))
    model.set_submodule(name, module.train(old.training))


@contextmanager
def under_all_names(model: nn.Module) -> Iterator[None]:
    """What is replaced inside is replaced under every name that the model has for it."""
    first: dict[int, str] = {}
    others = [
        (name, first[id(module)])
        for name, module in model.named_modules(remove_duplicate=False)
        if first.setdefault(id(module), name) != name
    ]
    yield
    for other, name in others:
        with suppress(AttributeError):  # below a module that was replaced as a whole
            if model.get_submodule(other) is not model.get_submodule(name):
                model.set_submodule(other, model.get_submodule(name))


def quantized_modules(model: nn.Module) -> Iterable[tuple[str, Quantized]]:
    """Names of all that is quantized: linear layers and embeddings."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, Quantized))


def quantized_layers(model: nn.Module) -> Iterable[tuple[str, QuantLinear]]:
    """Names and linear layers that are quantized."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, QuantLinear))


def check_module(model: object, function: str) -> None:
    """InvalidType unless a model is given, rather than its name or directory."""
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"{function} takes a loaded model, not {type(model).__name__}; load it with "
            "transformers' from_pretrained or anybit.load, or use the command line for directories"
        )


def set_keep(model: Module, keep: Keep) -> Module:
    """Say whether quantized layers may hold decoded copies of their weights; returns the model.

    Args:
        model: whose layers choose their kernels anew.
        keep: see `QuantLinear`.
    """
    check_module(model, "set_keep")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for _, layer in quantized_layers(model):
        if layer.keep != keep:
            layer.keep = keep
            layer.forget()
        if not any(buffer.is_meta for buffer in layer.buffers()):
            layer.multiplier(dtype or layer.weight_dtype)
    for backend, text in (
        (
            "dense",
            "are held decoded, in %.2f GB, since no kernel multiplies them here as they are; "
            "keep='packed' frees that memory and is slower",
        ),
        (
            "reference",
            "are decoded in each call, which is slow; keep='decoded' holds them decoded, "
            "in %.2f GB",
        ),
    ):
        found = [layer for _, layer in quantized_layers(model) if layer.backend == backend]
        if found:
            size = (dtype or torch.get_default_dtype()).itemsize
            gigabytes = sum(m.out_features * m.in_features for m in found) * size / 1e9
            schemes = ", ".join(sorted({layer.scheme for layer in found}))
            log.info("%d layers (%s) " + text, len(found), schemes, gigabytes)
    return model


def dequantize_(model: Module) -> Module:
    """Turn quantized layers back into dense ones that hold the decoded weights, in place.

    For speed where memory does not matter: a CPU then decodes each weight once instead of on every
    call. Activations are no longer quantized.

    Args:
        model: A model with quantized layers.

    Returns:
        The model.
    """
    check_module(model, "dequantize_")
    with under_all_names(model):
        weights: dict[Quantized, nn.Parameter] = {}
        for name, layer in list(quantized_modules(model)):
            plain: Any = dense_layer(layer)
            known = [weights[other] for other in layer.sharing if other in weights]
            weights[layer] = plain.weight = known[0] if known else plain.weight
            replace(model, name, plain)
    tie_again(model)
    record(model, None)
    return model


def dequantized(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """What `model.dequantize()` of transformers does, for a model that `quantize_` has changed."""
    if getattr(model, "hf_quantizer", None) is not None:  # loaded quantized, and quantized further
        whole: Any = type(model)
        return cast(nn.Module, whole.dequantize(model, dtype))
    dequantize_(model)
    return model if dtype is None else model.to(dtype)


def dense_layer(layer: Quantized) -> nn.Module:
    """The dense layer of the decoded weight."""
    if isinstance(layer, QuantEmbedding):
        return layer.unquantized()
    assert isinstance(layer, QuantLinear)
    weight = layer.dequantize(layer.weight_dtype)
    if layer.transposed:
        from transformers.pytorch_utils import Conv1D

        conv = Conv1D(0, 0)
        conv.nf, conv.nx = weight.shape
        conv.weight = nn.Parameter(weight.T.contiguous(), False)
        conv.bias = layer.bias  # type: ignore[assignment]
        return conv
    dense = linear(weight)
    dense.bias = layer.bias  # type: ignore[assignment]
    return dense
