"""`quantize_`: replace the linear layers of a model by quantized ones, in place."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import cast, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybit.core.format import Format, get_format
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput, InvalidType
from anybit.nn.linear import QuantLinear, check_finite, check_real
from anybit.nn.model import (
    Module,
    check_module,
    is_linear,
    linear_at,
    outline_of,
    plan_in,
    quantized_modules,
    record,
    refuse_adapters,
    replace,
    restored_on_error,
    take_apart,
    under_all_names,
)
from anybit.nn.outline import Outline
from anybit.nn.plan import Plan, Spec
from anybit.nn.tied import (
    check_ties,
    forget_ties,
    shared_weights,
    sharing_heads,
    untied,
    untied_heads,
)
from anybit.progress import progress, shown
from anybit.quantizers.base import Quantizer, planned, quantize_weight
from anybit.quantizers.calibration.driver import calibrate, calibration_of
from anybit.quantizers.embeddings import apart, quantize_embeddings
from anybit.quantizers.fake import FakeLinear, put, unfaked
from anybit.quantizers.rtn import RTN


@overload
def quantize_(
    model: nn.Linear,
    spec: Spec | Plan | None = None,
    quantizer: Quantizer | None = None,
    *,
    show_progress: bool | None = None,
) -> QuantLinear: ...
@overload
def quantize_(
    model: Module,
    spec: Spec | Plan | None = None,
    quantizer: Quantizer | None = None,
    *,
    show_progress: bool | None = None,
) -> Module: ...
def quantize_(
    model: nn.Module,
    spec: Spec | Plan | None = None,
    quantizer: Quantizer | None = None,
    *,
    show_progress: bool | None = None,
) -> nn.Module:
    """Quantize a model's linear layers, and embeddings that are named, in place.

    An error or an interrupt leaves the model as it was.

    Args:
        model: A dense model, or a single nn.Linear. A model's experts count as linear layers, under
            names like "model.layers.0.mlp.experts.7.down_proj", however it holds them.
        spec: One format for all layers, or `{glob: format or None}` over module names, in which the
            last match wins and None keeps a layer dense. The output head (`lm_head`) and layers of
            fewer than 16 inputs or outputs (gates) are kept, unless a pattern other than "*" names
            them; embeddings, unless one names them by more than "*" behind the last dot. A head
            that shares their weight shares their codes, or is named itself and gets a weight of its
            own. Calibrated quantizers round embeddings to nearest. Formats are spec strings, with
            `@int8` or `@fp8` for activations quantized per token ("liquid@int8"). By default what
            `fake_quantize_` was given.
        quantizer: Chooses the codes; `RTN()` by default. A calibrated one (GPTQ, Smooth, Additive)
            runs the model on its data, block by block, each block after quantized ones.
        show_progress: Whether to show a progress bar on stderr; by default on a terminal.

    Returns:
        The model; for a single nn.Linear, the QuantLinear in its place.

    Raises:
        InvalidInput: A format is unknown or cannot store a layer's shape, a pattern matches no
            layer or a layer no pattern, weights are shared or hold NaN or inf, the model is
            quantized already, or the calibration data does not fit it.
        InvalidType: The model is no module, or a weight has no floating-point dtype.
    """
    check_module(model, "quantize_")
    if is_linear(model) or isinstance(model, FakeLinear):
        alone = nn.ModuleDict({"layer": model})
        return quantize_(alone, spec, quantizer, show_progress=show_progress).layer  # type: ignore[return-value]
    with unfaked(model) as schemes, shown(show_progress):
        if spec is None:
            spec = trained_for(model, schemes)
        return quantized(model, spec, quantizer or RTN())


def fake_quantize_(model: Module, spec: Spec | Plan | None) -> Module:
    """Let a model compute with the weights that `quantize_` would store, and train its own.

    Each call of a layer rounds its weight to nearest in the layer's format, and its inputs where
    the scheme says so; gradients pass the rounding unchanged. Parameters, their names and
    `state_dict` stay those of the unquantized model, so optimizers, saving and resuming work as
    before. At last `quantize_(model)` makes the quantized model of it, with the same outputs.
    Called again, it changes the formats.

    A forward pass rounds each weight anew, and holds a copy until the backward pass unless gradient
    checkpointing drops it. That is quick for numbers (`int4`, `fp6`, `nvfp4`), and slow for formats
    that search (`codebook`, `trellis`). Code that reads a layer's weight instead of calling the
    layer sees the unrounded one.

    Args:
        model: As in `quantize_`.
        spec: As in `quantize_`; None: layers compute with their own weights again.

    Returns:
        The model.

    Raises:
        InvalidInput: As in `quantize_`. A call raises it when a weight has become NaN or inf.
        InvalidType: The model is no module.
    """
    check_module(model, "fake_quantize_")
    if is_linear(model) or isinstance(model, FakeLinear):
        fake_quantize_(nn.ModuleDict({"layer": model}), spec)
        return model
    with unfaked(model):
        if spec is None:
            return model
        schemes, plan = schemes_of(model, spec, RTN())
        heads = untied_heads(model, schemes)
        own = {*heads, *heads.values()}  # `quantize_` unties them
        shared = {name: other for name, other in shared_weights(model).items() if name not in own}
        check_ties(schemes, shared, sharing_heads(model, schemes))
    put(model, schemes)
    model.anybit_formats = plan  # type: ignore[assignment]
    return model


def trained_for(model: nn.Module, schemes: Mapping[str, str]) -> Plan:
    """The plan that `fake_quantize_` was given; InvalidInput if it was not called.

    schemes: Of the layers that it changed.
    """
    if not schemes:
        raise InvalidInput(
            "quantize_ needs a format, such as 'int4:group=64'; only a model of fake_quantize_ has "
            "one"
        )
    plan: Plan | None = getattr(model, "anybit_formats", None)
    with suppress(InvalidInput):  # a part of the model, or layers were replaced since then
        if plan and outline_of(model).schemes(plan) == schemes:
            return plan
    return {"*": None, **schemes}


def quantized(model: nn.Module, spec: Spec | Plan, quantizer: Quantizer) -> nn.Module:
    """`quantize_` of a model without layers that round."""
    calibration = calibration_of(quantizer) if quantizer.needs else None
    schemes, plan = schemes_of(model, spec, quantizer)
    heads = untied_heads(model, schemes)
    linear, others = apart(model, schemes)
    sharing = sharing_heads(model, schemes)
    with restored_on_error(model), untied(model, heads), under_all_names(model):
        check_ties(schemes, shared_weights(model), sharing)
        take_apart(model, linear)
        for name in reversed(schemes):  # embeddings are the last
            check_real(cast(Tensor, model.get_submodule(name).weight), name)
        for name, parameter in model.named_parameters():
            check_finite(parameter, name)
        quantize_embeddings(model, others, quantizer)
        if calibration is None:
            quantize_weights(model, linear, quantizer)
        elif linear:
            calibrate(model, linear, quantizer, calibration)
        forget_ties(model, sharing)
    model.anybit_formats = plan  # type: ignore[assignment]
    record(model, plan_in(model))
    return model


def schemes_of(
    model: nn.Module, spec: Spec | Plan, quantizer: Quantizer
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Schemes of the layers to quantize, and the plan that says so; InvalidInput as `quantize_`."""
    refuse_adapters(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidInput(f"{name} has no shape yet; call the model once, then quantize it")
    done = sum(1 for _ in quantized_modules(model))
    try:
        schemes, plan = quantized_plan(outline_of(model), spec, quantizer)
    except InvalidInput as error:
        if not done:
            raise
        raise InvalidInput(
            f"{done} layers are quantized already, and of the others: {error}; load the dense "
            "model to choose other formats"
        ) from None
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidInput(
            f"{type(model).__name__} is on the meta device or offloaded, and has no weights to "
            "quantize; load it first, or quantize its checkpoint (anybit quantize)"
        )
    return schemes, plan


def quantized_plan(
    outline: Outline, spec: Spec | Plan, quantizer: Quantizer
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Schemes of the layers to quantize, and the full plan, with the formats of the quantizer.

    Raises:
        InvalidInput: As `resolve` does.
    """
    plan = outline.full_plan(spec)
    schemes = outline.schemes(plan)
    others = outline.sharing(schemes).keys() | outline.words.keys()
    linear = {name: scheme for name, scheme in schemes.items() if name not in others}
    plan = planned(quantizer, plan, outline.layers, linear)
    return outline.schemes(plan), plan


def quantize_weights(model: nn.Module, schemes: Mapping[str, str], quantizer: Quantizer) -> None:
    """Quantize the named layers by their weights alone, in place."""
    total = sum(linear_at(model, name).weight.numel() for name in schemes)
    with progress("quantizing", total) as step:
        for name, scheme in schemes.items():
            fmt, activation = parse_scheme(scheme)
            layer = linear_at(model, name)
            packed = quantize_weight(quantizer, layer.weight.detach(), fmt)
            replace(model, name, QuantLinear.instead_of(layer, packed, activation))
            step(layer.weight.numel(), name)


def quantize_tensor(w: Tensor, spec: str | Format, quantizer: Quantizer | None = None) -> Packed:
    """Quantize one weight.

    Args:
        w: Weights (N, K) of any float dtype.
        spec: A format, or its spec string.
        quantizer: A data-free quantizer; `RTN()` by default.

    Returns:
        The packed weight, on the device of `w`.

    Raises:
        InvalidInput: The format is unknown or cannot store the shape, `w` holds NaN or inf, or the
            quantizer needs calibration.
        InvalidType: `w` is no tensor of a floating-point dtype.
    """
    fmt = get_format(spec)
    if not isinstance(w, Tensor):
        raise InvalidType(f"a weight is a tensor (N, K), not {type(w).__name__}")
    check_real(w, "weight")
    if w.is_meta:
        raise InvalidInput("the weight is on the meta device, and has no values; load it first")
    if w.ndim != 2:
        raise InvalidInput(f"a weight has shape (N, K); found {tuple(w.shape)}")
    fmt.check(*w.shape)
    check_finite(w, "weight")
    return quantize_weight(quantizer or RTN(), w, fmt)
