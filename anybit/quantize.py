"""`quantize_`: replace the linear layers of a model by quantized ones, in place."""

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from anybit.dispatch import parse_scheme, scheme_name
from anybit.experts import (
    MIXTRALS,
    expert_layers,
    fused_experts,
    is_fused,
    published,
    split,
    unpublished,
)
from anybit.format import Format
from anybit.linear import QuantLinear, check_finite
from anybit.progress import progress
from anybit.quantizers import calibrate
from anybit.quantizers.calibrate import Calibrated
from anybit.quantizers.rtn import RTN

log = logging.getLogger(__name__)

Spec = str | Format
Plan = Mapping[str, Spec | None]
HEADS = ("lm_head", "embed_out", "output_projection")  # output layers, kept unless named
METHOD, VERSION = "anybit", 1  # in a checkpoint's config.json; VERSION is that of its layout


def quantize_(
    model: nn.Module,
    spec: Spec | Plan,
    quantizer: RTN | Calibrated | None = None,
    *,
    show_progress: bool | None = None,
) -> nn.Module:
    """Quantize a model's linear layers in place and return it.

    spec: one format for all of them, or `{glob: format or None}` over module names, in which the
        last match wins and None keeps a layer as it is. The output head (`lm_head`) and embeddings
        are kept, unless a pattern other than "*" names the head. Formats are spec strings,
        with `@int8` or `@fp8` for activations quantized per token ("liquid@int8"). Experts are
        layers like "model.layers.0.mlp.experts.7.down_proj", however the model holds them.
    quantizer: how codes are chosen; round to nearest by default. A calibrated one (GPTQ, Smooth)
        runs the model on text, block by block, each block after quantized ones.

    An error or an interrupt leaves the model as it was. Raises ValueError for unknown formats,
    patterns that match no layer, layers that no pattern matches, shapes that a format cannot
    store, and NaN or inf.
    """
    shapes = dense_layers(model)
    if not shapes:
        done = any(isinstance(m, QuantLinear) for m in model.modules())
        raise ValueError(
            "the model is quantized already; load the dense one to choose other formats"
            if done
            else f"{type(model).__name__} has no nn.Linear layers to quantize"
        )
    schemes = resolve(shapes, spec)
    shared = shared_weights(model)
    with calibrate.restored_on_error(model):
        split(model, schemes)
        for name in schemes:
            if name in shared:
                raise ValueError(
                    f"{name} shares its weight with {shared[name]}; untie them first, or keep it: "
                    f"{{'*': ..., '{name}': None}}"
                )
            check_finite(calibrate.linear_at(model, name).weight, f"{name}.weight")
        if isinstance(quantizer, Calibrated):
            calibrate.run(model, schemes, quantizer, show_progress)
        else:
            quantize_weights(model, schemes, quantizer or RTN(), show_progress)
    record(model, plan_of(spec))
    return model


