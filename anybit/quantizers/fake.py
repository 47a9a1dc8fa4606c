"""Unquantized layers that compute with the weights that `quantize_` would store.

A layer keeps its module, parameters, names and hooks, and gets another class: one of those below on
top of its own. Each call rounds the weight, as it then is, by the format's own encoder and decoder,
and activations where the scheme says so. Gradients pass the rounding unchanged (straight-through,
Bengio et al., 2013, https://arxiv.org/abs/1308.3432) and reach the unrounded weight.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.rotation import Rotation
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput
from anybit.kernels.reference import quantized_activation
from anybit.nn.around import Around
from anybit.nn.embedding import Factor, factor_of
from anybit.nn.experts import (
    Layer,
    Layout,
    fused_experts,
    gating,
    layers_of,
    layout_of,
    routed,
    through,
)
from anybit.nn.linear import all_finite, is_conv1d
from anybit.nn.multiplier import autocast, check
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN


class Rounding(NamedTuple):
    """How a layer rounds.

    Attributes:
        name: The layer's, for errors.
        format: Of the weight.
        activation: What its inputs are quantized to, or None.
        transposed: Whether the module holds W^T.
        factor: Of an embedding's rows.
    """

    name: str
    format: Format
    activation: str | None = None
    transposed: bool = False
    factor: Factor = Factor()

    def packed(self, w: Tensor) -> Packed:
        """The weight (N, K) as it would be stored; InvalidInput when it holds NaN or inf."""
        w = w.detach()
        if not all_finite(w):
            raise InvalidInput(
                f"{self.name}: the weight has become NaN or inf; go back to a state from before, "
                "and train on at a lower rate"
            )
        with torch.no_grad(), torch.autocast(w.device.type, enabled=False):
            return quantize_weight(RTN(), w, self.format)

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., K) -> (..., N), as a `QuantLinear` that holds its weight (N, K) decoded."""
        packed = self.packed(w)
        around = Around.of(packed.grid)
        with torch.autocast(w.device.type, enabled=False):
            held = Rotation.of(packed.grid).rotated(w) if self.format.rotate else w
            held = straight(held, packed.stored().dequantize().to(x.dtype))
        x = around.before(x)
        if self.activation is not None:
            x = straight(x, quantized_activation(x.detach(), self.activation).to(x.dtype))
        inside = around.inside(bias)
        y = F.linear(x, held, None if inside is None else inside.to(x.dtype))
        return around.after(y, bias)


class Straight(torch.autograd.Function):
    """Rounded numbers, whose gradient is that of what was rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers of x, in a dtype of their own."""
    out: Tensor = Straight.apply(x, rounded)  # type: ignore[no-untyped-call]
    return out


class Fake(nn.Module):
    """What the classes below share.

    Attributes:
        kind: The module's own class.
        mixin: The one of those below.
        rounding: How its layers round, by names relative to it.
    """

    kind: ClassVar[Any]
    mixin: ClassVar[Any]
    rounding: dict[str, Rounding]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ever. Modules with a call of their own are neither `is_linear` nor `factor_of`'s."""
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # of pickle, which finds no class made here
        made: Any = super().__reduce_ex__(protocol)
        _, _, *state = made
        return (empty, (self.mixin, self.kind), *state)


class FakeLinear(Fake):
    """An nn.Linear, or transformers' Conv1D."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        x, own = autocast(input), self.rounding[""]
        w = self.weight.T if own.transposed else self.weight
        check(x, w.shape[1])
        return own.product(x, w, self.bias)


class FakeEmbedding(Fake):
    """An embedding whose rows are those of the rounded weight."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        own, w = self.rounding[""], self.weight
        rounded = straight(w, own.packed(w).dequantize().to(w.dtype))
        return own.factor.on(F.embedding(input, rounded, self.padding_idx))