def dense_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes (N, K) of a model's dense linear layers, those of its experts included.

    Experts that the model holds in a layout that `experts.split` does not know stay as they are,
    which is logged.
    """
    known = {name for name, _ in fused_experts(model)}
    other = [name for name, m in model.named_modules() if is_fused(m) and name not in known]
    if other:
        log.warning(
            "the experts of %d blocks stay dense, since they have a bias or another layout than "
            "(experts, N, K): %s, ...", len(other), other[0],
        )  # fmt: skip
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {n: tuple(m.weight.shape) for n, m in linears.items()} | expert_layers(model)


def quantize_weights(
    model: nn.Module, schemes: Mapping[str, str], quantizer: RTN, show_progress: bool | None
) -> None:
    """Quantize the named layers by their weights alone; replace them when all are ready."""
    linears = {name: calibrate.linear_at(model, name) for name in schemes}
    ready = {}
    total = sum(linears[name].weight.numel() for name in schemes)
    with progress("quantizing", total, show_progress) as step:
        for name, scheme in schemes.items():
            fmt, activation = parse_scheme(scheme)
            layer = linears[name]
            packed = quantizer.quantize(layer.weight.detach(), fmt)
            ready[name] = QuantLinear(packed, layer.bias, activation)
            step(layer.weight.numel(), name)
    for name, quantized in ready.items():
        replace(model, name, quantized)


def resolve(shapes: Mapping[str, tuple[int, ...]], spec: Spec | Plan) -> dict[str, str]:
    """Names and shapes (N, K) of linear layers -> the scheme of each layer to be quantized."""
    plan = plan_of(spec)
    unused, out = set(plan), {}
    for name, shape in shapes.items():
        matches = patterns_for(name, plan)
        unused -= set(matches) | {p for p in plan if p == "*" and is_head(name)}
        if not matches:
            if is_head(name):
                continue
            raise ValueError(
                f"no pattern matches layer {name!r}; add '*': None to keep all other layers "
                f"as they are, or '*': FORMAT to quantize them (patterns: {', '.join(plan)})"
            )
        scheme = plan[matches[-1]]
        if scheme is None:
            continue
        try:
            parse_scheme(scheme)[0].check(*shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        out[name] = scheme
    if unused - {"lm_head"}:
        raise ValueError(
            f"no layer matches {', '.join(map(repr, sorted(unused)))}; layers are named like "
            f"{', '.join(map(repr, list(shapes)[:3]))}"
        )
    if not out:
        raise ValueError("every layer is kept as it is (None): nothing to quantize")
    return out


def patterns_for(name: str, plan: Plan) -> list[str]:
    """The patterns of a plan that match a layer; the last one decides.

    A layer of Mixtral's may be called as its checkpoint or as its model calls it.
    """
    names = {name, unpublished(name, MIXTRALS[0]), published(name, MIXTRALS[0])}
    matches = [p for p in plan if any(fnmatchcase(n, p) for n in names)]
    return [p for p in matches if not (p == "*" and is_head(name))]


def plan_of(spec: Spec | Plan | Iterable[tuple[str, Spec | None]]) -> dict[str, str | None]:
    """The plan that a spec, or a list of (pattern, spec), stands for, in canonical spec strings."""
    plan: dict[str, Spec | None] = {"*": spec} if isinstance(spec, Spec) else dict(spec)
    return {p: None if value is None else canonical(value) for p, value in plan.items()}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """What config.json says about a model that was quantized by this plan.

    `formats` maps patterns to formats, or is a list of such pairs when the patterns are in another
    order than the alphabet's: transformers sorts the keys of config.json, and the last match wins.
    """
    formats = dict(plan) if list(plan) == sorted(plan) else [list(pair) for pair in plan.items()]
    return {"quant_method": METHOD, "version": VERSION, "formats": formats}


def record(model: nn.Module, plan: dict[str, str | None] | None) -> None:
    """Note the plan on a model and in the config of a transformers model; None removes it."""
    model.anybit_formats = plan  # type: ignore[assignment]
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    if plan is not None:  # so that `save_pretrained` writes it too
        config.quantization_config = quantization_config(plan)  # type: ignore[union-attr]
    elif hasattr(config, "quantization_config"):
        del config.quantization_config  # type: ignore[union-attr]


def canonical(spec: Spec) -> str:
    return spec.spec if isinstance(spec, Format) else scheme_name(*parse_scheme(spec))


def is_head(name: str) -> bool:
    return name.rpartition(".")[2] in HEADS


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight is another module's as well (tied embeddings) -> that module."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            owners.setdefault(id(weight), []).append(name)
    return {
        name: next(other for other in names if other != name)
        for names in owners.values()
        if len(names) > 1
        for name in names
    }


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def quantized_layers(model: nn.Module) -> Iterable[tuple[str, QuantLinear]]:
    """Names and layers that are quantized."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, QuantLinear))


def dequantize_(model: nn.Module) -> nn.Module:
    """Turn quantized layers back into dense ones that hold the decoded weights, in place.

    For speed where memory is no matter: a CPU then decodes each weight once instead of on every
    call. Activations are no longer quantized.
    """
    for name, layer in list(quantized_layers(model)):
        dtype = next((p.dtype for p in model.parameters()), layer.dequantize().dtype)
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
        dense.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        dense.bias = layer.bias  # type: ignore[assignment]
        replace(model, name, dense)
    record(model, None)
    return model