class FakeExperts(Fake):
    """transformers' experts in two tensors, one after the other, as `Experts` computes them."""

    layout: Layout

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        layout, parts = self.layout, dict[str, Tensor]()
        for tensor in layout.tensors:
            end = ".bias" if tensor.endswith("_bias") else ".weight"
            parts |= {name + end: part for name, part in layout.cut(tensor, getattr(self, tensor))}
        act, gate, own = gating(self, layout)

        def layer(name: str) -> Layer:
            w, bias, rounding = parts[f"{name}.weight"], parts.get(f"{name}.bias"), self.rounding
            if name not in rounding:
                return lambda x: F.linear(x, w, bias)
            return lambda x: rounding[name].product(x, w, bias)

        def expert(e: int) -> Layer:
            layers = [layer(f"{e}.{name}") for name in layout.order]
            return lambda x: through(layers, x, act, gate, own)

        count = len(getattr(self, layout.tensors[0]))
        return routed([expert(e) for e in range(count)], *args, **kwargs)


@cache
def faked(mixin: Any, kind: Any) -> Any:
    """The class of a module of class `kind` that rounds."""
    own = {"kind": kind, "mixin": mixin, "__module__": kind.__module__}
    return type(f"Fake{kind.__name__}", (mixin, kind), own)


def empty(mixin: Any, kind: Any) -> Any:
    """A module of that class without contents, for pickles and copies."""
    cls = faked(mixin, kind)
    return cls.__new__(cls)


def put(model: nn.Module, schemes: Mapping[str, str]) -> None:
    """Let the named layers round, in place. schemes: as `schemes_of` finds them."""
    how = {name: Rounding(name, *parse_scheme(scheme)) for name, scheme in schemes.items()}
    for name, experts in list(fused_experts(model)):
        layers = {layer: f"{name}.{layer}" for layer in layers_of(experts)}
        if own := {layer: how.pop(whole) for layer, whole in layers.items() if whole in how}:
            layout: Any = layout_of(experts)
            experts.layout = layout
            become(experts, FakeExperts, own)
    for name, each in how.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            become(module, FakeEmbedding, {"": each._replace(factor=factor_of(module) or Factor())})
        else:
            become(module, FakeLinear, {"": each._replace(transposed=is_conv1d(module))})


def become(module: Any, mixin: Any, how: dict[str, Rounding] | None = None) -> None:
    """Change the class of a module: to one that rounds, or back to its own (None)."""
    before: Any = type(module)
    hooks = module._forward_pre_hooks
    module.__class__ = before.kind if mixin is None else faked(mixin, before)
    for name in ("forward", "_old_forward"):  # those of accelerate's hooks are bound to a class
        if getattr(vars(module).get(name), "__func__", None) is before.forward:
            setattr(module, name, MethodType(type(module).forward, module))
    if mixin is None:
        for key in [key for key, hook in hooks.items() if hook is called]:
            del hooks[key]
        del module.rounding
    else:
        module.rounding = how
        module.register_forward_pre_hook(called)


def called(module: nn.Module, args: Any) -> None:
    """A hook without effect: layers without any are not called by torch's fast paths."""


@contextmanager
def unfaked(model: nn.Module) -> Iterator[dict[str, str]]:
    """Make layers that round ordinary ones; an exception inside makes them round again.

    Yields:
        Their schemes by name.

    Raises:
        InvalidInput: Something has changed their class since then.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, Fake)}
    for name, module in found.items():
        if type(module) is not faked(module.mixin, module.kind):
            raise InvalidInput(
                f"{name} has become a {type(module).__name__}; remove what has changed it "
                "(parametrizations, sharding) before the model is quantized"
            )
    before = [(module, module.mixin, module.rounding) for module in found.values()]
    schemes = {
        f"{name}.{layer}".strip("."): scheme_name(own.format, own.activation)
        for name, module in found.items()
        for layer, own in module.rounding.items()
    }
    for module in found.values():
        become(module, None)
    try:
        yield schemes
    except BaseException:
        for module, mixin, how in before:
            become(module, mixin, how)
        raise
